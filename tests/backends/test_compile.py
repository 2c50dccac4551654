"""LLVM text to objects to addresses, in this process and in workers; the targets that text is compiled for."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dnnc.backends.llvm import features, worker_pool
from dnnc.backends.llvm.compile import (
    ALLOWED_SYMBOLS,
    asm_text,
    compile_text,
    load_objects,
    object_key,
)
from dnnc.backends.llvm.elf import attached, code_of, renamed, symbols_of, undefined_symbols
from dnnc.backends.llvm.features import X86_CPUS, CpuTarget, cache_sizes, enabled, parse_target, vector_bits
from dnnc.backends.llvm.runtime import load_pool
from dnnc.backends.llvm.worker_pool import CompileService
from dnnc.backends.runtime.frames import cpu_count
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.ir.errors import InternalError, TargetError


@pytest.fixture(scope="module")
def cpu() -> CpuTarget:
    return parse_target("llvm")


def adder(name: str, n: int, lines: int = 1) -> str:
    """A function that adds `n` to its argument, `lines` times."""
    body = "".join(f"  %v{k + 1} = add i64 %v{k}, {n}\n" for k in range(lines))
    return f"define i64 @{name}(i64 %v0) nounwind {{\n{body}  ret i64 %v{lines}\n}}\n"


def call(address: int, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(x))


# --- one module -------------------------------------------------------------------------------------------------------


def test_objects_link_with_each_other(cpu: CpuTarget) -> None:
    caller = (
        "declare i64 @k_inner(i64)\n"
        "define i64 @entry(i64 %x) {\n  %y = call i64 @k_inner(i64 %x)\n  %z = mul i64 %y, 10\n  ret i64 %z\n}"
    )
    objs = [compile_text(t, cpu.cpu, cpu.features) for t in (caller, adder("k_inner", 3))]
    assert undefined_symbols(objs[0]) == {"k_inner"}
    assert undefined_symbols(objs[1]) == set()
    loaded = load_objects(objs)
    assert call(loaded.address("entry"), 4) == 70
    assert call(loaded.address("k_inner"), 4) == 7
    with pytest.raises(InternalError, match="defines k_other; there are entry, k_inner"):
        loaded.address("k_other")


def test_bytes_are_the_same_each_time(cpu: CpuTarget) -> None:
    text = adder("k_a", 5, 20)
    assert compile_text(text, cpu.cpu, cpu.features) == compile_text(text, cpu.cpu, cpu.features)
    assert object_key(text, "x86-64", "") == object_key(text, "x86-64", "")
    assert (
        len({object_key(t, c, f) for t in (text, text + "\n") for c in ("x86-64", "haswell") for f in ("", "+avx2")})
        == 8
    )


def test_passes_promote_allocas() -> None:
    text = (
        "define i64 @f(i64 %x) {\n  %p = alloca i64\n  store i64 %x, ptr %p\n  %y = load i64, ptr %p\n  ret i64 %y\n}"
    )
    assert re.search(r"mov\S*\s.*-8\(%rsp\)", asm_text(text, "x86-64", "", passes=False))
    assert "rsp" not in asm_text(text, "x86-64", "")


RANGE = """
declare <16 x float> @llvm.x86.avx512.mask.range.ps.512(<16 x float>, <16 x float>, i32, <16 x float>, i16, i32)
define void @f(ptr %p, <16 x float> %b, i64 %n) {
entry:
  br label %loop
loop:
  %k = phi i64 [ 0, %entry ], [ %next, %loop ]
  %q = getelementptr <16 x float>, ptr %p, i64 %k
  %x = load <16 x float>, ptr %q
  %y = call <16 x float> @llvm.x86.avx512.mask.range.ps.512(<16 x float> %x, <16 x float> %b, i32 2, <16 x float> \
zeroinitializer, i16 -1, i32 4)
  %z = fmul <16 x float> %y, %x
  store <16 x float> %z, ptr %q
  %next = add i64 %k, 1
  %more = icmp slt i64 %next, %n
  br i1 %more, label %loop, label %exit
exit:
  ret void
}"""


@pytest.mark.parametrize(("more", "cleared"), [("+avx512fp16", True), ("+avx512fp16,+sse4a", False), ("", False)])
def test_destinations_that_an_instruction_waits_for_are_cleared_whatever_the_name_of_the_cpu(
    more: str, cleared: bool
) -> None:
    lines = asm_text(RANGE, "rocketlake", f"+avx512dq,{more}".rstrip(",")).splitlines()
    (k,) = (k for k, line in enumerate(lines) if "vrangeps" in line)
    assert bool(re.search(r"vp?xor", lines[k - 1])) == cleared


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "define i32 @f(i32 %a) {\n  %c = add i32 %a, 1\n  ret i32 %b\n}",
            "use of undefined value '%b'\n      1 | .*\n      2 | .*\n>     3 |   ret i32 %b",
        ),
        ("\n\nnonsense", "expected top-level entity\n      1 | \n      2 | \n>     3 | nonsense"),
        (
            "define i32 @f(i32 %a) {\nx:\n  br label %y\ny:\n  %q = add i32 %z, 1\n  %z = add i32 %a, 1\n  ret i32 %q\n"
            "}",
            "does not dominate all uses!(.|\n)*>     [56] |",
        ),
    ],
)
def test_bad_text_is_shown_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        compile_text(text, "x86-64", "")


def test_foreign_symbols_are_refused() -> None:
    with pytest.raises(InternalError, match="calls fmaf"):
        fused = (
            "declare float @llvm.fma.f32(float, float, float)\n"
            "define float @f(float %a) "
            "{\n  %q = call float @llvm.fma.f32(float %a, float %a, float %a)\n  ret float %q\n}"
        )
        compile_text(fused, "x86-64", "")
    with pytest.raises(InternalError, match=r"calls puts(.|\n)*1 \| declare i32 @puts"):
        compile_text(
            "declare i32 @puts(ptr)\ndefine i32 @f(ptr %a) {\n  %r = call i32 @puts(ptr %a)\n  ret i32 %r\n}",
            "x86-64",
            "",
        )
    copy = (
        "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)\n"
        "define void @f(ptr %a, ptr %b, i64 %n) "
        "{\n  call void @llvm.memcpy.p0.p0.i64(ptr %a, ptr %b, i64 %n, i1 false)\n  ret void\n}"
    )
    assert undefined_symbols(compile_text(copy, "x86-64", "")) == {"memcpy"} <= ALLOWED_SYMBOLS


def test_linking_is_checked_before_llvm_sees_it() -> None:
    caller = compile_text(
        "declare i64 @k_gone(i64)\ndefine i64 @f(i64 %x) {\n  %y = call i64 @k_gone(i64 %x)\n  ret i64 %y\n}",
        "x86-64",
        "",
    )
    with pytest.raises(InternalError, match="no object defines k_gone"):
        load_objects([caller])
    twice = compile_text(adder("k_a", 1), "x86-64", "")
    with pytest.raises(InternalError, match="by two objects: k_a"):
        load_objects([twice, twice])
    for damaged in (b"", b"MZ\x90", twice[:40], twice[: len(twice) // 2]):
        with pytest.raises(InternalError, match="ELF"):
            undefined_symbols(damaged)


def test_the_pool_comes_from_the_cache(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    load_pool(cache)
    (entry,) = tmp_path.glob("??/*")
    before = entry.read_bytes()
    load_pool(cache)
    assert cache.info().entries == 1
    assert entry.read_bytes() == before


@pytest.mark.slow
def test_llvmlite_loads_at_first_use() -> None:
    code = (
        "import sys; import dnnc.backends.llvm.worker_pool, dnnc.backends.llvm.features, "
        "dnnc.backends.runtime.frames, dnnc.backends.runtime.kernel_cache"
    )
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}; print('llvmlite' in sys.modules)"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False\n"


# --- many modules -----------------------------------------------------------------------------------------------------


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Modules that are small, and yet worth workers."""
    monkeypatch.setattr(worker_pool, "SECONDS_PER_BYTE", 1.0)
    return [(f"kernel{k}", adder(f"k_{k}", k, 1 + 10 * k)) for k in range(12)]


