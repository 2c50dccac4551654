"""How CUDA C++ spells Hopper's effects: mbarriers, the copy engine (TMA), tensor cores of warp groups (wgmma).

In: a statement of `dnnc.ir.loops.hopper`, and the printer. Out: the C++ statement, and what it needs: helpers of the
prelude, and tensor maps, parameters after buffers and scalars that tell the copy engine how a buffer lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dnnc.backends.cuda.index import constant
from dnnc.backends.runtime.device import TensorMap
from dnnc.ir.dtype import DType, f32, i32
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import Ref
from dnnc.ir.loops.hopper import SWIZZLE_ROWS
from dnnc.ir.loops.stmt import Eval, walk_stmts

if TYPE_CHECKING:
    from dnnc.backends.cuda.emit import FuncEmitter
    from dnnc.ir.expr import Op

ROW_BYTES = 128  # of a swizzled buffer


# --- copies -----------------------------------------------------------------------------------------------------------


def map_of(s: Eval) -> TensorMap:
    """Return the tensor map of a global-shared copy. InternalError where its buffers do not suit TMA."""
    inside, outside = _ends(s) if s.name != "tma_fetch" else (None, s.args[0])
    assert isinstance(outside, Ref)
    b, rows, lanes = (
        outside.buf,
        constant(s.args[1 if inside is None else 2], f"the height of the box of {s.name}"),
        (outside if inside is None else inside).lanes,
    )
    shape = tuple(constant(d, f"the shape of {b.name}") for d in b.shape)
    strides = tuple(constant(d, f"the strides of {b.name}") * b.dtype.bytes for d in b.full_strides())
    box = (*(1 for _ in shape[2:]), *((rows,) if len(shape) > 1 else ()), lanes)
    row, swizzle = lanes * b.dtype.bytes, inside.buf.swizzle if inside is not None else 0
    if len(shape) > 5 or strides[-1] != b.dtype.bytes or any(n % 16 for n in strides[:-1]):
        raise InternalError(
            f"the copy engine takes up to 5 axes, apart by multiples of 16 bytes, the last one dense: {b.name} has "
            f"{strides}"
        )
    if max(box) > 256 or row % 16:
        raise InternalError(
            f"a box of {b.name} has {box} elements: at most 256 along an axis, and rows of a multiple of 16 bytes"
        )
    if swizzle not in (0, SWIZZLE_ROWS) or (swizzle and row != ROW_BYTES):
        raise InternalError(
            f"a swizzled buffer beside {b.name} has rows of {ROW_BYTES} bytes where copies fill it, its box {row}"
        )
    return TensorMap(b.name, b.dtype, shape, strides, box, ROW_BYTES if swizzle else 0)


def _fetch(em: FuncEmitter, s: Eval) -> str:
    source = s.args[0]
    assert isinstance(source, Ref)
    em.use("TensorMap")
    name, at = f"tma_fetch_{len(source.idx)}d", ", ".join(em.text(i) for i in reversed(source.idx))
    rank = len(source.idx)
    params, numbers = ", ".join(f"int c{k}" for k in range(rank)), ", ".join(f'"r"(c{k})' for k in range(rank))
    place = "{" + ", ".join(f"%{1 + k}" for k in range(rank)) + "}"
    text = f"""\
FN void {name}(const TensorMap* map, {params}) {{
  asm volatile("cp.async.bulk.prefetch.tensor.{rank}d.L2.global [%0, {place}];" :: "l"(map), {numbers} : "memory");
}}"""
    return f"{_generated(em, name, text)}(&{em.unit.tensor_map(map_of(s))}, {at});"


def im2col_of(s: Eval) -> TensorMap:
    """The map of an image whose pixels a filter's tap meets."""
    to, source = _ends(s)
    b = source.buf
    n = len(b.shape) - 2
    rows, *numbers = (constant(a, s.name) for a in (s.args[2], *s.args[4 + 2 * n :]))
    sizes, strides, _, begin = (tuple(numbers[k : k + n]) for k in range(0, 4 * n, n))
    shape = tuple(constant(d, f"the shape of {b.name}") for d in b.shape)
    row = to.lanes * b.dtype.bytes
    if shape[-1] * b.dtype.bytes % 16 or b.strides is not None or not 1 <= rows <= 256 or row != ROW_BYTES:
        raise InternalError(
            f"the copy engine takes dense NHWC images with a multiple of 16 bytes a pixel: {b.name} is "
            f"{b.dtype}{list(shape)}"
        )
    if not walkable(shape[1:-1], sizes, strides, begin, ()):
        raise InternalError(
            f"the copy engine cannot walk over {b.name} in steps of {strides} from {begin} before its first pixel"
        )
    dense = tuple(math.prod(shape[k + 1 :]) * b.dtype.bytes for k in range(n + 2))
    corners = _corners(shape[1:-1], sizes, strides, begin)
    return TensorMap(
        b.name, b.dtype, shape, dense, (rows, *(1 for _ in sizes), to.lanes), ROW_BYTES, (1, *strides, 1), corners
    )


