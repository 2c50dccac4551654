"""Post-training quantization: `dnnc.quantize` and the command `dnnc quantize`.

`entry.py` has the steps. `onnx_graph.py` opens the model as ONNX, `layers.py` finds what can be quantized. `data.py`
and `calibration.py` run it on samples, `ranges.py` and `rounding.py` make numbers of what was seen. `placement.py`
decides which values become bytes, `write.py` writes the model. `measure.py`, `simulation.py` and `choice.py` time and
judge it.
"""
