"""The C++ that generated kernels stand on: types, vectors, and the guarded forms of what C++ or PTX leaves undefined.

In: the names of the helpers that a kernel's text uses. Out: the text that goes before it, with these and what they
need. A helper is written for scalars; "name/2" is its form for vectors of a function of two operands, lane by lane. No
header is included: NVRTC knows the mathematical functions and the warp intrinsics, and half floats have instructions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

BASE = """\
typedef signed char i8; typedef short i16; typedef int i32; typedef long long i64;
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef float f32; typedef double f64;
#define FN static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
"""


def _shuffle(name: str) -> str:
    """Types below 32 bits go as words. Helpers of the same name take vectors, lane by lane."""
    call = f"__{name}_sync(~0u, (u32)bit_cast<typename Word<sizeof(T)>::T>(x), n)"
    small = f"template<class T> FN T {name}(T x, int n) {{ return bit_cast<T>((typename Word<sizeof(T)>::T){call}); }}"
    return "\n".join(
        [small, *(f"FN {t} {name}({t} x, int n) {{ return __{name}_sync(~0u, x, n); }}" for t in ("i64", "u64", "f64"))]
    )


def _shuffle_vector(name: str) -> str:
    return f"""\
template<class T, int N> FN V<T, N> {name}(const V<T, N>& x, int n) {{
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = {name}(x.v[i], n);
  return r;
}}"""


# ldmatrix_x4 of elements of a byte
BYTE_ROWS = "\n".join(
    f"""\
FN V<{t}, 16> ldmatrix_x4(const {t}* p) {{
  u32 u[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
    : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3]) : "r"(shared_address(p)) : "memory");
  V<{t}, 16> r;
  memcpy(r.v, u, 16);
  return r;
}}"""
    for t in ("u8", "i8")
)
MMA_BYTES = "\n".join(
    f"""\
FN V<i32, 4> mma_m16n8k32(V<i32, 4> d, const V<{a}, 16>& a, const V<{b}, 8>& b) {{
  u32 x[4], y[2];
  memcpy(x, a.v, 16), memcpy(y, b.v, 8);
  asm("mma.sync.aligned.m16n8k32.row.col.s32.{a.replace("i", "s")}.{b.replace("i", "s")}.s32 {{%0, %1, %2, %3}}, \
{{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
    : "+r"(d.v[0]), "+r"(d.v[1]), "+r"(d.v[2]), "+r"(d.v[3])
    : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
  return d;
}}"""
    for a in ("u8", "i8")
    for b in ("u8", "i8")
)


# eight codes less z, in 16 bits: 0x6400 | q is 1024 + q (bf16: 0x4300 | q is 128 + q), of which 1024 + z is taken
HALVES = {
    "masked": """\
FN u32 masked(u32 q, u32 mask, u32 high) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(q), "r"(mask), "r"(high));
  return r;
}""",
    "both": "FN u32 both(u32 x) { return x | x << 16; }",
    "halves_f16": """\
FN V<f16, 8> halves_f16(u32 q, i32 z) {
  const u32 low = both(0x6400 + z), high = both(0xd400 + (z << 4)), by = 0x2c002c00;
  u32 r[4];
  UNROLL for (int i = 0; i < 4; i += 2) {
    r[i] = masked(q >> 4 * i, 0x000f000f, 0x64006400);
    r[i + 1] = masked(q >> 4 * i, 0x00f000f0, 0x64006400);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(r[i]) : "r"(low));
    asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(r[i + 1]) : "r"(by), "r"(high));
  }
  V<f16, 8> v;
  memcpy(v.v, r, 16);
  return v;
}
template<class T> FN V<f16, 8> halves_f16(const V<T, 8>& x, i32 z) {
  const u32 flip = T(-1) < T(0) ? 0x80808080 : 0, low = both(0x6400 + z + (flip ? 128 : 0));
  u32 q[2], r[4];
  memcpy(q, x.v, 8);
  UNROLL for (int i = 0; i < 4; ++i) {
    r[i] = __byte_perm(q[i / 2] ^ flip, 0x64646464, i % 2 ? 0x4342 : 0x4140);
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(r[i]) : "r"(low));
  }
  V<f16, 8> v;
  memcpy(v.v, r, 16);
  return v;
}""",
    "halves_bf16": """\
