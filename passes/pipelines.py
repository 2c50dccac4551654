"""The compiler's middle, as one flat list: graph passes in order, each with its reason; then plan, lower, schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dnnc.ir.builder import Builder
from dnnc.ir.graph import Graph, Value
from dnnc.passes.graph.fuse import is_view, plan_fusion
from dnnc.passes.graph.layout import assign_layouts
from dnnc.passes.graph.memory_plan import plan_memory
from dnnc.passes.program import Program, build_steps
from dnnc.passes.schedule.problem import Template
from dnnc.passes.schedule.step import Choose, first_choice


def copy_outputs(graph: Graph) -> bool:
    """Outputs that are inputs, constants, views of those, or given twice get memory of their own through a copy."""
    changed = False
    seen: set[Value] = set()
    for k, v in enumerate(graph.outputs):
        root = v
        while root.node is not None and is_view(root.node):
            source = root.node.inputs[0]
            assert source is not None
            root = source
        if root.node is None or root in seen:
            graph.outputs[k] = Builder(graph, None, v.locs).op("pack", v, layout=None)
            changed = True
        seen.add(root)
    return changed


def compile_program(graph: Graph, lanes: int, templates: Sequence[Template], choose: Choose = first_choice, opt_level: int = 3) -> Program:
    """A graph that went through the graph passes -> scheduled kernels with a memory plan."""
    if opt_level >= 3:
        assign_layouts(graph, lanes)
    copy_outputs(graph)
    fusion = plan_fusion(graph, fuse=opt_level >= 3)
    memory = plan_memory(graph, fusion)
    return Program(graph, fusion, memory, build_steps(graph, fusion, memory, templates, choose))


GraphPass = Callable[[Graph], bool]