Ints = Sequence[int]


def _corners(image: Ints, sizes: Ints, strides: Ints, begin: Ints) -> tuple[tuple[int, int], ...]:
    """The first and the last place of a filter's corner, from the image's first and last pixel, along each axis."""
    return tuple((-at, (n - 1) * step - at - (size - 1)) for at, n, step, size in zip(begin, sizes, strides, image))


def walkable(image: Ints, sizes: Ints, strides: Ints, begin: Ints, reach: Ints) -> bool:
    """Can the copy engine gather the pixels of a convolution? Numbers by axis: pixels of the image and of the result,
    and `reach`, how far a tap lies from the filter's corner. Descriptors have 32 bits for corners, instructions 16.
    """
    bits = {1: 16, 2: 8, 3: 5}[len(sizes)]
    corners = [c for pair in _corners(image, sizes, strides, begin) for c in pair]
    return (
        max(strides) <= 8
        and all(-(1 << bits - 1) <= c < 1 << bits - 1 for c in corners)
        and all(r < 1 << bits for r in reach)
    )


def _im2col(em: FuncEmitter, s: Eval) -> str:
    to, source = _ends(s)
    n = len(source.buf.shape) - 2
    pixel, tap, _, strides, dilations, begin = (s.args[k : k + n] for k in range(4, 4 + 6 * n, n))
    em.use("TensorMap")
    at = [source.idx[-1], *(p * k - b for p, k, b in reversed(list(zip(pixel, strides, begin)))), source.idx[0]]
    reach = [t * d for t, d in reversed(list(zip(tap, dilations)))]
    numbers = ", ".join(em.text(i) for i in (*at, *reach))
    name, count = f"tma_im2col{n + 2}", n + 3  # operands before the coordinates: to and map
    ints, halves = ", ".join(f"int c{k}" for k in range(n + 2)), ", ".join(f"u16 d{k}" for k in range(n))
    place, taps = (", ".join(f"%{first + k}" for k in range(many)) for first, many in ((2, n + 2), (count + 2, n)))
    given = ", ".join(
        (*(f'"r"(c{k})' for k in range(n + 2)), '"r"(shared_address(b))', *(f'"h"(d{k})' for k in range(n)))
    )
    text = f"""\
FN void {name}(void* to, const TensorMap* map, {ints}, {halves}, u64* b) {{
  asm volatile("cp.async.bulk.tensor.{n + 2}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, \
{{{place}}}], [%{n + 4}], {{{taps}}};"
    :: "r"(shared_address(to)), "l"(map), {given} : "memory");
}}"""
    return (
        f"{_generated(em, name, text)}({em.text(to)}, &{em.unit.tensor_map(im2col_of(s))}, {numbers}, "
        f"{em.text(s.args[3])});"
    )


def _prefetch(em: FuncEmitter, s: Eval) -> str:
    maps: dict[TensorMap, None] = {}
    for c in walk_stmts(em.unit.kernel.entry.body):
        if isinstance(c, Eval) and c.name in ("tma_load", "tma_store", "tma_im2col", "tma_fetch"):
            maps[im2col_of(c) if c.name == "tma_im2col" else map_of(c)] = None
    em.use("TensorMap")
    return " ".join(f"{em.use('tma_prefetch')}(&{em.unit.tensor_map(m)});" for m in maps)


def _ends(s: Eval) -> tuple[Ref, Ref]:
    """In shared memory, in global memory."""
    to, source = s.args[:2]
    assert isinstance(to, Ref) and isinstance(source, Ref)
    return (source, to) if s.name == "tma_store" else (to, source)


