"""What graph passes may ask about a CPU."""

from __future__ import annotations

from dnnc.backends.llvm import sparse_rows
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.spelling import supported
from dnnc.backends.llvm.templates import recurrence
from dnnc.ir.target import TargetFacts

PARALLEL_FROM = 2048  # elements: a second thread then saves more than its cold cache costs


def facts(cpu: CpuTarget, numerics: str) -> TargetFacts:
    """Kernels of whole loops reorder sums, so strict numerics have none."""
    scan = None if numerics == "strict" else lambda form: recurrence.takes(form, cpu)
    return TargetFacts(
        cpu.lanes,
        cpu.rates,
        cpu.l2,
        supported(numerics, cpu.feature_set),
        multiplies_bytes=True,
        packs_bytes=True,
        recodes_bytes=True,
        decodes_weights=True,
        runs_sparse_rows=cpu.vector_bits == 512 and sparse_rows.available(cpu.feature_set),
        parallel_from=PARALLEL_FROM,
        supports_scan_kernel=scan,
    )