FN V<bf16, 8> halves_bf16(u32 q, i32 z) {
  const u32 low = both(0xc300 + z), one = 0x3f803f80;
  u32 r[4];
  UNROLL for (int i = 0; i < 4; ++i) {
    r[i] = masked(q >> 4 * i, 0x000f000f, 0x43004300);
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(r[i]) : "r"(one), "r"(low));
  }
  V<bf16, 8> v;
  memcpy(v.v, r, 16);
  return v;
}
template<class T> FN V<bf16, 8> halves_bf16(const V<T, 8>& x, i32 z) {
  const u32 flip = T(-1) < T(0) ? 0x80808080 : 0;
  const f32 low = __int_as_float(0x4b000000 + z + (flip ? 128 : 0));
  u32 q[2], r[4];
  f32 f[8];
  memcpy(q, x.v, 8);
  UNROLL for (int i = 0; i < 8; ++i)
    f[i] = __uint_as_float(__byte_perm(q[i / 4] ^ flip, 0x4b000000, 0x7440 + i % 4)) - low;
  UNROLL for (int i = 0; i < 4; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
  V<bf16, 8> v;
  memcpy(v.v, r, 16);
  return v;
}""",
}


SHUFFLES = ("shfl", "shfl_xor", "shfl_up", "shfl_down")

# What a helper needs is found by its names in the text, so no list of needs can be out of date.
HELPERS: dict[str, str] = {
    # --- types ---
    "f16": "struct f16 { u16 bits; };",
    "bf16": "struct bf16 { u16 bits; };",
    **{t: f"struct {t} {{ u8 bits; }};" for t in ("f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e8m0",
    "f4e2m1")},
    "i4": "typedef i8 i4;",
    "i2": "typedef i8 i2;",
    "u4": "typedef u8 u4;",
    "u2": "typedef u8 u2;",
    "V": "template<class T, int N> struct V { T v[N]; };",
    "Unsigned": """\
template<class T> struct Unsigned { typedef u32 U; };
template<> struct Unsigned<i64> { typedef u64 U; };
template<> struct Unsigned<u64> { typedef u64 U; };""",
    "Word": """\
template<int BYTES> struct Word { typedef u32 T; };
template<> struct Word<1> { typedef u8 T; };
template<> struct Word<2> { typedef u16 T; };
template<> struct Word<8> { typedef uint2 T; };
template<> struct Word<16> { typedef uint4 T; };""",
    # --- memory: A elements at a time, which the caller has shown to be aligned ---
    "bit_cast": "template<class TO, class T> FN TO bit_cast(T x) { TO r; memcpy(&r, &x, sizeof(TO)); return r; }",
    # elements below 32 bits are cut out of words: left to itself the compiler splits the load instead
    "ld": """\
template<int A, int N, class T> FN V<T, N> ld(const T* p) {
  typedef typename Word<sizeof(T) * A>::T W;
  V<T, N> r;
  UNROLL for (int i = 0; i < N; i += A) {
    const W w = *(const W*)(p + i);
    if (sizeof(T) < 4 && sizeof(W) >= 4) {
      u32 u[sizeof(W) / 4 + 1];
      memcpy(u, &w, sizeof(W));
      UNROLL for (int k = 0; k < A; ++k)
        r.v[i + k] = bit_cast<T>((typename Word<sizeof(T) < 4 ? sizeof(T) : 4>::T)(u[k * sizeof(T) / 4] >> \
(k * sizeof(T) % 4 * 8)));
    } else memcpy(r.v + i, &w, sizeof(W));
  }
  return r;
}""",
    "st": """\
template<int A, class T, int N> FN void st(T* p, const V<T, N>& x) {
  typedef typename Word<sizeof(T) * A>::T W;
  UNROLL for (int i = 0; i < N; i += A) {
    W w;
    if (sizeof(T) < 4 && sizeof(W) >= 4) {
      u32 u[sizeof(W) / 4 + 1];
      UNROLL for (int k = 0; k < (int)sizeof(W) / 4; ++k) u[k] = 0;
      UNROLL for (int k = 0; k < A; ++k)
        u[k * sizeof(T) / 4] |= (u32)bit_cast<typename Word<sizeof(T) < 4 ? sizeof(T) : 4>::T>(x.v[i + k]) \
<< (k * sizeof(T) % 4 * 8);
      memcpy(&w, u, sizeof(W));
    } else memcpy(&w, x.v + i, sizeof(W));
    *(W*)(p + i) = w;
  }
}""",
    "ld_first": """\
template<int A, int N, class T> FN V<T, N> ld_first(const T* p, int n) {
  if (n >= N) return ld<A, N>(p);
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = i < n ? p[i] : T();
  return r;
}""",
    "st_first": """\
template<int A, class T, int N> FN void st_first(T* p, const V<T, N>& x, int n) {
  if (n >= N) return st<A>(p, x);
  UNROLL for (int i = 0; i < N; ++i) if (i < n) p[i] = x.v[i];
}""",
    # registers: single elements, so that every index is a constant once loops are unrolled
    "take": "template<int N, class T> FN V<T, N> take(const T* p) { V<T, N> r; UNROLL for (int i = 0; i < N; ++i) "
            "r.v[i] = p[i]; return r; }",
    "put": "template<class T, int N> FN void put(T* p, const V<T, N>& x) { UNROLL for (int i = 0; i < N; ++i) p[i] = "
           "x.v[i]; }",
    "take_first": """\
template<int N, class T> FN V<T, N> take_first(const T* p, int n) {
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = i < n ? p[i] : T();
  return r;
}""",
    "put_first": "template<class T, int N> FN void put_first(T* p, const V<T, N>& x, int n) { UNROLL for (int i = 0; i "
                 "< N; ++i) if (i < n) p[i] = x.v[i]; }",
    "gather": """\
template<class T, int N> FN V<T, N> gather(const T* p, const V<i64, N>& at, int n = N) {
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = i < n ? p[at.v[i]] : T();
  return r;
}""",
    "scatter": """\
template<class T, int N> FN void scatter(T* p, const V<i64, N>& at, const V<T, N>& x, int n = N) {
  UNROLL for (int i = 0; i < N; ++i) if (i < n) p[at.v[i]] = x.v[i];
}""",
    # --- vectors ---
    "splat": "template<class T, int N> FN V<T, N> splat(T x) { V<T, N> r; UNROLL for (int i = 0; i < N; ++i) r.v[i] = "
             "x; return r; }",
    "lanes": "template<int N> FN V<i64, N> lanes() { V<i64, N> r; UNROLL for (int i = 0; i < N; ++i) r.v[i] = i; "
             "return r; }",
    "zip_low": """\
template<class T, int N> FN V<T, N> zip_low(const V<T, N>& a, const V<T, N>& b) {
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = i % 2 ? b.v[i / 2] : a.v[i / 2];
  return r;
}""",
    "zip_high": """\
template<class T, int N> FN V<T, N> zip_high(const V<T, N>& a, const V<T, N>& b) {
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = i % 2 ? b.v[(N + i) / 2] : a.v[(N + i) / 2];
  return r;
}""",
    # a binary tree of halves
    "hsum": "template<class T, int N> FN T hsum(V<T, N> x) { UNROLL for (int h = N / 2; h; h /= 2) UNROLL for (int i = "
            "0; i < h; ++i) x.v[i] = add(x.v[i], x.v[i + h]); return x.v[0]; }",
    "hprod": "template<class T, int N> FN T hprod(V<T, N> x) { UNROLL for (int h = N / 2; h; h /= 2) UNROLL for (int i "
             "= 0; i < h; ++i) x.v[i] = mul(x.v[i], x.v[i + h]); return x.v[0]; }",
    "hmax": "template<class T, int N> FN T hmax(const V<T, N>& x) { T r = x.v[0]; UNROLL for (int i = 1; i < N; ++i) r "
            "= maximum(r, x.v[i]); return r; }",
    "hmin": "template<class T, int N> FN T hmin(const V<T, N>& x) { T r = x.v[0]; UNROLL for (int i = 1; i < N; ++i) r "
            "= minimum(r, x.v[i]); return r; }",
    # --- integers: wrapping arithmetic, total division and shifts ---
    "add": """\
template<class T> FN T add(T a, T b) { return T(typename Unsigned<T>::U(a) + typename Unsigned<T>::U(b)); }
FN f32 add(f32 a, f32 b) { return a + b; }
FN f64 add(f64 a, f64 b) { return a + b; }""",
    "mul": """\
template<class T> FN T mul(T a, T b) { return T(typename Unsigned<T>::U(a) * typename Unsigned<T>::U(b)); }
FN f32 mul(f32 a, f32 b) { return a * b; }
FN f64 mul(f64 a, f64 b) { return a * b; }""",
    "sub": (
        "template<class T> FN T sub(T a, T b) "
        "{ return T(typename Unsigned<T>::U(a) - typename Unsigned<T>::U(b)); }"
    ),
    "udiv": "FN int udiv(int a, u32 b) { return int((u32)a / b); }\nFN i64 udiv(i64 a, u64 b) { return i64((u64)a / "
            "b); }",
    "umod": "FN int umod(int a, u32 b) { return int((u32)a % b); }\nFN i64 umod(i64 a, u64 b) { return i64((u64)a % "
            "b); }",
    "floordiv": "template<class T> FN T floordiv(T a, T b) { const T q = a / b; return q - (a - q * b < 0); }",
    "floorrem": "template<class T> FN T floorrem(T a, T b) { const T r = a % b; return r + (r < 0 ? b : T(0)); }",
    "truncdiv": "template<class T> FN T truncdiv(T a, T b) { return b == T(0) ? T(0) : b == T(-1) && T(-1) < T(0) ? "
                "sub(T(0), a) : T(a / b); }",
    "truncmod": """\
template<class T> FN T truncmod(T a, T b) { return b == T(0) || (b == T(-1) && T(-1) < T(0)) ? T(0) : T(a % b); }
FN f32 truncmod(f32 a, f32 b) { return fmodf(a, b); }
FN f64 truncmod(f64 a, f64 b) { return fmod(a, b); }""",
    "floormod": """\
template<class T> FN T floormod(T a, T b) {
  const T r = truncmod(a, b);
  return r != T(0) && (r < T(0)) != (b < T(0)) ? T(r + b) : r;
}""",
    "shl": "template<class T> FN T shl(T a, T n) { return (typename Unsigned<T>::U)n < sizeof(T) * 8 ? T((typename "
           "Unsigned<T>::U)a << n) : T(0); }",
    "shr": "template<class T> FN T shr(T a, T n) { return (typename Unsigned<T>::U)n < sizeof(T) * 8 ? T(a >> n) : T(a "
           "< T(0) ? -1 : 0); }",
    "negate": "template<class T> FN T negate(T a) { return T(-typename Unsigned<T>::U(a)); }\nFN f32 negate(f32 a) { "
              "return -a; }\nFN f64 negate(f64 a) { return -a; }",
    "absolute": "template<class T> FN T absolute(T a) { return a < T(0) ? negate(a) : a; }\nFN f32 absolute(f32 a) { "
                "return fabsf(a); }\nFN f64 absolute(f64 a) { return fabs(a); }",
    "bitnot": "template<class T> FN T bitnot(T a) { return T(~a); }\nFN bool bitnot(bool a) { return !a; }",
    "popcount": "FN u32 popcount(u32 a) { return __popc(a); }",
    "logical_not": "FN bool logical_not(bool a) { return !a; }",
    **{name: f"template<class T> FN T {name}(T a, T b) {{ return T(a {sign} b); }}" for name, sign in
       (("bit_and", "&"), ("bit_or", "|"), ("bit_xor", "^"))},
    # --- comparisons and choice ---
    **{name: f"template<class T> FN bool {name}(T a, T b) {{ return a {sign} b; }}" for name, sign in
       (("less", "<"), ("less_equal", "<="), ("equal", "=="), ("not_equal", "!="))},
    "choose": "template<class T> FN T choose(bool c, T a, T b) { return c ? a : b; }",
    "choose/3": """\
template<class T, int N> FN V<T, N> choose(const V<bool, N>& c, const V<T, N>& a, const V<T, N>& b) {
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = c.v[i] ? a.v[i] : b.v[i];
  return r;
}""",
    # a NaN in either operand is the result
    "maximum": """\
template<class T> FN T maximum(T a, T b) { return a > b || a != a ? a : b; }
FN f32 maximum(f32 a, f32 b) { f32 r; asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }""",
    "minimum": """\
template<class T> FN T minimum(T a, T b) { return a < b || a != a ? a : b; }
FN f32 minimum(f32 a, f32 b) { f32 r; asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }""",
    # the second operand where one is NaN
    "second_max": "template<class T> FN T second_max(T a, T b) { return a > b ? a : b; }",
    "second_min": "template<class T> FN T second_min(T a, T b) { return a < b ? a : b; }",
    # two roundings; results below the normal numbers are 0
    "power_of_two": 'FN f32 power_of_two(f32 x) { f32 r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return '
                    'r; }\nFN f64 power_of_two(f64 x) { return exp2(x); }',
    # 1 ulp; operands and results below the normal numbers are 0
    "reciprocal": 'FN f32 reciprocal(f32 x) { f32 r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; '
                  '}\nFN f64 reciprocal(f64 x) { return 1.0 / x; }',
    "is_nan": "template<class T> FN bool is_nan(T x) { return x != x; }",
    # --- floats ---
    "divide": "template<class T> FN T divide(T a, T b) { return a / b; }",
    "subtract": "template<class T> FN T subtract(T a, T b) { return a - b; }",
    "fused": "FN f32 fused(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }\nFN f64 fused(f64 a, f64 b, f64 c) { "
             "return __fma_rn(a, b, c); }",
    "scale_by_power": "FN f32 scale_by_power(f32 x, i32 n) { return ldexpf(x, n); }\nFN f64 scale_by_power(f64 x, i32 "
                      "n) { return ldexp(x, n); }",
    "scale_by_power/2": """\
template<class T, int N> FN V<T, N> scale_by_power(const V<T, N>& x, const V<i32, N>& n) {
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = scale_by_power(x.v[i], n.v[i]);
  return r;
}""",
    # --- conversions: float to integer truncates and saturates, NaN is 0; narrower integers wrap ---
    "to_i32": "FN i32 to_i32(f32 x) { return x == x ? __float2int_rz(x) : 0; }\nFN i32 to_i32(f64 x) { return x == x ? "
              "__double2int_rz(x) : 0; }",
    "nearest_i32": "FN i32 nearest_i32(f32 x) { return __float2int_rn(x); }",
    "to_u32": "FN u32 to_u32(f32 x) { return x == x ? __float2uint_rz(x) : 0; }\nFN u32 to_u32(f64 x) { return x == x "
              "? __double2uint_rz(x) : 0; }",
    "to_i64": "FN i64 to_i64(f32 x) { return x == x ? __float2ll_rz(x) : 0; }\nFN i64 to_i64(f64 x) { return x == x ? "
              "__double2ll_rz(x) : 0; }",
    "to_u64": "FN u64 to_u64(f32 x) { return x == x ? __float2ull_rz(x) : 0; }\nFN u64 to_u64(f64 x) { return x == x ? "
              "__double2ull_rz(x) : 0; }",
    **{f"to_{t}": f"template<class T> FN {t} to_{t}(T x) {{ return ({t})min(max(to_i32(x), {lo}), {hi}); }}" for t, lo,
    hi in (
        ("i8", -128, 127), ("i16", -32768, 32767), ("u8", 0, 255), ("u16", 0, 65535),
        ("i4", -8, 7), ("u4", 0, 15), ("i2", -2, 1), ("u2", 0, 3))},
    "to_bool": "template<class T> FN bool to_bool(T x) { return x != T(0); }",
    "from_f16": 'FN f32 from_f16(f16 x) { f32 r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits)); return r; }',
    "to_f16": """\
FN f16 to_f16(f32 x) { f16 r; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r; }
FN f16 to_f16(f64 x) { f16 r; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(r.bits) : "d"(x)); return r; }""",
    "from_bf16": "FN f32 from_bf16(bf16 x) { return __uint_as_float((u32)x.bits << 16); }",
    "to_bf16": 'FN bf16 to_bf16(f32 x) { bf16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x)); return r; }',
    # pairs of lanes by one instruction, which packs them
    **{f"to_{t}/1": f"""\