def _copy(em: FuncEmitter, s: Eval) -> str:
    inside, outside = _ends(s)
    at = [em.text(i) for i in reversed(outside.idx)]  # the copy engine counts axes from the innermost
    em.use("TensorMap")
    args = [em.text(inside), f"&{em.unit.tensor_map(map_of(s))}", *at, *(em.text(a) for a in s.args[3:])]
    return f"{_generated(em, f'{s.name}_{len(at)}d', _copy_helper(s.name, len(at)))}({', '.join(args)});"


def _generated(em: FuncEmitter, name: str, text: str) -> str:
    """A helper that is written for its sizes."""
    em.unit.defined[name] = text
    return em.use(name)


def _copy_helper(name: str, rank: int) -> str:
    params, numbers = ", ".join(f"int c{k}" for k in range(rank)), ", ".join(f'"r"(c{k})' for k in range(rank))
    at = "{" + ", ".join(f"%{2 + k}" for k in range(rank)) + "}"
    if name == "tma_load":
        return f"""\
FN void {name}_{rank}d(void* to, const TensorMap* map, {params}, u64* b) {{
  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {at}], \
[%{2 + rank}];"
    :: "r"(shared_address(to)), "l"(map), {numbers}, "r"(shared_address(b)) : "memory");
}}"""
    return f"""\
FN void {name}_{rank}d(const void* from, const TensorMap* map, {params}) {{
  asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%1, {at}], [%0];"
    :: "r"(shared_address(from)), "l"(map), {numbers} : "memory");
}}"""


# --- products ---------------------------------------------------------------------------------------------------------


def _product(em: FuncEmitter, s: Eval) -> str:
    acc, a, b, keep = s.args
    assert isinstance(acc, Ref) and isinstance(a, Ref) and isinstance(b, Ref)
    n, types = 2 * acc.lanes, (a.buf.dtype.name, b.buf.dtype.name)
    shape = _WGMMA_SHAPES.get(types)
    turned = s.name == "wgmma_kn"
    if shape is None or n % (16 if acc.buf.dtype.is_int else 8) or not 8 <= n <= 256 or (turned and "k16" not in shape):
        raise InternalError(f"{s.name} of 64 x {n} of {a.buf.dtype} and {b.buf.dtype} does not exist")
    block = constant(b.buf.full_strides()[1], "the size of a block of columns") * b.buf.dtype.bytes if turned else 0
    name = f"{s.name}_{n}_{'_'.join(dict.fromkeys(types))}"
    name = _generated(em, name, _wgmma_helper(name, n, shape, acc.buf.dtype, block))
    em.use("matrix")
    return f"{name}({em.text(acc)}, {em.text(a)}, {em.text(b)}, {em.text(keep)});"


def _wgmma_helper(name: str, n: int, shape: str, sums: DType, block: int) -> str:
    """a lies with rows along the sum (K-major); so does b, unless columns lie in blocks of so many bytes (MN-major)."""
    r = n // 2
    registers = ", ".join(f"%{i}" for i in range(r))
    b, major = (f"matrix(b, {block})", 1) if block else ("matrix(b)", 0)
    signs, majors = ", 1, 1" if sums.is_float else "", f", 0, {major}" if "k16" in shape else ""
    return f"""\
FN void {name}({sums}* d, const void* a, const void* b, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{r + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{n}{shape} {{{registers}}}, %{r}, %{r + 1}, p{signs}{majors};\\n}}"
    : {_operands(r, sums)} : "l"(matrix(a)), "l"({b}), "r"(keep));
}}"""


def _sparse_product(em: FuncEmitter, s: Eval) -> str:
    acc, a, b, _, _, part = s.args
    assert isinstance(acc, Ref) and isinstance(a, Ref) and isinstance(b, Ref)
    n, kind, chosen = 2 * acc.lanes, a.buf.dtype.name, constant(part, "the part of wgmma_sp")
    if kind not in ("f16", "bf16") or b.buf.dtype is not a.buf.dtype or n % 8 or not 8 <= n <= 256:
        raise InternalError(f"wgmma_sp of 64 x {n} of {a.buf.dtype} and {b.buf.dtype} does not exist")
    r = n // 2
    registers = ", ".join(f"%{i}" for i in range(r))
    name = f"wgmma_sp_{n}_{kind}_{chosen}"
    text = f"""\
FN void {name}(f32* d, const void* a, const void* b, u32 places, int keep) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{r + 3}, 0;\\n"
    "wgmma.mma_async.sp.sync.aligned.m64n{n}k32.f32.{kind}.{kind} {{{registers}}}, %{r}, %{r + 1}, %{r + 2}, {chosen}, \
p, 1, 1, 0, 0;\\n}}"
    : {_operands(r, f32)} : "l"(matrix(a)), "l"(matrix(b)), "r"(places), "r"(keep));
}}"""
    em.use("matrix")
    return f"{_generated(em, name, text)}({', '.join(em.text(x) for x in s.args[:5])});"


