"""Dense layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.sharding import PartitionSpec

from ..collectives import Parts, enter, gather_linear, join_parts, leave, linear_scatter, split_features, split_parts
from ..formats import Operands
from ..mesh import ALIGNMENT, BATCH_AXES, TP, Layout, current_view, degree
from ..ops import keep, layer_norm, rms_norm
from ._layer import between_layers, inside_layer
from ._weight import Initializer, WeightOwner, make_vector, make_weight

Parallel = Literal["column", "row"] | None
Norm = Literal["rms", "layer"] | None

default_init = initializers.variance_scaling(1.0, "fan_in", "normal")


class Dense(WeightOwner):
    """`x @ kernel + bias`, the kernel cut over gtp, and over tp if parallel.

    | parallel | kernel `(in, out)` is cut | input features | output features |
    |---|---|---|---|
    | `column` | out over tp, then gtp | whole | cut over tp |
    | `row` | in over tp, out over gtp | cut over tp | whole, summed over tp |
    | `None` | out over gtp | whole | whole |

    Sequence parallel, the whole-feature side of a parallel layer is cut along the sequence over tp. The sequence then
    moves part by part, each while another is multiplied (`collectives.gather_linear`), and has a gradient in reverse
    mode only; where a recipe has operands in formats, at once. An input without a sequence, `(batch, in_features)`, is
    whole on every tp rank.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the output's, or a mapping from names to sizes: several kernels that meet the same input
            and share one gather and one matmul. The call then returns a dict of outputs.
        parallel: see the table.
        bias: whether to add one. It stays whole, or cut over tp alone where the output is.
        sequence_parallel: cut the sequence over tp between parallel layers.
        dtype: compute dtype; input and weight are cast to it.
        param_dtype: dtype of the stored slices.
        reduce_dtype: in which weight gradients are summed over gtp; `dtype` by default.
        alignment: rows of a slice come in multiples of this (16; 32 for MXFP8).
        kernel_init: called with the key and the logical shape.
        rngs: the `params` stream is used.

    Raises:
        ValueError: if tp does not divide the cut dimension, or a size is not positive.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        parallel: Parallel = None,
        bias: bool = False,
        sequence_parallel: bool = True,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        reduce_dtype: Any | None = None,
        alignment: int = ALIGNMENT,
        kernel_init: Initializer = default_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, reduce_dtype=reduce_dtype)
        if parallel not in ("column", "row", None):
            raise ValueError(f"`parallel` is {parallel!r}; it is 'column', 'row' or None.")
        sizes = dict(out_features) if isinstance(out_features, Mapping) else {"": out_features}
        if not sizes or min(in_features, *sizes.values()) < 1:
            raise ValueError(f"Dense({in_features}, {out_features}): feature sizes are whole numbers of at least 1.")
        self.in_features = in_features
        self.names = tuple(sizes)
        self.parallel = parallel
        self.sequence_parallel = sequence_parallel and parallel is not None
        tp_dim = {"column": 1, "row": 0, None: None}[parallel]

        def kernel(size: int) -> nnx.Param:
            layout = Layout.on_mesh((in_features, size), dim=1, tp_dim=tp_dim, alignment=alignment)
            return make_weight(layout, kernel_init, rngs.params(), param_dtype)

        def vector(size: int) -> nnx.Param:
            return make_vector(size, initializers.zeros, rngs.params(), param_dtype, cut=parallel == "column")

        kernels = {name: kernel(size) for name, size in sizes.items()}
        biases = {name: vector(size) for name, size in sizes.items()} if bias else {}
        alone = self.names == ("",)
        self.kernel: Any = kernels[""] if alone else nnx.Dict(kernels)
        self.bias: Any = nnx.data(None) if not bias else biases[""] if alone else nnx.Dict(biases)

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.kernel,) if self.names == ("",) else tuple(self.kernel[name] for name in self.names)

    def takes_codes(self, operands: Operands | None) -> bool:
        return operands is not None and operands.weight.block is None

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        if self.parallel is None:
            return PartitionSpec(BATCH_AXES), PartitionSpec(BATCH_AXES)
        sides = between_layers(self._cuts_sequence(ndim)), inside_layer(ndim)
        return sides if self.parallel == "column" else (sides[1], sides[0])

    def __call__(self, x: jax.Array) -> Any:
        """`(batch, ..., in_features)` to `(batch, ..., out_features)`, or a dict of such."""
        self._check_features(x)
        return super().__call__(x)

    def local(self, x: jax.Array) -> Any:
        if self.parallel == "row":
            return self.from_parts((x,))
        return jax.tree.map(lambda *parts: _whole(parts), *self.to_parts(x))

    def moves_in_parts(self, x: jax.Array) -> bool:
        """Whether the sequence moves over tp part by part, under matmuls, or at once, ahead of and behind them."""
        return self._cuts_sequence(x.ndim) and degree(TP) > 1 and self.operands is None

    def to_parts(self, x: jax.Array) -> tuple[Any, ...]:
        """What a call returns, for each part of the sequence (`collectives.Parts`); one whole if it moves at once."""
        self._check_features(x)
        x = self.prepare(x).astype(self.dtype)
        if self.moves_in_parts(x):
            products = keep(self.with_weight(lambda w, x: gather_linear(x, w), x))
        else:
            if self.parallel == "column":
                x = enter(x, sequence_parallel=self._cuts_sequence(x.ndim))
            products = (self.with_weight(lambda w, x: self.product(x, w), x),)
        return tuple(self._named(split_features(y, self.layouts)) for y in products)

    def from_parts(self, parts: Parts) -> Any:
        """What a call of a row-parallel layer returns, from its input in parts, or from one whole."""
        parts = tuple(x.astype(self.dtype) for x in parts)
        x = parts[0]
        self._check_features(x)
        if self.moves_in_parts(x):
            parts = parts if len(parts) > 1 else split_parts(x)
            y = keep(self.with_weight(lambda w, *parts: linear_scatter(parts, w), *parts))
            return self._named(split_features(y, self.layouts))
        x = _whole(parts)
        outputs = split_features(self.with_weight(lambda w, x: self.product(x, w), x), self.layouts)
        return self._named([leave(y, sequence_parallel=self._cuts_sequence(x.ndim)) for y in outputs])

    def prepare(self, x: jax.Array) -> jax.Array:
        """What is multiplied, from the input."""
        return x

    def _cuts_sequence(self, ndim: int) -> bool:
        return self.sequence_parallel and ndim > 2

    def _check_features(self, x: jax.Array) -> None:
        cut = self.parallel == "row" and current_view() == "local"
        wanted = self.in_features // degree(TP) if cut else self.in_features
        if x.shape[-1] != wanted:
            rank = " on each tp rank" if cut else ""
            raise ValueError(f"{type(self).__name__} takes {wanted} input features{rank}; got shape {x.shape}.")

    def _named(self, outputs: Sequence[jax.Array]) -> Any:
        if self.bias is not None:
            biases = [self.bias] if self.names == ("",) else [self.bias[name] for name in self.names]
            outputs = [y + b.get_value().astype(y.dtype) for y, b in zip(outputs, biases, strict=True)]
        return outputs[0] if self.names == ("",) else dict(zip(self.names, outputs, strict=True))