template<int N> FN V<{t}, N> to_{t}(const V<f32, N>& x) {{
  V<{t}, N> r;
  UNROLL for (int i = 0; i < N / 2; ++i) {{
    u32 u;
    asm("cvt.rn.{t}x2.f32 %0, %1, %2;" : "=r"(u) : "f"(x.v[2 * i + 1]), "f"(x.v[2 * i]));
    r.v[2 * i].bits = (u16)u;
    r.v[2 * i + 1].bits = (u16)(u >> 16);
  }}
  if (N % 2) r.v[N - 1] = to_{t}(x.v[N - 1]);
  return r;
}}
template<int N> FN V<{t}, N> to_{t}(const V<f64, N>& x) {{ V<{t}, N> r; UNROLL for (int i = 0; i < N; ++i) r.v[i] = \
to_{t}(x.v[i]); return r; }}"""
       for t in ("f16", "bf16")},
    # erf(x) + 1 = erfc(-x) by Chebyshev's fit in Press et al., Numerical Recipes, section 6.2: 4e-7 off, 17
    # instructions where erff alone takes 26
    "erf_and_one": """\
FN f32 erf_and_one(f32 x) {
  const f32 z = fabsf(x);
  f32 t, e;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(0.5f, z, 1.0f)));
  f32 p = fmaf(t, 0.17087277f, -0.82215223f);
  p = fmaf(t, p, 1.48851587f), p = fmaf(t, p, -1.13520398f), p = fmaf(t, p, 0.27886807f);
  p = fmaf(t, p, -0.18628806f), p = fmaf(t, p, 0.09678418f), p = fmaf(t, p, 0.37409196f);
  p = fmaf(t, p, 1.00002368f), p = fmaf(t, p, -1.26551223f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(fmaf(-z, z, p) * 1.44269504f));
  return x > 0.0f ? 2.0f - t * e : t * e;
}""",
    # 8-bit floats, of sm_89 and later; the instruction makes the largest number of what is too large
    **{key: text for t, kind, over, high in (
        ("f8e4m3fn", "e4m3", "fabsf(x) > 464.0f", "u | 127"),
        ("f8e5m2", "e5m2", "fabsf(x) >= 61440.0f", "u & 128 | 124"))
       for key, text in {
        f"up_{t}": f"""\
