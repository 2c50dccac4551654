"""Graph IR: values, nodes and graphs, their text form, verifier and interpreter."""

from dnnc.ir.graph import show as show  # graphs print themselves
from dnnc.ir.graph.core import Copies as Copies
from dnnc.ir.graph.core import Graph as Graph
from dnnc.ir.graph.core import Node as Node
from dnnc.ir.graph.core import Value as Value
from dnnc.ir.graph.core import Variance as Variance
from dnnc.ir.graph.core import digest as digest
from dnnc.ir.graph.core import identifier as identifier
from dnnc.ir.graph.core import union as union
