"""Modules and exported programs through `dnnc.compile`: numbers, structures, dynamic sizes, weights that change, and
what is refused.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch_modules import MODULES, made

import dnnc
from dnnc.ir.errors import InputError, ModelError, UnsupportedError


def same(found: Any, wanted: Any, bound: float = 3e-5) -> None:
    a, b = pytree.tree_flatten(found), pytree.tree_flatten(wanted)
    assert a[1] == b[1], f"{a[1]} and {b[1]}"
    for x, y in zip(a[0], b[0]):
        if not isinstance(y, Tensor):
            assert x == y
            continue
        assert isinstance(x, Tensor) and x.dtype is y.dtype and x.shape == y.shape, f"{x} {y}"
        assert torch.allclose(
            x.double(), y.double(), rtol=bound, atol=bound * max(1.0, float(y.abs().max()) if y.numel() else 1.0)
        ), (x - y).abs().max()


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str) -> None:
    module, args = made(name)
    with torch.no_grad():
        same(dnnc.compile(module, inputs=args, target="reference")(*args), module(*args))


@pytest.mark.family("cases")
@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_native(name: str) -> None:
    module, args = made(name)
    with torch.no_grad():
        same(dnnc.compile(module, inputs=args, threads=1)(*args), module(*args))


@pytest.mark.slow
def test_an_exported_program_and_numpy_arrays() -> None:
    module, (x,) = made("cnn")
    f = dnnc.compile(torch.export.export(module, (x,)), threads=1)
    y = f(x.numpy())
    assert isinstance(y, np.ndarray) and np.allclose(y, module(x).detach().numpy(), atol=1e-5)
    assert [s.name for s in f.inputs] == ["input"] and "conv" in str(f.report)


@pytest.mark.slow
def test_a_dynamic_size_has_its_name() -> None:
    module, _ = made("causal")
    f = dnnc.compile(module, inputs=[dnnc.Spec(("batch", 5, 16))], dims={"batch": (1, 9)}, threads=1)
    assert f.inputs[0].shape == ("batch", 5, 16)
    for n in (1, 2, 9):
        x = torch.randn(n, 5, 16)
        same(f(x), module(x).detach())
    with pytest.raises(InputError, match="batch"):
        f(torch.randn(10, 5, 16))


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Any:
        n = x.shape[0]
        return x.reshape(-1) * n, x[:2], torch.arange(n * 2 + 1, dtype=x.dtype), x.new_full((n,), n), n + 1


@pytest.mark.slow
def test_sizes_are_numbers_too() -> None:
    n = torch.export.Dim("n", min=2, max=40)
    f = dnnc.compile(torch.export.export(Sizes(), (torch.randn(4, 3),), dynamic_shapes=({0: n},)), target="reference")
    for k in (2, 7):
        x = torch.randn(k, 3)
        same(f(x), Sizes()(x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    module, (x,) = made("mlp")
    module, x = module.to(dtype), x.to(dtype)
    y = dnnc.compile(module, inputs=(x,), threads=1)(x)
    assert y.dtype is dtype
    wanted = module.double()(x.double())
    assert (y.double() - wanted).abs().max() < {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-6}[dtype]


@pytest.mark.slow
def test_weights_are_shared_with_the_module() -> None:
    module, (x,) = made("cnn")
    f = dnnc.compile(module, inputs=(x,), threads=1)
    before = f.programs
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(1.5)
    same(f(x), module(x).detach())
    module.load_state_dict({n: t * 0.5 if t.is_floating_point() else t for n, t in module.state_dict().items()})
    same(f(x), module(x).detach())
    module[0].weight.data = torch.randn_like(module[0].weight)
    same(f(x), module(x).detach())
    module[0].weight.data.mul_(2)  # which torch does not count
    f.refit()
    same(f(x), module(x).detach())
    assert f.programs == before


@pytest.mark.slow
def test_saved_and_loaded(tmp_path: Path) -> None:
    module, (x,) = made("mlp")
    f = dnnc.compile(module, inputs=(x,), threads=1)
    f.save(tmp_path / "m.dnnc")
    assert np.allclose(dnnc.load(tmp_path / "m.dnnc")(x.numpy()), module(x).detach().numpy(), atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3)


class Finds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


@pytest.mark.slow
def test_an_operator_without_a_form_is_named_with_its_line() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"test_modules.py:\d+: aten.rand.default has no form in a graph: random numbers.*\n    return x \+ "
        r"torch.rand",
    ):
        dnnc.compile(Draws(), inputs=(torch.ones(3),))
    with pytest.raises(UnsupportedError, match="as many elements as the data says"):
        dnnc.compile(Finds(), inputs=(torch.ones(3),))


@pytest.mark.slow
def test_statistics_of_training_are_refused() -> None:
    module, (x,) = made("cnn")
    with pytest.raises(UnsupportedError, match=r"writes to '1.running_mean'.*\.eval\(\)"):
        dnnc.compile(module.train(), inputs=(x,))


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.slow
def test_what_torch_cannot_export() -> None:
    with pytest.raises(ModelError, match=r"torch\.export\.export cannot export Branches"):
        dnnc.compile(Branches(), inputs=(torch.ones(3),))


@pytest.mark.slow
def test_other_arguments_than_the_examples() -> None:
    module, args = made("several")
    f = dnnc.compile(module, inputs=args, target="reference")
    with pytest.raises(InputError, match=r"structure \(\(\(\*, \*\),\), {}\), got \(\(\*,\), {}\)"):
        f(torch.ones(2, 3))
    with pytest.raises(InputError, match=r"expected float32, got float64"):
        f(tuple(x.double() for x in args[0]))


def test_a_module_needs_examples() -> None:
    with pytest.raises(InputError, match=r"a module needs inputs=\[...\]"):
        dnnc.compile(nn.Linear(2, 2))


@pytest.mark.slow
def test_arguments_by_name_and_interpolation_as_one_operator() -> None:
    module, (x,) = made("resized")
    f = dnnc.compile(module, inputs={"input": x}, target="reference")
    same(f(input=x), module(x).detach())
    assert "resize" in str(f.graph) and "gather" not in str(f.graph)


class Fixed(nn.Module):
    def forward(self, x: Tensor, k: int) -> Tensor:
        return x * k


@pytest.mark.slow
def test_numbers_among_arguments_are_fixed() -> None:
    x = torch.ones(3)
    f = dnnc.compile(Fixed(), inputs=(x, 3), target="reference")
    same(f(x, 3), x * 3)
    with pytest.raises(InputError, match=r"argument 1 was 3 .* got 4"):
        f(x, 4)


@pytest.mark.slow
def test_compiling_a_module_warns_of_nothing() -> None:
    """PyTorch warns of its own deprecations while it exports; programs run with `python -W error` too."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = nn.Sequential(nn.Linear(3, 4), nn.ReLU()).eval()
        assert dnnc.compile(module, inputs=[torch.ones(2, 3)])(torch.ones(2, 3)).shape == (2, 4)