FN f32 up_{t}({t} x) {{
  u32 u;
  asm("cvt.rn.f16x2.{kind}x2 %0, %1;" : "=r"(u) : "h"((u16)x.bits));
  f16 h;
  h.bits = (u16)u;
  return from_f16(h);
}}""",
        f"bits_{t}": f"""\
FN u16 bits_{t}(f32 low, f32 high) {{
  u16 u;
  asm("cvt.rn.satfinite.{kind}x2.f32 %0, %1, %2;" : "=h"(u) : "f"(high), "f"(low));
  return u;
}}""",
        f"over_{t}": f"""\
FN {t} over_{t}(u16 u, f32 x) {{ {t} r; r.bits = (u8)({over} ? {high} : u); return r; }}""",
        f"down_{t}": f"FN {t} down_{t}(f32 x) {{ return over_{t}(bits_{t}(x, 0.0f), x); }}",
        f"down_{t}/1": f"""\
template<int N> FN V<{t}, N> down_{t}(const V<f32, N>& x) {{
  V<{t}, N> r;
  UNROLL for (int i = 0; i < N; i += 2) {{
    const u16 u = bits_{t}(x.v[i], x.v[min(i + 1, N - 1)]);
    r.v[i] = over_{t}((u16)(u & 255), x.v[i]);
    if (i + 1 < N) r.v[i + 1] = over_{t}((u16)(u >> 8), x.v[i + 1]);
  }}
  return r;
}}""",
        f"clip_{t}": f"FN {t} clip_{t}(f32 x) {{ {t} r; r.bits = (u8)bits_{t}(x, 0.0f); return r; }}",
        f"clip_{t}/1": f"""\
