"""Graphs as ONNX models: `dnnc.to_onnx`.

`graph.py` walks a graph and its subgraphs, `writer.py` makes nodes, constants and shapes, the other files have one
small function for each op: arithmetic, layers, movement, control, and the rest. An op without such a function becomes
the ops that it is defined by. `files.py` writes.
"""

from dnnc.export.graph import to_onnx

__all__ = ["to_onnx"]
