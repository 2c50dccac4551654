"""`dnnc export`: a graph as an ONNX model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from dnnc.cli.arguments import parse_dims
from dnnc.cli.console import show_json, show_tables
from dnnc.cli.inspect import read_graph
from dnnc.cli.outputs import check_output, read_by
from dnnc.export import to_onnx
from dnnc.export.files import DATA
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes


def export_command(path: str, output: str, dims: tuple[str, ...], opset: int | None, as_json: bool) -> None:
    """Write graph text or a model, with the given dims fixed, as an ONNX model, and say what is in it."""
    check_output(output, (".onnx",), read_by(path), also=(f"{output}{DATA}",))
    model = to_onnx(read_graph(path, parse_dims(dims)), output, opset)
    size = sum(p.stat().st_size for p in (Path(output), Path(output + DATA)) if p.exists())
    counts = Counter(n.op_type for n in model.graph.node)
    said = {
        "path": output,
        "opset": model.opset_import[0].version,
        "bytes": size,
        "operators": dict(counts.most_common()),
    }
    if as_json:
        show_json(said)
        return
    rows = [(op, str(n)) for op, n in counts.most_common()]
    show_tables([Table(f"{output}: opset {said['opset']}, {show_bytes(size)}", ("operator", "nodes"), tuple(rows))])