def _operands(n: int, sums: DType) -> str:
    kind = "f" if sums.is_float else "r"
    return ", ".join(f'"+{kind}"(d[{i}])' for i in range(n))


def _wait(em: FuncEmitter, s: Eval) -> str:
    """The compiler does not know that a wait changes accumulators: those that are used next are its operands."""
    n = constant(s.args[0], s.name)
    if len(s.args) == 1:
        return f"{em.use('wgmma_wait')}<{n}>();"
    acc = s.args[1]
    assert isinstance(acc, Ref)
    sums = acc.buf.dtype
    name, operands = f"wgmma_wait_{acc.lanes}_{sums}", _operands(acc.lanes, sums)
    wait = f'asm volatile("wgmma.wait_group.sync.aligned %{acc.lanes};" : {operands} : "n"(N) : "memory");'
    return f"{_generated(em, name, f'template<int N> FN void {name}({sums}* d) {{ {wait} }}')}<{n}>({em.text(acc)});"


def _immediate(em: FuncEmitter, s: Eval) -> str:
    return f"{em.use(s.name)}<{constant(s.args[0], s.name)}>();"


def _plain(em: FuncEmitter, s: Eval) -> str:
    return f"{em.use(s.name)}({', '.join(em.text(a) for a in s.args)});"


def _wait_mbarrier(em: FuncEmitter, s: Eval) -> str:
    """Where blocks send to each other, of what all blocks of the cluster did."""
    sent = any(isinstance(x, Eval) and x.name == "peer_send" for x in walk_stmts(em.func.body))
    return f"{em.use('mbar_wait_peers' if sent else 'mbar_wait')}({', '.join(em.text(a) for a in s.args)});"


def _matrices(em: FuncEmitter, s: Eval) -> str:
    em.use("V"), em.use("pair")
    return _plain(em, s)


_FLOAT8 = {"f8e4m3fn": "e4m3", "f8e5m2": "e5m2"}
_BYTES = {"u8": "u8", "i8": "s8"}
# types of both operands -> length of the sum, types of sums and operands
_WGMMA_SHAPES = {
    ("f16", "f16"): "k16.f32.f16.f16",
    ("bf16", "bf16"): "k16.f32.bf16.bf16",
    **{(a, b): f"k32.f32.{_FLOAT8[a]}.{_FLOAT8[b]}" for a in _FLOAT8 for b in _FLOAT8},
    **{(a, b): f"k32.s32.{_BYTES[a]}.{_BYTES[b]}" for a in _BYTES for b in _BYTES},
}


def _peer(em: FuncEmitter, e: Op) -> str:
    r, rank = e.args
    if e.lanes != 4 or e.dtype not in (f32, i32):
        raise InternalError(f"peer reads 4 numbers of 32 bits at a time, not {e.lanes} of {e.dtype}")
    em.use("V")
    return f"{em.use('peer_4')}({em.text(r)}, {em.text(rank)})"


