"""Every command, on small models: what it prints, what its JSON holds, and the exit code of every kind of failure."""

from __future__ import annotations

import io
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_line import dnnc, dnnc_json
from onnx import TensorProto, helper
from rich.console import Console

from dnnc.ir.errors import InternalError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import parse_kernel
from dnnc.report.bar import Bar

ROOT = Path(__file__).resolve().parents[2]
W = np.arange(12, dtype=np.float32).reshape(3, 4) / 8 - 0.5
GRAPH = (
    "def g(x: f32[4, 8], *, c: f32[8] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]):\n    y = add(neg(neg(x)), c)\n"
    "    return y\n"
)
COMMANDS = (
    "compile",
    "run",
    "bench",
    "profile",
    "inspect",
    "opt",
    "export",
    "passes",
    "targets",
    "ops",
    "cache info",
    "cache clear",
)


def save_model(
    path: Path, nodes: list[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: dict[str, Any]
) -> None:
    initializers = [onnx.numpy_helper.from_array(a, n) for n, a in weights.items()]
    graph = helper.make_graph(nodes, path.stem, list(inputs), list(outputs), initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def tensor(name: str, shape: Sequence[Any], dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


@pytest.fixture(scope="module", autouse=True)
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models, made the current one, and a cache of its own."""
    folder = tmp_path_factory.mktemp("cli")
    dense = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="dense"),
        helper.make_node("Relu", ["h"], ["y"], name="act"),
    ]
    save_model(folder / "open.onnx", dense, [tensor("x", ["N", 3])], [tensor("y", ["N", 4])], {"w": W})
    save_model(folder / "fixed.onnx", dense, [tensor("x", [2, 3])], [tensor("y", [2, 4])], {"w": W})
    total = [helper.make_node("Add", ["a:0", "b"], ["s"]), helper.make_node("Neg", ["s"], ["n"])]
    ints = [tensor(n, [5], TensorProto.INT64) for n in ("a:0", "b", "s", "n")]
    save_model(folder / "two.onnx", total, ints[:2], ints[2:], {})
    shaped = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    save_model(
        folder / "late.onnx",
        shaped,
        [tensor("x", [6]), tensor("to", [2], TensorProto.INT64)],
        [tensor("y", ["a", "b"])],
        {},
    )
    save_model(
        folder / "odd.onnx",
        [helper.make_node("Frobnicate", ["x"], ["y"], name="frob")],
        [tensor("x", [2])],
        [tensor("y", [2])],
        {},
    )
    (folder / "text.onnx").write_text("this is no model")
    (folder / "g.py").write_text(GRAPH)
    (folder / "bad.py").write_text("def g(x: f32[4]):\n    y = add(x, z)\n    return y\n")
    np.save(folder / "x.npy", np.ones((2, 3), np.float32))
    np.save(folder / "double.npy", np.ones((2, 3)))
    np.save(folder / "wide.npy", np.ones((2, 5), np.float32))
    np.savez(folder / "both.npz", **{"a:0": np.arange(5), "b": np.ones(5, np.int64)})
    with pytest.MonkeyPatch.context() as m:
        m.chdir(folder)
        m.setenv("DNNC_CACHE_DIR", str(folder / "cache"))
        yield folder


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.family("cases")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str) -> None:
    assert f"Example:  dnnc {command}" in dnnc(*command.split(), "--help")


def test_help_lists_every_command() -> None:
    text = dnnc("--help")
    assert all(c.split()[0] in text for c in COMMANDS)


def spent(code: str) -> tuple[float, str]:
    """The least seconds of processor time that a Python process of its own takes for some code, and what it prints."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds), out


@pytest.mark.slow
def test_help_is_quick_and_loads_no_numpy() -> None:
    seconds, out = spent(
        "import sys\nfrom dnnc.cli import main\ntry:\n    main(['--help'])\nfinally:\n    print('loaded', *sys.modules)"
    )
    assert "Compile a model" in out
    loaded = out.partition("\nloaded ")[2].split()
    assert loaded and not {"numpy", "onnx", "llvmlite"} & set(loaded)
    least, _ = spent(
        "import typer\napp = typer.Typer()\n@app.command()\ndef one(name: str) -> None: ...\napp(['--help'])"
    )
    assert seconds < 2 * least, (
        f"dnnc --help takes {seconds:.2f} s of processor time, the help of one command by typer {least:.2f}"
    )


# --- exit codes -------------------------------------------------------------------------------------------------------

FAILURES: list[tuple[str, int, str]] = [
    ("compile nowhere.onnx", 1, "ModelError: there is no file nowhere.onnx"),
    ("compile .", 1, "is not a file"),
    ("compile text.onnx", 1, "looks like text"),
    ("compile odd.onnx", 1, "Frobnicate"),
    ("compile bad.py", 1, "line 2"),
    ("compile open.onnx", 1, "the size of N is open; give it with --dims N=1"),
    ("compile open.onnx --dims N=1 --target tpu", 1, "TargetError"),
    ("compile open.onnx --dims N=1 --opt-level 7", 2, "expected 0, 1, 2 or 3"),
    ("compile g.py --dims M=1", 1, "no symbolic dim 'M'"),
    ("compile open.onnx --dims N", 2, "expected NAME=SIZE"),
    ("compile open.onnx --dims N=two", 2, "expected NAME=SIZE"),
    ("compile open.onnx --dims N=1,N=2", 2, "given twice"),
    ("compile open.onnx --dims N=9..3", 1, "low <= high"),
    ("compile open.onnx --verify often", 2, "often"),
    ("compile open.onnx --threads 0", 2, "threads"),
    ("compile late.onnx", 1, "depend on the contents"),
    ("compile", 2, "Missing argument"),
    ("conpile x", 2, "conpile"),
    ("run fixed.onnx --input x=double.npy", 1, "expected float32, got float64; convert it with .astype('float32')"),
    ("run fixed.onnx --input wide.npy", 1, "must be 3"),
    ("run open.onnx --input wide.npy", 1, "must be 3"),
    ("run open.onnx", 1, "--dims N=1"),
    ("run fixed.onnx --input z=x.npy", 1, "no input 'z'; the model's inputs are x"),
    ("run fixed.onnx --input x=nothing.npy", 1, "there is no file nothing.npy"),
    ("run fixed.onnx --input x=text.onnx", 1, "no .npy or .npz file"),
    ("run two.onnx --input x.npy", 1, "say for which input"),
    ("run two.onnx --input b=ones", 1, "no array is given for a:0"),
    ("run fixed.onnx --output y.txt", 2, ".npz"),
    ("run fixed.onnx --output nowhere/y.npz", 1, "nowhere"),
    ("run fixed.onnx --repeat 0", 2, "repeat"),
    ("inspect fixed.onnx --stage ptx", 1, "there is no stage 'ptx' for target llvm"),
    ("inspect fixed.onnx --stage llvm --kernel 9", 1, "there are 0 matmul_relu"),
    ("inspect fixed.onnx --stage llvm --target cuda", 1, "TargetError"),
    ("opt g.py -p fold,fsue", 1, "did you mean fuse?"),
    ("opt nowhere.py", 1, "cannot read nowhere.py"),
    ("opt g.py -o g.txt", 2, ".py file"),
]


@pytest.mark.family("cases")
@pytest.mark.parametrize(("command", "code", "message"), FAILURES, ids=[c for c, _, _ in FAILURES])
def test_failures_are_short_and_have_their_exit_code(command: str, code: int, message: str) -> None:
    text = dnnc(*command.split(), code=code)
    assert message in " ".join(text.replace("│", " ").split())
    assert "Traceback" not in text


@pytest.mark.parametrize("error", [ValueError("seven"), InternalError("pass fold: seven")])
def test_own_failures_ask_for_a_report(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(as_json: bool) -> None:
        raise error

    monkeypatch.setattr("dnnc.cli.info.targets_command", fail)
    text = dnnc("targets", code=3)
    assert "internal error" in text and "seven" in text and "Please report it" in text and "Traceback" not in text
    assert "Traceback" in dnnc("targets", "-v", code=3)


@pytest.mark.slow
def test_verbose_shows_the_traceback_of_a_user_error() -> None:
    assert "Traceback" in dnnc("compile", "nowhere.onnx", "-v", code=1)


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(as_json: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dnnc.cli.info.targets_command", stop)
    text = dnnc("targets", code=130)
    assert "interrupted" in text and "Traceback" not in text


@pytest.mark.slow
def test_entry_point_gives_the_exit_code_to_the_shell() -> None:
    done = subprocess.run([sys.executable, "-m", "dnnc", "compile", "nowhere.onnx"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ModelError: there is no file nowhere.onnx\n"


# --- compile ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compile_prints_the_report_and_fills_the_cache() -> None:
    first = dnnc("compile", "fixed.onnx", "--threads", "1", "--cache", "own")
    assert "fixed: llvm, 1 thread" in first and "1 compiled, 0 from the cache" in first
    assert "dense (MatMul), act (Relu)" in first and "memory" in first and "total" in first
    assert "0 compiled, 1 from the cache" in dnnc("compile", "fixed.onnx", "--threads", "1", "--cache", "own")
    assert "1 compiled, 0 from the cache" in dnnc("compile", "fixed.onnx", "--threads", "1", "--cache", "off")


@pytest.mark.slow
def test_compile_json_is_the_report() -> None:
    data = dnnc_json("compile", "open.onnx", "--dims", "N=7")
    assert data["inputs"] == [{"name": "x", "dtype": "float32", "shape": [7, 3]}]
    assert data["programs"][0]["kernels"][0]["flops"] == 2 * 7 * 3 * 4 + 7 * 4
    assert data["fallbacks"] == []


def test_compile_takes_sizes_from_arrays() -> None:
    data = dnnc_json("compile", "open.onnx", "--input", "x=x.npy")
    assert data["inputs"][0]["shape"] == ["N", 3] and data["programs"][0]["dims"] == {"N": 2}


@pytest.mark.slow
def test_compile_for_all_sizes_within_bounds() -> None:
    (p,) = dnnc_json("compile", "open.onnx", "--dims", "N=2..64")["programs"]
    assert p["symbolic"] and p["dims"] == {"N": 2}


def test_compile_without_optimization_and_checks() -> None:
    (p,) = dnnc_json("compile", "fixed.onnx", "-O", "0", "--verify", "none", "--cache", "off")["programs"]
    assert [k["name"] for k in p["kernels"]] == ["matmul", "relu"] and "check" not in p["seconds"]


def test_compile_for_the_reference_target() -> None:
    assert "fixed: reference" in dnnc("compile", "fixed.onnx", "--target", "reference")


# --- run --------------------------------------------------------------------------------------------------------------


def test_run_writes_what_numpy_computes(here: Path) -> None:
    text = dnnc("run", "fixed.onnx", "--input", "x=x.npy", "--output", "y.npz")
    want = np.maximum(np.ones((2, 3), np.float32) @ W, 0)
    with np.load("y.npz") as made:
        np.testing.assert_allclose(made["y"], want, rtol=1e-6)
    assert "y" in text and f"{want.max():.5g}" in text and "first call" in text
    dnnc("run", "fixed.onnx", "--input", "x.npy", "--output", "y.npy")
    np.testing.assert_allclose(np.load("y.npy"), want, rtol=1e-6)


def test_run_json_summarises_outputs() -> None:
    data = dnnc_json("run", "fixed.onnx", "--input", "x=ones", "--repeat", "3")
    (y,) = data["outputs"]
    want = np.maximum(np.ones((2, 3)) @ W, 0)
    assert (y["name"], y["dtype"], y["shape"], y["not_finite"]) == ("y", "float32", [2, 4], 0)
    assert [y["min"], y["mean"], y["max"]] == pytest.approx([want.min(), want.mean(), want.max()])
    assert y["first"] == pytest.approx(want.reshape(-1)[:4])
    assert data["seconds"]["calls"] == 3 and data["seconds"]["median"] > 0


def test_run_fills_inputs_the_same_way_for_a_seed() -> None:
    def first(seed: str) -> Any:
        return dnnc_json("run", "open.onnx", "--dims", "N=2", "--seed", seed)["outputs"][0]["mean"]

    assert first("1") == first("1") != first("2")


def test_run_with_several_inputs_by_name_from_one_file() -> None:
    s, n = dnnc_json("run", "two.onnx", "--input", "both.npz")["outputs"]
    assert s["first"] == [1, 2, 3, 4] and n["first"] == [-1, -2, -3, -4] and s["dtype"] == "int64"
    s, _ = dnnc_json("run", "two.onnx", "--input", "both.npz", "--input", "a:0=zeros")["outputs"]
    assert s["first"] == [1, 1, 1, 1]


def test_run_of_a_model_whose_shapes_are_an_input() -> None:
    np.save("six.npy", np.arange(6, dtype=np.float32))
    np.save("to.npy", np.array([3, 2]))
    (y,) = dnnc_json("run", "late.onnx", "--input", "x=six.npy", "--input", "to=to.npy")["outputs"]
    assert y["shape"] == [3, 2] and y["first"] == [0, 1, 2, 3]


def test_run_shows_what_is_not_finite(here: Path) -> None:
    (here / "log.py").write_text("def g(x: f32[3]):\n    y = log(x)\n    return y\n")
    (y,) = dnnc_json("run", "log.py", "--input", "zeros")["outputs"]
    assert (y["not_finite"], y["min"], y["first"]) == (3, None, ["-inf"] * 3)


@pytest.mark.slow
def test_run_agrees_with_the_reference_target() -> None:
    model = str(ROOT / "examples" / "digits.onnx")
    native, reference = (
        dnnc_json("run", model, "--dims", "N=2", "--target", t)["outputs"][0]["first"] for t in ("llvm", "reference")
    )
    assert native == pytest.approx(reference, rel=1e-4)


# --- inspect ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_inspect_graph_before_and_after_passes() -> None:
    before = dnnc("inspect", "fixed.onnx", "--naive", "--locs")
    assert "matmul(x, w)  # dense (MatMul, opset 17)" in before
    after = dnnc("inspect", "fixed.onnx", "-O", "1")
    assert "matmul(x, w)" in after and "#" not in after
    assert dnnc_json("inspect", "fixed.onnx", "-O", "1") == {"stage": "graph", "text": after}
    assert "f32[5, 4]" in dnnc("inspect", "open.onnx", "--dims", "N=5") and "f32[N, 4]" in dnnc("inspect", "open.onnx")


@pytest.mark.slow
def test_inspect_operator_text_parses_and_says_where_it_comes_from() -> None:
    text = dnnc("inspect", "fixed.onnx", "--stage", "operator")
    assert (
        text.startswith("# kernel 0: matmul_relu, 1 call, schedule contraction(")
        and "#   dense (MatMul), act (Relu)" in text
    )
    assert "unroll(" in text
    naive = dnnc("inspect", "fixed.onnx", "--stage", "operator", "--naive")
    assert "before its schedule" in naive and "unroll(" not in naive
    assert parse_kernel(text).entry.name == parse_kernel(naive).entry.name == "matmul_relu"


@pytest.mark.slow
def test_inspect_machine_code_of_one_kernel_by_number_name_and_node() -> None:
    texts = {dnnc("inspect", "fixed.onnx", "-s", "llvm", "-k", k) for k in ("0", "matmul_relu", "act")}
    assert len(texts) == 1 and "define void @k_" in texts.pop()
    whole = dnnc("inspect", "fixed.onnx", "-s", "asm")
    assert "ret" in whole and "entry:" in whole
    (k,) = dnnc_json("inspect", "fixed.onnx", "-s", "asm")["kernels"]
    assert k["nodes"] == ["dense (MatMul), act (Relu)"] and k["symbol"] in k["text"]


def test_inspect_needs_no_sizes_where_kernels_can_be_symbolic() -> None:
    assert "def matmul_relu(N: dim[1, None]" in dnnc("inspect", "open.onnx", "-s", "operator", "--naive")


# --- opt --------------------------------------------------------------------------------------------------------------


def test_opt_runs_named_passes_in_order() -> None:
    text = dnnc("opt", "g.py", "-p", "canonicalize,dce", "--check")
    first, second, rest = text.split("\n", 2)
    assert first.startswith("# canonicalize: ") and first.endswith("3 -> 1 nodes")
    assert second.endswith("1 -> 1 nodes, unchanged")
    assert "add(x, c)" in rest and "neg(" not in rest and str(parse(rest)) == rest


def test_opt_prints_the_graph_after_each_pass() -> None:
    text = dnnc("opt", "g.py", "-p", "cse,canonicalize", "--print-after-all")
    assert text.count("def g(") == 2
    after_cse, after_canonicalize = text.split("# canonicalize")
    assert "neg(" in after_cse and "neg(" not in after_canonicalize


def test_opt_prints_plans(here: Path) -> None:
    text = (
        "def g(x: f32[SIZE, 2], *, w: f32[2, 2] = [[1.0, 2.0], [3.0, 4.0]]):\n    y = matmul(matmul(x, w), w)\n"
        "    return y\n"
    )
    (here / "chain.py").write_text(text.replace("SIZE", "3"))
    (here / "chain_n.py").write_text(text.replace("SIZE", "N"))
    shown = dnnc("opt", "chain.py", "-p", "fuse,memory-plan")
    assert "group 0: contraction: matmul -> v0\ngroup 1: contraction: matmul -> y" in shown
    assert "slot 0: v0: 24 B at 0, alive in steps 0 to 1\narena: 64 B, lower bound 24 B, 2 steps" in shown
    (record,) = dnnc_json("opt", "chain_n.py", "-p", "memory-plan")["passes"]
    assert (
        record["plan"] == "slot 0: v0: 8*N bytes, alive in steps 0 to 1\narena: depends on N, 2 steps"
        and not record["changed"]
    )


def test_opt_says_why_rules_do_not_fire() -> None:
    (record,) = dnnc_json("opt", "g.py", "-p", "canonicalize", "--explain")["passes"]
    assert record["reasons"] and all(" at " in r and ": " in r for r in record["reasons"])
    assert f"#   {record['reasons'][0]}\n" in dnnc("opt", "g.py", "-p", "canonicalize", "--explain")


def test_opt_json_has_a_record_per_pass() -> None:
    data = dnnc_json("opt", "g.py", "-p", "canonicalize", "--print-after-all")
    (record,) = data["passes"]
    assert (record["nodes_before"], record["nodes_after"], record["changed"]) == (3, 1, True)
    assert record["graph"] == data["graph"]


@pytest.mark.slow
def test_opt_writes_text_that_every_command_reads() -> None:
    dnnc("opt", "open.onnx", "--dims", "N=2", "-p", "fold,dce", "-o", "made.py")
    assert Path("made.npz").exists()
    want = dnnc_json("run", "fixed.onnx", "--input", "ones")["outputs"][0]["first"]
    assert dnnc_json("run", "made.py", "--input", "ones")["outputs"][0]["first"] == want
    assert "f32[2, 4]" in dnnc("inspect", "made.py")


@pytest.mark.slow
def test_export_writes_a_model_that_runs() -> None:
    dnnc("opt", "open.onnx", "--dims", "N=2", "-p", "fold,dce", "-o", "folded.py")
    said = dnnc_json("export", "folded.py", "-o", "folded.onnx", "--opset", "21")
    assert said["opset"] == 21 and said["bytes"] == Path("folded.onnx").stat().st_size
    want = dnnc_json("run", "fixed.onnx", "--input", "ones")["outputs"][0]["first"]
    assert dnnc_json("run", "folded.onnx", "--input", "ones")["outputs"][0]["first"] == want
    assert "nodes" in dnnc("export", "open.onnx", "-o", "again.onnx")


def test_opt_without_names_runs_the_pipeline() -> None:
    listed = [p["name"] for p in dnnc_json("passes")]
    assert [p["name"] for p in dnnc_json("opt", "g.py")["passes"]] == listed[:-2]
    assert listed[-2:] == ["fuse", "memory-plan"] and "constants and shape arithmetic" in dnnc("passes")


# --- what there is ----------------------------------------------------------------------------------------------------


def test_targets_say_why_not() -> None:
    llvm, cuda, reference = (
        next(t for t in dnnc_json("targets") if t["name"] == n) for n in ("llvm", "cuda", "reference")
    )
    assert llvm["available"] and llvm["cpu"] and llvm["vectors"] and reference["available"]
    assert cuda["available"] == (not cuda["reason"])
    text = dnnc("targets")
    assert "llvm: available" in text and llvm["cpu"] in text and "cuda: " in text


@pytest.mark.slow
def test_cache_is_counted_and_cleared() -> None:
    dnnc("compile", "fixed.onnx", "--cache", "counted")
    info = dnnc_json("cache", "info", "--cache", "counted")
    kept = sum(p.is_file() for p in Path("counted").rglob("*"))
    assert kept >= 2  # its code and its schedule, and what the cost model picked
    assert info["path"] == "counted" and info["entries"] == kept and info["bytes"] > 0 and info["usable"]
    assert f"entries  {kept}" in dnnc("cache", "info", "--cache", "counted")
    assert dnnc("cache", "clear", "--cache", "counted") == f"removed {kept} entries from counted\n"
    assert dnnc_json("cache", "info", "--cache", "counted")["entries"] == 0
    assert dnnc_json("cache", "info", "--cache", "off")["reason"] == "switched off"


def test_ops_are_listed_with_their_definition() -> None:
    ops = {o["name"]: o for o in dnnc_json("ops")}
    assert ops["add"] == {"family": "elementwise", "name": "add", "kind": "a tensor expression"}
    assert ops["gemm"]["kind"] == "other ops" and "elementwise" in dnnc("ops")


def test_onnx_operators_are_listed_with_how_they_are_read() -> None:
    found = {(o["domain"], o["name"]): o for o in dnnc_json("ops", "--onnx")}
    assert found["", "Conv"]["how"] == "a converter" and found["", "Conv"]["runs"] == "native" and len(found) > 270
    text = dnnc("ops", "--onnx")
    read = sum(bool(o["how"]) for (domain, _), o in found.items() if domain == "com.microsoft")
    assert f"com.microsoft: {read} of {read} operators" in text


# --- the bar ----------------------------------------------------------------------------------------------------------


def test_bar_comes_on_a_terminal_after_its_time() -> None:
    out = io.StringIO()
    with Bar(Console(file=out, force_terminal=True), after=0.01) as bar:
        bar("compile", 3, 8)
        deadline = time.perf_counter() + 60
        while "3/8" not in out.getvalue() and time.perf_counter() < deadline:
            time.sleep(0.01)
        bar("check", 5, 8)
    assert "compile" in out.getvalue() and "3/8" in out.getvalue()


def test_bar_stays_away_from_short_work_and_from_files() -> None:
    for terminal, after in ((True, 60.0), (False, 0.0)):
        out = io.StringIO()
        with Bar(Console(file=out, force_terminal=terminal), after=after) as bar:
            bar("compile", 1, 2)
            time.sleep(0.02)
        assert out.getvalue() == ""