template<int N> FN V<{t}, N> clip_{t}(const V<f32, N>& x) {{
  V<{t}, N> r;
  UNROLL for (int i = 0; i < N; i += 2) {{
    const u16 u = bits_{t}(x.v[i], x.v[min(i + 1, N - 1)]);
    r.v[i].bits = (u8)u;
    if (i + 1 < N) r.v[i + 1].bits = (u8)(u >> 8);
  }}
  return r;
}}""",
    }.items()},
    # --- indices known only at run time: clamped into [lo, hi), and noted ---
    "guard": """\
template<class T> FN T guard(i64 x, T lo, T hi, i32* status, i32 kernel) {
  if (x >= lo && x < hi) return T(x);
  status[0] = 1, status[1] = kernel, status[2] = (i32)x;
  return x < lo || hi <= lo ? lo : T(hi - 1);
}""",
    "guard/3": """\
template<int N> FN V<i64, N> guard(const V<i64, N>& x, const V<i64, N>& lo, const V<i64, N>& hi, i32* status, \
i32 kernel) {
  V<i64, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = guard(x.v[i], lo.v[i], hi.v[i], status, kernel);
  return r;
}""",
    # --- packed integers below a byte ---
    **{f"unpack_{t}": f"FN {t} unpack_{t}({t} x) {{ return ({t})((i8)(x << {n}) >> {n}); }}" for t,
    n in (("i4", 4), ("i2", 6))},
    **{f"unpack_{t}": f"FN {t} unpack_{t}({t} x) {{ return x & {m}; }}" for t, m in (("u4", 15), ("u2", 3))},
    **{f"pack_{t}": f"FN {t} pack_{t}({t} x) {{ return x & {m}; }}" for t,
    m in (("i4", 15), ("i2", 3), ("u4", 15), ("u2", 3))},
    "convert": """\
