"""What graph passes may ask about a GPU."""

from __future__ import annotations

from dnnc.backends.cuda.sparse_weights import weigh_sparse
from dnnc.backends.cuda.spelling import supported
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import decoded, simt
from dnnc.backends.cuda.templates.reduction import recurrence
from dnnc.backends.runtime.device import PARAMETER_ALIGN
from dnnc.ir.target import GPU_SPLIT, TargetFacts


def facts(gpu: GpuTarget, numerics: str) -> TargetFacts:
    """Threads have no vectors of their own: `lanes` is 1."""
    return TargetFacts(
        lanes=1,
        native_intrinsics=supported(numerics),
        channels_last=True,
        multiplies_bytes=True,
        multiplies_float8=gpu.has_wgmma,
        decodes_weights=True,
        decodes=decoded.takes,
        # an infinity times a zero that is skipped is no NaN
        weighs_sparse=None if numerics == "strict" else lambda graph, n: weigh_sparse(graph, n, gpu),
        serial_rows=False,
        align=PARAMETER_ALIGN,
        reductions=GPU_SPLIT,
        fuses_attention=True,
        fuses_norm=decoded.makes_rows,
        stores_several=simt.stores_several,
        supports_scan_kernel=lambda form: recurrence.takes(form, gpu),
    )