@pytest.mark.slow
def test_workers_give_the_same_bytes(many: list[tuple[str, str]], cpu: CpuTarget) -> None:
    here = {key: compile_text(text, cpu.cpu, cpu.features) for key, text in many}
    told: list[tuple[int, int]] = []
    with CompileService(2) as service:
        assert service.compile_many(many, cpu.cpu, cpu.features, lambda done, total: told.append((done, total))) == here
        assert service._worker_count([1]) == 0
        pids = [w._process.pid for w in service._workers if w._process]
        assert len(pids) == 2 and os.getpid() not in pids
        assert service.compile_many(many[:3], cpu.cpu, cpu.features) == dict(list(here.items())[:3])
        assert [w._process.pid for w in service._workers if w._process] == pids  # they stay
    assert told == [(k + 1, 12) for k in range(12)]
    assert CompileService(1).compile_many(many, cpu.cpu, cpu.features) == here
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_few_or_small_texts_stay_here() -> None:
    service = CompileService(8)
    assert service._worker_count([50_000]) == 0
    assert service._worker_count([2_000] * 40) == 0
    assert service._worker_count([40_000] * 60) == 8
    assert (
        service._worker_count([40_000] * 5 + [1_000_000]) == 0
    )  # the largest alone takes as long as all in this process
    assert CompileService(1)._worker_count([40_000] * 600) == 0
    assert CompileService(2).compile_many([], "x86-64", "") == {}