template<class TO, class T, int N> FN V<TO, N> convert(const V<T, N>& x) {
  V<TO, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = (TO)x.v[i];
  return r;
}""",
    **{f"operator{o}": f"""\
template<class T, int N> FN V<T, N> operator{o}(const V<T, N>& a, const V<T, N>& b) {{
  V<T, N> r;
  UNROLL for (int i = 0; i < N; ++i) r.v[i] = a.v[i] {o} b.v[i];
  return r;
}}""" for o in "+-*/"},
    # --- warps ---
    **{name: _shuffle(name) for name in SHUFFLES},
    **{f"{name}/shuffle": _shuffle_vector(name) for name in SHUFFLES},
    # --- matrices ---
    "shared_address": 'FN u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }',
    "prefetch": 'FN void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }',
    **{name: f"""\
template<class T> FN V<T, 8> {name}(const T* p) {{
  u32 u[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
    : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3]) : "r"(shared_address(p)) : "memory");
  V<T, 8> r;
  UNROLL for (int i = 0; i < 8; ++i) r.v[i].bits = (u16)(u[i / 2] >> (i % 2 * 16));
  return r;
}}""" + ("" if trans else f"""
{BYTE_ROWS}
FN V<f32, 4> {name}(const f32* p) {{
  V<f32, 4> r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
    : "=f"(r.v[0]), "=f"(r.v[1]), "=f"(r.v[2]), "=f"(r.v[3]) : "r"(shared_address(p)) : "memory");
  return r;
}}""") for name, trans in (("ldmatrix_x4", ""), ("ldmatrix_x4_trans", ".trans"))},
    "pair": "template<class T> FN u32 pair(T low, T high) { return (u32)low.bits | (u32)high.bits << 16; }",
    "mma_m16n8k16": "\n".join(f"""\