def _whole(parts: Parts) -> jax.Array:
    return parts[0] if len(parts) == 1 else join_parts(parts)


class LayerNormDense(Dense):
    """A column-parallel `Dense` behind a normalisation of its input.

    The norm works on each rank's own part of the sequence; its scale stays whole.

    Args:
        norm: `rms` (RMSNorm), `layer` (LayerNorm with bias) or `None` for neither.
        eps: of the norm.

    The other arguments are those of `Dense`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        norm: Norm = "rms",
        eps: float = 1e-6,
        parallel: Parallel = "column",
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        if parallel == "row":
            raise ValueError(
                "`parallel` is 'row', whose input is cut over tp: no rank sees all the features that a norm needs. "
                "Take `Dense`, and normalise ahead of the column-parallel layer."
            )
        super().__init__(in_features, out_features, parallel=parallel, param_dtype=param_dtype, rngs=rngs, **options)
        if norm not in ("rms", "layer", None):
            raise ValueError(f"`norm` is {norm!r}; it is 'rms', 'layer' or None.")
        self.norm = norm
        self.eps = eps
        ones, zeros = initializers.ones, initializers.zeros
        self.scale: Any = make_vector(in_features, ones, rngs.params(), param_dtype) if norm else nnx.data(None)
        shift = norm == "layer"
        self.shift: Any = make_vector(in_features, zeros, rngs.params(), param_dtype) if shift else nnx.data(None)

    def prepare(self, x: jax.Array) -> jax.Array:
        if self.norm == "rms":
            return rms_norm(x, self.scale.get_value(), eps=self.eps)
        if self.norm == "layer":
            return layer_norm(x, self.scale.get_value(), self.shift.get_value(), eps=self.eps)
        return x
