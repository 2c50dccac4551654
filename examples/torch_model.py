"""A PyTorch model in both ways: inside of PyTorch by torch.compile, and as a program of its own by torch.export and
dnnc.compile.

    python examples/torch_model.py [--size 16] [--steps 2] [--device cuda:0]

It needs `pip install -e '.[torch]'`. The first way is for programs that stay in Python: what torch cannot put into one
graph runs in Python, and the weights are the module's own, so what is written there counts in the next call. The second
is for a model that is done: a callable with a report and a profile, which also takes NumPy arrays; its batch size is
open. Look at the differences from eager PyTorch, before and after the weights change.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

try:
    import torch
    from torch import nn
except ImportError:
    sys.exit("this example needs PyTorch: pip install -e '.[torch]' in the clone of dnnc")

import dnnc


class Residual(nn.Module):
    """Two convolutions, what came in added to what comes out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


def network(channels: int, blocks: int) -> nn.Module:
    """Images [batch, 3, height, width] to ten logits."""
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.ReLU())
    body = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
    return nn.Sequential(stem, body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).eval()


def check(what: str, got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    print(f"{what}: as eager PyTorch, to {float((got - expected).abs().max()):.0e}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A PyTorch model, compiled in two ways.")
    parser.add_argument("--size", type=int, default=16, help="channels")
    parser.add_argument("--steps", type=int, default=2, help="residual blocks")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0, where PyTorch has CUDA")
    args = parser.parse_args(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        sys.exit(
            f"this PyTorch ({torch.__version__}) has no CUDA device: run it with --device cpu, or install a build for "
            "CUDA"
        )
    torch.manual_seed(0)
    model = network(args.size, args.steps).to(args.device)
    x = torch.randn(4, 3, 24, 24, device=args.device)

    with torch.no_grad():
        fast = torch.compile(model, backend="dnnc")
        check("torch.compile", fast(x), model(x))
        model[-1].weight.mul_(2)  # what a training step would do: nothing is compiled for it
        check("torch.compile, other weights", fast(x), model(x))

        exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
        program = dnnc.compile(exported, target="llvm" if args.device == "cpu" else args.device)
        for batch in (x, x[:1], torch.cat([x, x])):
            check(f"torch.export and dnnc.compile, batch of {len(batch)}", program(batch), model(batch))
        check("the same from NumPy", torch.from_numpy(program(x.cpu().numpy())), model(x).cpu())

    report = program.report.programs[0]
    print(f"one program for all batch sizes: {report.calls} calls of {len(report.kernels)} kernels")
    for k in report.kernels:
        print(f"  {k.count} x {k.name}, schedule {k.choice.partition('(')[0]}")


if __name__ == "__main__":
    main()