@pytest.mark.slow
def test_errors_name_the_kernel(many: list[tuple[str, str]]) -> None:
    bad = [*many, ("broken", "define void @k_x() {\n  ret i32 0\n}")]
    for threads in (1, 2):
        with pytest.raises(
            InternalError, match=r"kernel broken: generated LLVM text is not valid(.|\n)*>     2 \|   ret i32 0"
        ):
            CompileService(threads).compile_many(bad, "x86-64", "")


@pytest.mark.slow
def test_a_text_that_ends_the_compiler(
    many: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with CompileService(2) as service:
        with pytest.raises(
            InternalError, match=r"kernel kernel\d+: the compiler process ended on it .*LLVM ERROR"
        ) as e:
            service.compile_many(many, "no-such-cpu", "")  # LLVM ends the process: there is no 64-bit mode on it
        file = Path(str(e.value).rpartition(" ")[2])
        assert file.read_text() in [text for _, text in many]
        assert len(service.compile_many(many, "x86-64", "")) == 12  # with new workers


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(many: list[tuple[str, str]]) -> None:
    with CompileService(2) as service:
        want = service.compile_many(many, "x86-64", "")
        for w in service._workers:
            assert w._process is not None
            os.kill(w._process.pid, signal.SIGKILL)
        assert service.compile_many(many, "x86-64", "") == want


@pytest.mark.slow
def test_a_worker_that_waits_for_a_core_is_not_too_slow(
    many: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "PATIENCE", 0.3)
    monkeypatch.setattr(worker_pool, "SLOWER", 0)
    with CompileService(2) as service:
        want = service.compile_many(many, "x86-64", "")
        pids = [w._process.pid for w in service._workers if w._process]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        go_on = threading.Timer(0.8, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
        go_on.start()
        assert service.compile_many(many, "x86-64", "") == want
        go_on.join()


def test_without_a_way_to_start_workers(many: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with CompileService(2) as service:
        assert len(service.compile_many(many, "x86-64", "")) == 12
        assert "cannot start /no/such/python" in service.reason


SCRIPT = """
import sys
from dnnc.backends.llvm import worker_pool
worker_pool.SECONDS_PER_BYTE = 1.0
body = "".join(f"  %v{k + 1} = mul i64 %v{k}, %w\\n" for k in range(int(sys.argv[1])))
items = [(f"n{i}", f"define i64 @k_{i}(i64 %v0, i64 %w) {{\\n{body}  ret i64 %v{sys.argv[1]}\\n}}") for i in range(30)]
print("start", flush=True)
print(len(worker_pool.CompileService(2).compile_many(items, "x86-64", "", lambda *_: print(".", end="", flush=True))))
"""


@pytest.mark.slow
def test_scripts_need_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "json.py").write_text("raise ImportError('a file beside the script got in the way')")
    ended = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", str(script), "10"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert ended.stdout == "start\n" + "." * 30 + "30\n", ended.stderr


@pytest.mark.slow
def test_control_c_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(f"import tempfile; tempfile.tempdir = {str(tmp_path)!r}\n{SCRIPT}")
    run = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), "20000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert run.stdout is not None and run.stdout.readline() == "start\n"
    run.stdout.read(1)  # the first object is there, the workers are at the next ones
    os.kill(run.pid, signal.SIGINT)  # to the parent alone
    _, err = run.communicate(timeout=600)
    assert "KeyboardInterrupt" in err
    deadline = time.monotonic() + 60
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(run.pid, 0)  # nobody is left of its group
            time.sleep(0.05)
    assert not list(tmp_path.glob("*.ll"))  # texts are kept for a compiler that failed, not for one that was stopped


# --- targets ----------------------------------------------------------------------------------------------------------


def test_target_texts() -> None:
    host = parse_target("llvm")
    assert host.threads == cpu_count()
    assert host.foreign == ()
    t = parse_target("llvm -mcpu=skylake-avx512 -threads=1")
    assert (t.cpu, t.vector_bits, t.registers, t.threads) == ("skylake-avx512", 512, 32, 1)
    assert "avx512vl" in t.feature_set and "avx512vnni" not in t.feature_set
    t = parse_target("llvm -mcpu=haswell")
    assert (t.vector_bits, t.registers) == (256, 16)
    t = parse_target("llvm -mcpu=skylake-avx512 -mattr=-avx512f")
    assert t.vector_bits == 256 and not any(f.startswith("avx512") for f in t.feature_set)
    assert parse_target("llvm -mcpu=generic").vector_bits == 128
    assert parse_target("llvm", threads=10_000).threads == cpu_count()
    assert parse_target("llvm -threads=1", threads=2).threads == 1


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda", "expected 'llvm'"),
        ("llvm -mcpu=fast", "unknown CPU; there are native"),
        ("llvm -mattr=+speed", "'\\+speed'"),
        ("llvm -mattr=avx2", "'avx2'"),
        ("llvm -threads=0", "at least 1"),
        ("llvm -threads=two", "at least 1"),
        ("llvm -opt=3", "'-opt=3' is none of"),
        ("", "expected 'llvm'"),
    ],
)
def test_bad_target_texts(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        parse_target(text)


def test_vector_width_follows_the_features() -> None:
    assert vector_bits("+avx512f,+avx512bw,+avx512vl,+avx512dq") == 512
    assert vector_bits("+avx512f,+avx512bw,+avx512vl,+avx2,+fma") == 256
    assert vector_bits("+avx2") == vector_bits("") == 128
    assert enabled("+a,+b,-a") == {"b"}
    assert enabled("+avx,+avx2,+fma,+sse3,-avx") == {"sse3"}


def test_cache_sizes_are_read(tmp_path: Path) -> None:
    assert cache_sizes(tmp_path) == (32 << 10, 256 << 10)
    first = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    for k, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "2M"), ("3", "Unified", "?")]
    ):
        folder = tmp_path / f"cpu{first}" / "cache" / f"index{k}"
        folder.mkdir(parents=True)
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(value + "\n")
    assert cache_sizes(tmp_path) == (48 << 10, 2 << 20)


