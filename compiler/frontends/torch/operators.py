"""Every ATen operator that is read, by schema name; those without code; hints for some that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.torch.activation import ACTIVATION
from dnnc.frontends.torch.backward import BACKWARD
from dnnc.frontends.torch.call import Call
from dnnc.frontends.torch.create import CREATE
from dnnc.frontends.torch.elementwise import ELEMENTWISE
from dnnc.frontends.torch.index import INDEX
from dnnc.frontends.torch.joins import JOINS
from dnnc.frontends.torch.linear import LINEAR
from dnnc.frontends.torch.movement import MOVEMENT
from dnnc.frontends.torch.nn import NN
from dnnc.frontends.torch.random import RANDOM
from dnnc.frontends.torch.reduce import REDUCE
from dnnc.frontends.torch.resize import RESIZE
from dnnc.frontends.torch.rnn import RNN

GROUPS: dict[str, dict[str, Callable[[Call], Any]]] = {
    "element by element": ELEMENTWISE,
    "activations": ACTIVATION,
    "reductions, sorting": REDUCE,
    "movement": MOVEMENT,
    "joins, padding": JOINS,
    "creation": CREATE,
    "indexing": INDEX,
    "products, attention": LINEAR,
    "layers": NN,
    "resizing": RESIZE,
    "recurrent layers": RNN,
    "random numbers": RANDOM,
    "gradients": BACKWARD,
}
TABLE: dict[str, Callable[[Call], Any]] = {name: f for group in GROUPS.values() for name, f in group.items()}

# Assertions about sizes, which calls check by themselves, and about data, which torch's own compilers drop too.
IGNORED = frozenset(
    "_assert_scalar _assert_async _functional_assert_async _assert_tensor_metadata sym_constrain_range "
    "sym_constrain_range_for_size".split()
)

_SIZED = "the size of its result depends on the data: keep it outside of the compiled function (torch.compile does so)"
_RANDOM = "random numbers are drawn outside of the compiled function: pass them as an input"
REFUSED = {
    "nonzero": _SIZED,
    "masked_select": _SIZED,
    "repeat_interleave": _SIZED,
    "unique_dim": _SIZED,
    "_unique2": _SIZED,
    "_local_scalar_dense": "a number taken out of a tensor is known only at a call; keep it in a tensor",
    "randperm": _RANDOM,
    "multinomial": _RANDOM,
}

# Operators with a form of their own here that torch would take apart into many smaller ones.
WHOLE = frozenset(
    "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu lstm gru rnn_tanh rnn_relu linear gelu "
    "silu mish hardswish hardsigmoid softplus elu leaky_relu hardtanh relu6 log_sigmoid_forward _prelu_kernel "
    "native_layer_norm layer_norm rms_norm _fused_rms_norm group_norm native_group_norm addmm baddbmm addmv "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d linalg_vector_norm avg_pool1d "
    "pixel_shuffle tril triu floor_divide masked_fill eye index_add unbind stack roll unfold logsumexp std var "
    "var_mean split split_with_sizes std_mean".split()
) & set(TABLE)
