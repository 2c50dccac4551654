"""Programs that run on a CUDA device, and on the one that is interpreted: a chain, loops of known length, a loop that
the data ends.
"""

NET = """
def net(x: f32[4, 24], i: i64[3], *, w: f32[24, 16], v: f32[16, 24]):
    h = relu(matmul(x, w))
    y = softmax(matmul(h, v))
    return gather(y, i, axis=0), reduce_sum(h, axes=(1,))
"""
STACKED = """
def net(x: f32[4, 20], xs: f32[5, 4, 20], *, w: f32[20, 20]):
    def body(k: i64, h: f32[4, 20], r: f32[4, 20], u: f32[20, 20]):
        a = softmax(add(matmul(h, u), mul(r, cast(k, to=f32))))
        return a, mul(a, 2.0)
    (h, s) = loop(None, None, x, xs, w, body=body, carried=1, scanned=1, length=5, backward=(True, False))
    return h, relu(s)
"""
RECURRENT = """
def net(x: f32[4, 20], xs: f32[5, 4, 20], *, w: f32[20, 20]):
    def body(k: i64, h: f32[4, 20], r: f32[4, 20], u: f32[20, 20]):
        a = tanh(add(matmul(h, u), mul(r, cast(k, to=f32))))
        return a, mul(a, 2.0)
    (h, s) = loop(None, None, x, xs, w, body=body, carried=1, scanned=1, length=5, backward=(True, False))
    return h, relu(s)
"""
ODD_ROWS = """
def net(x: f32[3], xs: f32[5, 3]):
    def body(k: i64, h: f32[3], r: f32[3]):
        a = add(mul(h, 0.5), r)
        return a, a
    (h, s) = loop(None, None, x, xs, body=body, carried=1, scanned=1, length=5, backward=(False, True))
    return h, s
"""
WHILE = """
def net(n: i64, x: f32[3]):
    def body(k: i64, v: f32[3], c: f32):
        y = mul(v, 1.5)
        return less(reduce_sum(y, axes=(0,)), c), y
    c = mul(cast(n, to=f32), 4.0)
    a = abs(x)
    return loop(None, less(reduce_sum(a, axes=(0,)), c), a, c, body=body, carried=1)
"""