def test_a_named_cpu_has_its_own_caches_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for here in ("znver4", "haswell"):
        monkeypatch.setattr(features, "host_cpu", lambda here=here: (here, ",".join(f"+{f}" for f in X86_CPUS[here])))
        monkeypatch.setattr(features, "cache_sizes", lambda: (7 << 10, 7 << 20))
        assert (parse_target("llvm -mcpu=znver5").l1, parse_target("llvm -mcpu=znver5").l2) == (48 << 10, 1 << 20)
        assert (parse_target("llvm").l1, parse_target(f"llvm -mcpu={here}").l2) == (7 << 10, 7 << 20)


def test_every_cpu_has_caches_but_the_levels_of_the_architecture() -> None:
    named = [n for names in features._CACHES.values() for n in names.split()]
    assert len(set(named)) == len(named)
    assert set(X86_CPUS) - set(named) == {n for n in X86_CPUS if n.startswith("x86-64")}


def test_code_that_llvm_has_not_seen_is_a_part_of_an_object() -> None:
    body = "declare hidden i64 @k_aa.code()\ndefine i64 @k_aa() {\n  %r = call i64 @k_aa.code()\n  ret i64 %r\n}\n"
    obj = compile_text(body, "x86-64", "")
    assert undefined_symbols(obj) == {"k_aa.code"}
    seven = code_of(compile_text("define i64 @k_f() {\n  ret i64 7\n}\n", "x86-64", ""))
    whole = [attached(renamed(obj, "k_aa", name), {f"{name}.code": seven}) for name in ("k_bb", "k_cc")]
    assert [symbols_of(w) for w in whole] == [({name, f"{name}.code"}, set()) for name in ("k_bb", "k_cc")]
    loaded = load_objects(whole)
    assert ctypes.CFUNCTYPE(ctypes.c_int64)(loaded.address("k_cc"))() == 7
