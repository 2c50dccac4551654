"""All ops of the graph IR by name: the one list of families. An op's record stands whole in its family's file."""

from dnnc.ir.op import OpDef
from dnnc.ir.ops.activations import ACTIVATION_OPS
from dnnc.ir.ops.attention import ATTENTION_OPS
from dnnc.ir.ops.batch_norm import BATCH_NORM_OPS
from dnnc.ir.ops.binary import BINARY_OPS
from dnnc.ir.ops.bits import BITS_OPS
from dnnc.ir.ops.cast import CAST_OPS
from dnnc.ir.ops.control import CONTROL_OPS
from dnnc.ir.ops.conv import CONV_OPS
from dnnc.ir.ops.conv_backward import CONV_BACKWARD_OPS
from dnnc.ir.ops.create import CREATE_OPS
from dnnc.ir.ops.csr import CSR_OPS
from dnnc.ir.ops.decode import DECODE_OPS
from dnnc.ir.ops.derivatives import DERIVATIVE_OPS
from dnnc.ir.ops.digits import DIGITS_OPS
from dnnc.ir.ops.dynamic import DYNAMIC_OPS
from dnnc.ir.ops.elementwise import ELEMENTWISE_OPS
from dnnc.ir.ops.fft import FFT_OPS
from dnnc.ir.ops.host import HOST_OPS
from dnnc.ir.ops.image import IMAGE_OPS
from dnnc.ir.ops.index import INDEX_OPS
from dnnc.ir.ops.inverse import INVERSE_OPS
from dnnc.ir.ops.linalg import LINALG_OPS
from dnnc.ir.ops.matmul import MATMUL_OPS
from dnnc.ir.ops.movement import MOVEMENT_OPS
from dnnc.ir.ops.normalize import NORMALIZE_OPS
from dnnc.ir.ops.pool import POOL_OPS
from dnnc.ir.ops.pool_backward import POOL_BACKWARD_OPS
from dnnc.ir.ops.quantize import QUANTIZE_OPS
from dnnc.ir.ops.random import RANDOM_OPS
from dnnc.ir.ops.recurrence import RECURRENCE_OPS
from dnnc.ir.ops.reduce import REDUCE_OPS
from dnnc.ir.ops.resize import RESIZE_OPS
from dnnc.ir.ops.roi import ROI_OPS
from dnnc.ir.ops.sort import SORT_OPS
from dnnc.ir.ops.strings import STRING_OPS
from dnnc.ir.ops.suppress import SUPPRESS_OPS
from dnnc.ir.ops.trees import TREE_OPS

FAMILIES: dict[str, tuple[OpDef, ...]] = {
    "elementwise": (*ELEMENTWISE_OPS, *ACTIVATION_OPS),
    "cast": CAST_OPS,
    "reduce": REDUCE_OPS,
    "matmul": MATMUL_OPS,
    "sparse": CSR_OPS,
    "attention": ATTENTION_OPS,
    "conv": (*CONV_OPS, *CONV_BACKWARD_OPS),
    "pool": (*POOL_OPS, *POOL_BACKWARD_OPS),
    "normalize": (*NORMALIZE_OPS, *BATCH_NORM_OPS),
    "movement": MOVEMENT_OPS,
    "index": INDEX_OPS,
    "create": CREATE_OPS,
    "resize": RESIZE_OPS,
    "quantize": QUANTIZE_OPS,
    "decode": DECODE_OPS,
    "binary": BINARY_OPS,
    "control": CONTROL_OPS,
    "recurrence": RECURRENCE_OPS,
    "random": RANDOM_OPS,
    "inverse": INVERSE_OPS,
    "trees": TREE_OPS,
    "sort": SORT_OPS,
    "digits": DIGITS_OPS,
    "fft": FFT_OPS,
    "roi": ROI_OPS,
    "linalg": LINALG_OPS,
    "bits": BITS_OPS,
    "strings": STRING_OPS,
    "dynamic": DYNAMIC_OPS,
    "suppress": SUPPRESS_OPS,
    "host": HOST_OPS,
    "image": IMAGE_OPS,
    "derivatives": DERIVATIVE_OPS,
}

OPS: dict[str, OpDef] = {op.name: op for family in FAMILIES.values() for op in family}
