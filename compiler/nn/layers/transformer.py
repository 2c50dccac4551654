"""Attention with several heads, and the layers of transformers (Vaswani et al., 2017)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import asarray
from dnnc.array.elementwise import add, multiply
from dnnc.array.linalg import matmul
from dnnc.array.manipulation import broadcast_to, concat, expand_dims, matrix_transpose, permute_dims, reshape, squeeze
from dnnc.array.promotion import dtype_of
from dnnc.array.statistical import mean
from dnnc.ir.errors import InputError
from dnnc.nn import functional as F
from dnnc.nn import init
from dnnc.nn.containers import ModuleList
from dnnc.nn.functional.attention import causal_mask, hidden_scores
from dnnc.nn.functional.operands import array, filled
from dnnc.nn.layers.linear import DTYPE, Linear, empty
from dnnc.nn.layers.norm import LayerNorm
from dnnc.nn.layers.wrapped import Dropout
from dnnc.nn.module import Module


class MultiheadAttention(Module):
    """Attention whose queries, keys and values are cut into heads.

    Args:
        embed_dim: width of the queries and of the result; divides by `num_heads`.
        dropout: probability of dropping an attention weight in training.
        add_bias_kv: one more key and value, which are learnt.
        add_zero_attn: one more key and value of zeros.
        kdim, vdim: widths of keys and values, `embed_dim` by default.
        batch_first: are arrays [N, L, E], not [L, N, E]?
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise InputError(f"MultiheadAttention: embed_dim={embed_dim} does not divide into {num_heads} heads")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.kdim, self.vdim, self.add_zero_attn = kdim or embed_dim, vdim or embed_dim, add_zero_attn
        together = self.kdim == self.vdim == embed_dim
        e = embed_dim
        self.register_parameter("in_proj_weight", empty((3 * e, e), dtype, device) if together else None)
        for name, width in (("q", e), ("k", self.kdim), ("v", self.vdim)):
            weight = None if together else empty((e, width), dtype, device)
            self.register_parameter(f"{name}_proj_weight", weight)
        self.register_parameter("in_proj_bias", empty((3 * e,), dtype, device) if bias else None)
        self.out_proj = Linear(e, e, bias, device, dtype)
        for name in ("bias_k", "bias_v"):
            self.register_parameter(name, empty((1, 1, e), dtype, device) if add_bias_kv else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights by `xavier_uniform_`, biases 0, `bias_k` and `bias_v` by `xavier_normal_`."""
        for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            if self._parameters[name] is not None:
                init.xavier_uniform_(getattr(self, name))
        if self.out_proj.bias is not None:
            init.zeros_(self.out_proj.bias)
        for x in (self.bias_k, self.bias_v):
            if x is not None:
                init.xavier_normal_(x)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Array, Array | None]:
        """Attend.

        Args:
            query, key, value: [L, N, E], [S, N, K], [S, N, V]; with `batch_first` N comes first; without N for one.
            key_padding_mask: [N, S], truth values that hold where a key is *not* seen, or numbers to be added.
            need_weights: give the attention weights as well? Without, the scores need no memory.
            attn_mask: [L, S] or [N * heads, L, S], as `key_padding_mask`.
            average_attn_weights: the weights' mean over the heads, not those of each.
            is_causal: query i sees keys 0 to i. Without `attn_mask` it is made; PyTorch wants it beside.

        Returns:
            The result, shaped as the query, and the weights [N, L, S] ([N, heads, L, S] for each head) or None.
        """
        q, k, v = (array("MultiheadAttention", n, x) for n, x in (("query", query), ("key", key), ("value", value)))
        single = q.ndim == 2
        if {q.ndim, k.ndim, v.ndim} - {2 if single else 3}:
            raise InputError(
                f"MultiheadAttention: expected arrays of 3 axes, or of 2, got {q.shape}, {k.shape} and {v.shape}"
            )
        if single:
            q, k, v = (expand_dims(x, axis=0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (permute_dims(x, (1, 0, 2)) for x in (q, k, v))
        mask = self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        q, k, v = self._projected(q, k, v)
        k, v, mask = self._more(k, v, mask)
        y, weights = self._attended(self._heads(q), self._heads(k), self._heads(v), mask, need_weights)
        y = self.out_proj(reshape(permute_dims(y, (0, 2, 1, 3)), q.shape))
        if weights is not None and average_attn_weights:
            weights = mean(weights, axis=1)
        if single:
            return squeeze(y, 0), None if weights is None else squeeze(weights, 0)
        return (y if self.batch_first else permute_dims(y, (1, 0, 2))), weights

    def _projected(self, q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        e = self.embed_dim
        b = self.in_proj_bias
        biases = [None] * 3 if b is None else [b[j * e : (j + 1) * e] for j in range(3)]
        if self.in_proj_weight is None:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif q is k is v:
            every = F.linear(q, self.in_proj_weight, b)
            return tuple(every[..., j * e : (j + 1) * e] for j in range(3))  # type: ignore[return-value]
        else:
            weights = [self.in_proj_weight[j * e : (j + 1) * e, :] for j in range(3)]
        return tuple(F.linear(x, w, c) for x, w, c in zip((q, k, v), weights, biases))  # type: ignore[return-value]

    def _more(self, k: Array, v: Array, mask: Array | None) -> tuple[Array, Array, Array | None]:
        """Further keys and values, which all queries see."""
        rows = (k.shape[0], 1, self.embed_dim)
        further: list[tuple[Any, Any]] = [(self.bias_k, self.bias_v), (0, 0) if self.add_zero_attn else (None, None)]
        for x, y in further:
            if x is None:
                continue
            added = [filled(rows, 0, k.dtype) if isinstance(a, int) else broadcast_to(a, rows) for a in (x, y)]
            k, v = (concat([a, b], axis=1) for a, b in zip((k, v), added))
            if mask is not None:
                mask = concat([mask, _zeros_beside(mask)], axis=mask.ndim - 1)
        return k, v, mask

    def _heads(self, x: Array) -> Array:
        """[N, L, E] as [N, heads, L, E / heads]."""
        n, length, e = x.shape
        return permute_dims(reshape(x, (n, length, self.num_heads, e // self.num_heads)), (0, 2, 1, 3))

    def _mask(self, q: Array, k: Array, padding: Any, mask: Any, is_causal: bool) -> Array | None:
        """What is added to the scores [N, heads, L, S]."""
        n, rows, columns = q.shape[0], q.shape[1], k.shape[1]
        made = None
        if mask is not None:
            made = hidden_scores("MultiheadAttention", "attn_mask", mask, q.dtype)
            if made.ndim == 3:
                made = reshape(made, (n, self.num_heads, rows, columns))
        elif is_causal:
            made = causal_mask(rows, columns, q.dtype)
        if padding is None:
            return made
        p = hidden_scores("MultiheadAttention", "key_padding_mask", padding, q.dtype)
        p = reshape(p, (n, 1, 1, columns))
        return p if made is None else add(made, p)

    def _attended(
        self, q: Array, k: Array, v: Array, mask: Array | None, need_weights: bool
    ) -> tuple[Array, Array | None]:
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout), None
        scores = matmul(multiply(q, 1 / math.sqrt(q.shape[-1])), matrix_transpose(k))
        weights = F.softmax(scores if mask is None else add(scores, mask), dim=-1)
        weights = F.dropout(weights, dropout, self.training)
        return matmul(weights, v), weights


def _zeros_beside(mask: Array) -> Array:
    """A column of zeros for a mask."""
    return filled((*mask.shape[:-1], 1), 0, mask.dtype)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"relu": F.relu, "gelu": F.gelu}


def _activation(given: Any) -> Callable[[Array], Array]:
    if isinstance(given, str) and given not in ACTIVATIONS:
        raise InputError(f"activation={given!r}: expected {', '.join(ACTIVATIONS)} or a function")
    return ACTIVATIONS[given] if isinstance(given, str) else given


class _Layer(Module):
    """What encoder and decoder layers share: attention, and two linear layers with an activation between them."""

    def _make(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float,
        activation: Any,
        layer_norm_eps: float,
        batch_first: bool,
        norm_first: bool,
        bias: bool,
        device: Any,
        dtype: Any,
        norms: int,
    ) -> None:
        super().__init__()
        kind = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **kind)
        if norms == 3:
            self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **kind)
        self.linear1 = Linear(d_model, dim_feedforward, bias, **kind)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **kind)
        self.norm_first, self.activation = norm_first, _activation(activation)
        for k in range(1, norms + 1):
            self.add_module(f"norm{k}", LayerNorm(d_model, layer_norm_eps, bias=bias, **kind))
        for k in range(1, norms + 1):
            self.add_module(f"dropout{k}", Dropout(dropout))

    def _added(self, x: Array, k: int, block: Callable[[Array], Array]) -> Array:
        """x plus a block of it, normalized before or afterwards."""
        norm, dropout = getattr(self, f"norm{k}"), getattr(self, f"dropout{k}")
        if self.norm_first:
            return add(x, dropout(block(norm(x))))
        return norm(add(x, dropout(block(x))))  # type: ignore[no-any-return]

    def _fed(self, x: Array) -> Array:
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


class TransformerEncoderLayer(_Layer):
    """Self-attention and two linear layers, each with a normalization and a shortcut.

    Args:
        d_model, nhead: width, and number of heads.
        dim_feedforward: width between the linear layers.
        activation: "relu", "gelu" or a function.
        norm_first: normalize before each part, not behind it.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self._make(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype, 2,
        )  # fmt: skip

    def forward(
        self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
    ) -> Array:
        def attend(x: Array) -> Array:
            return self.self_attn(
                x, x, x, src_key_padding_mask, need_weights=False, attn_mask=src_mask, is_causal=is_causal
            )[0]

        x = self._added(array("TransformerEncoderLayer", "src", src), 1, attend)
        return self._added(x, 2, self._fed)


class TransformerDecoderLayer(_Layer):
    """Self-attention, attention to an encoder's result, and two linear layers; arguments as of the encoder's layer."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self._make(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype, 3,
        )  # fmt: skip

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Array:
        def attend(x: Array) -> Array:
            return self.self_attn(
                x, x, x, tgt_key_padding_mask, need_weights=False, attn_mask=tgt_mask, is_causal=tgt_is_causal
            )[0]

        def look(x: Array) -> Array:
            return self.multihead_attn(
                x, memory, memory, memory_key_padding_mask, need_weights=False, attn_mask=memory_mask,
                is_causal=memory_is_causal,
            )[0]  # fmt: skip

        x = self._added(array("TransformerDecoderLayer", "tgt", tgt), 1, attend)
        return self._added(self._added(x, 2, look), 3, self._fed)


class _Stack(Module):
    def __init__(self, layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self.layers = ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.num_layers = num_layers
        self.norm = norm

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Array:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x if self.norm is None else self.norm(x)  # type: ignore[no-any-return]


class TransformerEncoder(_Stack):
    """Copies of an encoder layer one after the other, and perhaps a normalization."""

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(encoder_layer, num_layers, norm)

    def forward(
        self, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None
    ) -> Array:
        return super().forward(src, mask, src_key_padding_mask, bool(is_causal))


class TransformerDecoder(_Stack):
    """Copies of a decoder layer one after the other, and perhaps a normalization; arguments as of the layer."""

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)


class Transformer(Module):
    """Encoder and decoder (Vaswani et al., 2017): `transformer(src, tgt)`. Matrices begin uniform by Xavier's rule."""

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: Any = "relu",
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        layer = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first)
        kind = {"bias": bias, "device": device, "dtype": dtype}
        self.encoder = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(*layer, **kind), num_encoder_layers, LayerNorm(d_model, layer_norm_eps, **kind)
        )
        self.decoder = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(*layer, **kind), num_decoder_layers, LayerNorm(d_model, layer_norm_eps, **kind)
        )
        self.d_model, self.nhead, self.batch_first = d_model, nhead, batch_first
        for p in self.parameters():
            if p.ndim > 1:
                init.xavier_uniform_(p)

    def forward(
        self,
        src: Any,
        tgt: Any,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Array:
        """The decoder's result for `tgt`, which attends to the encoder's result for `src`; masks as of the layers."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        return self.decoder(  # type: ignore[no-any-return]
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, bool(tgt_is_causal),
            memory_is_causal,
        )  # fmt: skip

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: Any = None, dtype: Any = None) -> Array:
        """A causal mask [sz, sz]: 0 on and below the diagonal, -inf above."""
        return asarray(np.triu(np.full((sz, sz), -np.inf, dtype_of(dtype or DTYPE)), 1), device=device)
