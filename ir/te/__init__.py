"""Tensor expressions: what an op computes, as scalar expressions over index variables."""

from dnnc.ir.te.core import COMBINE as COMBINE
from dnnc.ir.te.core import UPDATES as UPDATES
from dnnc.ir.te.core import Scatter as Scatter
from dnnc.ir.te.core import Stage as Stage
from dnnc.ir.te.core import Tensor as Tensor
from dnnc.ir.te.core import checks as checks
from dnnc.ir.te.core import compute as compute
from dnnc.ir.te.core import flops as flops
from dnnc.ir.te.core import form as form
from dnnc.ir.te.core import identity as identity
from dnnc.ir.te.core import operands as operands
from dnnc.ir.te.core import placeholder as placeholder
from dnnc.ir.te.core import placeholder_axis as placeholder_axis
from dnnc.ir.te.core import recur as recur
from dnnc.ir.te.core import reduce as reduce
from dnnc.ir.te.core import scatter as scatter
from dnnc.ir.te.core import sizes as sizes
from dnnc.ir.te.core import stages as stages
from dnnc.ir.te.core import terms as terms
from dnnc.ir.te.core import text as text
from dnnc.ir.te.core import values_of as values_of