FN V<f32, 4> mma_m16n8k16(V<f32, 4> d, const V<{t}, 8>& a, const V<{t}, 4>& b) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, \
%2, %3}};"
    : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
    : "r"(pair(a.v[0], a.v[1])), "r"(pair(a.v[2], a.v[3])), "r"(pair(a.v[4], a.v[5])), "r"(pair(a.v[6], a.v[7])),
      "r"(pair(b.v[0], b.v[1])), "r"(pair(b.v[2], b.v[3])));
  return d;
}}""" for t in ("f16", "bf16")),
    "mma_sp_m16n8k32": "\n".join(f"""\
template<int PART> FN V<f32, 4> mma_sp_m16n8k32(V<f32, 4> d, const V<{t}, 8>& a, const V<{t}, 8>& b, u32 places) {{
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{t}.{t}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, \
{{%8, %9, %10, %11}}, {{%0, %1, %2, %3}}, %12, %13;"
    : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
    : "r"(pair(a.v[0], a.v[1])), "r"(pair(a.v[2], a.v[3])), "r"(pair(a.v[4], a.v[5])), "r"(pair(a.v[6], a.v[7])),
      "r"(pair(b.v[0], b.v[1])), "r"(pair(b.v[2], b.v[3])), "r"(pair(b.v[4], b.v[5])), "r"(pair(b.v[6], b.v[7])),
      "r"(places), "n"(PART));
  return d;
}}""" for t in ("f16", "bf16")),
    "mma_m16n8k32": MMA_BYTES,
    **HALVES,
    "dot4": "\n".join(f"""\
