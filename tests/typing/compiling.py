"""Compiling, loading and tuning: options are checked, results have types."""

import sys

import numpy as np
import onnx

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

import dnnc
import dnnc.array as xp
from dnnc.backends.runtime.program import Program
from dnnc.hybrid import HybridProgram
from dnnc.ir.graph import Graph
from dnnc.report import Report
from dnnc.tools.profile import Profile
from dnnc.tune_session import Tuned

x = np.zeros((8, 1, 8, 8), np.float32)

f = dnnc.compile("m.onnx", dims={"N": 8}, precision="fp16", threads=1, custom_ops={"my::Op": xp.tanh})
assert_type(f, dnnc.Executable)
assert_type(f.report, Report)
assert_type(f.inputs, tuple[dnnc.TensorSpec, ...])
assert_type(f.inputs[0].name, str)
assert_type(f.graph, Graph)
assert_type(f.options, dnnc.CompileOptions)
assert_type(f.source("asm"), str)
assert_type(f.profile(x), Profile)
assert_type(f.last_program(), Program | HybridProgram | None)
f.save("m.dnnc", small=True)
y = f(x)
y.sum()
a, b = f.run([x])
bound = f.bind([x], [np.empty((8, 10), np.float32)])
bound()
bound.check()

assert_type(dnnc.load("m.dnnc", threads=1), dnnc.Executable)
assert_type(dnnc.compile(xp.tanh, inputs=[dnnc.Spec((3,))]), dnnc.Executable)
assert_type(dnnc.from_onnx("m.onnx", dims={"N": 8}), Graph)
assert_type(dnnc.trace(xp.tanh, x), Graph)
assert_type(dnnc.to_onnx(f.graph), onnx.ModelProto)

tuned = dnnc.tune("m.onnx", budget=3.0, threads=1)
assert_type(tuned, Tuned)
assert_type(tuned.speedup, float)
assert_type(tuned.compile(threads=1), dnnc.Executable)

dnnc.compile("m.onnx", precison="fp16")  # error
dnnc.compile("m.onnx", threads="two")  # error
dnnc.compile("m.onnx", dims=8)  # error
dnnc.load("m.dnnc", treads=1)  # error
dnnc.tune("m.onnx", bugdet=3.0)  # error
dnnc.tune("m.onnx", budget="3s")  # error
tuned.compile(thread=1)  # error
f.sav("m.dnnc")  # error
print(f.inputs[0].nam)  # error
print(f.profile(x).bogus)  # error
print(y.bogus)  # error
bound.chekc()  # error