HELPERS: dict[str, str] = {
    "TensorMap": "struct alignas(64) TensorMap { u64 word[16]; };",
    # a tile of shared memory for wgmma: its address, 1024 bytes from 8 rows to the next 8, rows of 128 bytes with
    # swizzled chunks; where rows run across the sum, so many bytes from one block of 64 columns to the next
    "matrix": """\
FN u64 matrix(const void* p, int block = 16) {
  return (u64)((shared_address(p) & 0x3FFFF) >> 4) | (u64)(block >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}""",
    "mbar_init": 'FN void mbar_init(u64* b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: '
                 '"r"(shared_address(b)), "r"(n) : "memory"); }',
    "mbar_fence": """\
FN void mbar_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}""",
    "mbar_arrive": 'FN void mbar_arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: '
                   '"r"(shared_address(b)) : "memory"); }',
    "mbar_expect": """\
FN void mbar_expect(u64* b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared_address(b)), "r"(bytes) : \
"memory");
}""",
    "mbar_wait": """\
FN void mbar_wait(u64* b, u32 parity) {
  asm volatile("{\\n.reg .pred done;\\nWAIT:\\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], \
%1;\\n@done bra DONE;\\nbra WAIT;\\nDONE:\\n}"
    :: "r"(shared_address(b)), "r"(parity) : "memory");
}""",
    "tma_prefetch": 'FN void tma_prefetch(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) '
                    ': "memory"); }',
    "bulk_commit": 'FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }',
    "bulk_wait": 'template<int N> FN void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" :: "n"(N) : '
                 '"memory"); }',
    "bulk_wait_read": 'template<int N> FN void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" :: '
                      '"n"(N) : "memory"); }',
    "fence_async": 'FN void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }',
    **{name: f"""\
template<class T> FN void {name}(T* p, const V<T, 8>& v) {{
  asm volatile("stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%0], {{%1, %2, %3, %4}};"
    :: "r"(shared_address(p)), "r"(pair(v.v[0], v.v[1])), "r"(pair(v.v[2], v.v[3])), "r"(pair(v.v[4], v.v[5])), \
"r"(pair(v.v[6], v.v[7])) : "memory");
}}""" for name, trans in (("stmatrix_x4", ""), ("stmatrix_x4_trans", ".trans"))},
    "wgmma_fence": 'FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }',
    "wgmma_commit": 'FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }',
    "wgmma_wait": 'template<int N> FN void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : '
                  '"memory"); }',
    "named_barrier": 'FN void named_barrier(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : '
                     '"memory"); }',
    "cluster_barrier": """\
FN void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}""",
    "cluster_arrive": 'FN void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }',
    "cluster_wait": 'FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }',
    "peer_address": """\
FN u32 peer_address(const void* p, int rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(p)), "r"(rank));
  return r;
}""",
    "peer_store": """\
FN void peer_store(const f32* p, int rank, f32 v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(peer_address(p, rank)), "f"(v) : "memory");
}""",
    "peer_send": """\
FN void peer_send(const f32* p, int rank, f32 v, u64* b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
    :: "r"(peer_address(p, rank)), "f"(v), "r"(peer_address(b, rank)) : "memory");
}""",
    # for what other blocks have sent
    "mbar_wait_peers": """\
FN void mbar_wait_peers(u64* b, u32 parity) {
  asm volatile("{\\n.reg .pred done;\\nWAIT:\\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], \
%1;\\n@done bra DONE;\\nbra WAIT;\\nDONE:\\n}"
    :: "r"(shared_address(b)), "r"(parity) : "memory");
}""",
    "peer_4": "\n".join(f"""\
FN V<{t}, 4> peer_4(const {t}* p, int rank) {{
  V<{t}, 4> r;
  asm volatile("ld.shared::cluster.v4.b32 {{%0, %1, %2, %3}}, [%4];"
    : "={c}"(r.v[0]), "={c}"(r.v[1]), "={c}"(r.v[2]), "={c}"(r.v[3]) : "r"(peer_address(p, rank)) : "memory");
  return r;
}}""" for t, c in (("f32", "f"), ("i32", "r"))),
    "regs_give": 'template<int N> FN void regs_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); '
                 '}',
    "regs_take": 'template<int N> FN void regs_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); '
                 '}',
}  # fmt: skip

EFFECTS: dict[str, Callable[[FuncEmitter, Eval], str]] = {
    **{name: _plain for name in ("mbar_init", "mbar_fence", "mbar_arrive", "mbar_expect", "bulk_commit", "fence_async",
                                 "wgmma_fence", "wgmma_commit", "named_barrier",
                                 "cluster_barrier", "cluster_arrive", "cluster_wait", "peer_store", "peer_send")},
    "mbar_wait": _wait_mbarrier,
    **{name: _immediate for name in ("bulk_wait", "bulk_wait_read", "regs_give", "regs_take")},
    "tma_load": _copy, "tma_im2col": _im2col, "tma_prefetch": _prefetch, "tma_fetch": _fetch, "tma_store": _copy,
    "stmatrix_x4": _matrices, "stmatrix_x4_trans": _matrices,
    "wgmma": _product, "wgmma_sp": _sparse_product, "wgmma_kn": _product, "wgmma_wait": _wait,
    "resident": lambda em, s: "",  # said in the kernel's head
    "first_level_cache": lambda em, s: "",  # said by the launch
}  # fmt: skip
VALUES: dict[str, Callable[[FuncEmitter, Op], str]] = {"peer": _peer}
