"""A machine to tune for, from a target text: how kernels are made, its limits, its name in logs; no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.autotune.search.task import Setting
from dnnc.backends.base import Backend, Bench, Built
from dnnc.backends.registry import open_backend
from dnnc.ir.errors import TargetError
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.target import Limits
from dnnc.passes.base import PassContext, pass_context
from dnnc.passes.lower.expand import decompose
from dnnc.passes.schedule.problem import Choice, Problem, Template
from dnnc.passes.schedule.step import apply_choice


@dataclass(frozen=True)
class Machine:
    """A backend as the tuner sees it. Everything but `bench` works where the device is not."""

    backend: Backend

    @property
    def name(self) -> str:
        """For people: "znver5", "NVIDIA H200"."""
        return self.backend.machine_name

    @property
    def text(self) -> str:
        """For `Setting.target`: the same for equal machines, and `machine_of(text)` is this machine."""
        return self.backend.text

    @property
    def limits(self) -> Limits:
        limits = self.backend.limits
        if limits is None:
            raise TargetError(f"target {self.backend.name} cannot be tuned")
        return limits

    @property
    def exclusive(self) -> bool:
        """True if compiling on the host disturbs what is measured."""
        return self.backend.exclusive

    def templates(self, setting: Setting) -> Sequence[Template]:
        return self.backend.templates(setting.numerics, setting.rounded)

    def context(self, setting: Setting, precision: str | None = None) -> PassContext:
        """What graph passes ask, so that a graph becomes the kernels of a compilation."""
        facts = self.backend.facts(setting.numerics)
        return pass_context(facts, numerics=setting.numerics, precision=precision)

    def kernel(self, problem: Problem, choice: Choice, setting: Setting) -> Kernel:
        """Return the verified kernel as compiled. InternalError or VerifyError: the choice does not apply."""
        templates = (*self.templates(setting), *self.backend.library_templates(setting.numerics))
        intrinsics = self.backend.facts(setting.numerics).native_intrinsics
        return verify_kernel(decompose(apply_choice(problem, templates, choice), intrinsics))

    def applies(self, problem: Problem, choice: Choice, setting: Setting) -> bool:
        """Does a choice make a kernel that verifies? `space` may offer some that do not."""
        try:
            self.kernel(problem, choice, setting)
        except Exception:  # knobs may fail in any way
            return False
        return True

    def compile(self, kernel: Kernel, symbol: str) -> Built:
        """InternalError: the text does not compile. TargetError: there is no compiler."""
        return self.backend.compile_kernel(kernel, symbol)

    def symbol(self, text: str) -> str:
        """What to call the kernel with this text."""
        return self.backend.trial_symbol(text)

    def bench(self) -> Bench:
        """What times kernels in this process."""
        return self.backend.bench()


def machine_of(target: str) -> Machine:
    """The machine of a target: "llvm -mcpu=znver4 -threads=2", "cuda:1", "cuda -arch=sm_90a". Or TargetError."""
    return Machine(open_backend(target))
