"""PyTorch programs as graphs. In: an nn.Module, an ExportedProgram, or an fx graph of ATen operators. Out: a graph.

`export.py` reads modules, `importer.py` walks an fx graph and calls the converter of each operator. These are in
`operators.py` and the modules that it joins, one function each, which see their call as `call.Call`. Sizes are
`dims.py`'s, places in the user's code `source.py`'s.
"""
