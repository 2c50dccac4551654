"""Pruning after training: `dnnc.prune`, `dnnc.explore_pruning` and the command `dnnc prune`.

`entry.py` has the steps. The model is opened and its layers are found as for quantization (`dnnc.quantization`).
`masks.py` chooses single weights, groups of four and blocks. `channels.py` finds which channels of which tensors go
together, `structured.py` removes some of them, so that the graph shrinks. `trial.py` measures errors without a
compilation for each, `explore.py` scans methods and sparsities.
"""