FN i32 dot4(i32 d, const V<{t}, 4>& a, const V<i8, 4>& b) {{
  asm("dp4a.{t.replace("i", "s")}.s32 %0, %1, %2, %0;" : "+r"(d) : "r"(bit_cast<u32>(a)), "r"(bit_cast<u32>(b)));
  return d;
}}""" for t in ("u8", "i8")).replace("dp4a.u8", "dp4a.u32").replace("dp4a.s8", "dp4a.s32"),
    "tf32": 'FN u32 tf32(f32 x) { u32 r; asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x)); return r; }',
    **{name: f"""\
FN V<f32, 4> {name}(V<f32, 4> d, const V<f32, 4>& a, const V<f32, 2>& b) {{
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, \
%1, %2, %3}};"
    : "+f"(d.v[0]), "+f"(d.v[1]), "+f"(d.v[2]), "+f"(d.v[3])
    : "r"({to}(a.v[0])), "r"({to}(a.v[1])), "r"({to}(a.v[2])), "r"({to}(a.v[3])), "r"({to}(b.v[0])), \
"r"({to}(b.v[1])));
  return d;
}}""" for name, to in (("mma_m16n8k8", "tf32"), ("mma_m16n8k8_cut", "__float_as_uint"))},
    # --- asynchronous copies: what lies past n is filled with 0 ---
    "cp_async": """\
template<int BYTES> FN void cp_async(void* to, const void* from, int bytes = BYTES) {
  if (BYTES == 16) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(shared_address(to)), \
"l"(from), "r"(bytes) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(shared_address(to)), "l"(from), "n"(BYTES), \
"r"(bytes) : "memory");
}""",
    "cp_async_commit": 'FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }',
    "cp_async_wait": 'template<int N> FN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : '
                     '"memory"); }',
    # what this kernel reads may still be being written; the one after it may be launched (in order before sm_90)
    "pdl_wait": """\
FN void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}""",
    "pdl_launch": """\
FN void pdl_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}""",
}  # fmt: skip
_WORD = re.compile(r"[A-Za-z_]\w*")


def lift(name: str, arity: int) -> str:
    """The form for vectors of a scalar function whose operands are of one type."""
    params = ", ".join(f"const V<T, N>& x{k}" for k in range(arity))
    first, lane = (", ".join(f"x{k}.v[{i}]" for k in range(arity)) for i in ("0", "i"))
    result = f"V<decltype({name}({first})), N>"
    head = f"template<class T, int N> FN auto {name}({params}) -> {result}"
    return f"{head} {{\n  {result} r;\n  UNROLL for (int i = 0; i < N; ++i) r.v[i] = {name}({lane});\n  return r;\n}}"


def prelude(text: str, lifted: Iterable[str], more: Mapping[str, str]) -> str:
    """Text before kernels: helpers that they name, vector forms, and `more`. Names of helpers are reserved."""
    table = {**HELPERS, **more}
    done: dict[str, None] = {}

    def add(name: str) -> None:
        if name in done:
            return
        base, _, arity = name.partition("/")
        text = table[name] if name in table else lift(base, int(arity))
        if arity and base in table:
            add(base)
        for word in dict.fromkeys(_WORD.findall(text)):
            if word in table and word != base:
                add(word)
        done[name] = None
        texts.append(text)

    texts: list[str] = []
    for name in sorted({*lifted, *(w for w in _WORD.findall(text) if w in table)}):
        add(name)
    return BASE + "\n".join(texts) + "\n"
