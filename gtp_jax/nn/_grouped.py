"""Dense layers of several experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers

from ..collectives import split_features
from ..mesh import ALIGNMENT, GTP, TP, Layout, current_view, degree
from ..ops import grouped_matmul, grouped_quantized
from ._weight import Initializer, WeightOwner, make_weight

GroupedParallel = Literal["column", "row", "expert"] | None

# Of each expert by itself: the first dimension counts experts.
default_init = initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)

_TP_DIM = {"column": 2, "row": 1, "expert": 0, None: None}


class GroupedDense(WeightOwner):
    """`x[row] @ kernel[expert of row]`, for rows that are sorted by expert.

    All experts' slices travel in one gather, and their gradients in one reduce-scatter. With a recipe every expert's
    kernel is a tensor of its own, with its own amax; inputs and gradients have one for all rows, see
    `gtp_jax.ops.grouped_quantized`.

    | parallel | kernel `(experts, in, out)` is cut | input | output |
    |---|---|---|---|
    | `column` | out over tp, then `axes` | features whole | features cut over tp |
    | `row` | in over tp, out over `axes` | features cut over tp | features whole, summed over tp |
    | `expert` | experts over tp, out over `axes` | whole | whole, summed over tp |
    | `None` | out over `axes` | whole | whole |

    A call needs a rank's own rows, so it takes place inside a `shard_map` (as in a `MoE`, or in the loss of a
    `train_step`) or without a mesh.

    Args:
        experts: how many.
        in_features: size of the last dimension of the input.
        out_features: size of the output's, or a mapping from names to sizes, as in `Dense`.
        parallel: see the table.
        summed: whether a `row` or `expert` parallel output is summed over tp here; if not, whoever takes the partial
            sums does it later: of other ranks' experts they are zeros.
        axes: mesh axes along which the slices lie. Their product may be another than that of dense layers:
            `("dp", "gtp")` leaves no replicas, `("tp", "gtp")` cuts further what is not parallel.
        dtype: compute dtype; input and weight are cast to it.
        param_dtype: dtype of the stored slices.
        reduce_dtype: in which weight gradients are summed over `axes`; `dtype` by default.
        alignment: as in `Dense`.
        kernel_init: called with the key and the logical shape.
        rngs: the `params` stream is used.

    Raises:
        ValueError: if tp does not divide what it cuts, or a size is not positive.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        parallel: GroupedParallel = None,
        summed: bool = True,
        axes: tuple[str, ...] = (GTP,),
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        reduce_dtype: Any | None = None,
        alignment: int = ALIGNMENT,
        kernel_init: Initializer = default_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, reduce_dtype=reduce_dtype)
        if parallel not in _TP_DIM:
            raise ValueError(f"`parallel` is {parallel!r}; it is 'column', 'row', 'expert' or None.")
        sizes = dict(out_features) if isinstance(out_features, Mapping) else {"": out_features}
        if not sizes or min(experts, in_features, *sizes.values()) < 1:
            raise ValueError(
                f"GroupedDense({experts}, {in_features}, {out_features}): experts and feature sizes are whole numbers "
                "of at least 1."
            )
        tp = degree(TP)
        if parallel == "expert" and experts % tp:
            raise ValueError(
                f"`parallel` is 'expert', but tp {tp} does not divide the {experts} experts. Choose a tp degree that "
                "does, or cut every expert: 'column' and 'row'."
            )
        self.experts = experts
        self.in_features = in_features
        self.names = tuple(sizes)
        self.parallel = parallel
        self.summed = summed
        self.sequence_parallel = False

        def kernel(size: int) -> nnx.Param:
            shape = (experts, in_features, size)
            layout = Layout.on_mesh(shape, dim=2, tp_dim=_TP_DIM[parallel], alignment=alignment, axes=tuple(axes))
            return make_weight(layout, kernel_init, rngs.params(), param_dtype)

        kernels = {name: kernel(size) for name, size in sizes.items()}
        self.kernel: Any = kernels[""] if self.names == ("",) else nnx.Dict(kernels)

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.kernel,) if self.names == ("",) else tuple(self.kernel[name] for name in self.names)

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> Any:
        """`(rows, in_features)`, sorted by expert, to `(rows, out_features)`, or a dict of such.

        Args:
            x: this rank's rows.
            group_sizes: integers `(experts,)`: rows of each expert, in order; zeros are fine. Rows behind the last
                expert's come out as zeros.

        Raises:
            ValueError: in global view, or if shapes do not agree.
            TypeError: if `group_sizes` are not integers.
        """
        if current_view() == "global":
            raise ValueError(
                "GroupedDense runs inside a shard_map or without a mesh, on a rank's own rows; call it through a `MoE`."
            )
        wanted = self.in_features // degree(TP) if self.parallel == "row" else self.in_features
        if x.ndim != 2 or x.shape[1] != wanted:
            raise ValueError(f"GroupedDense takes (rows, {wanted}), sorted by expert; got shape {x.shape}.")
        if group_sizes.shape != (self.experts,):
            raise ValueError(
                f"`group_sizes` has shape {group_sizes.shape}; it is ({self.experts},), the rows of each expert."
            )
        if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
            raise TypeError(f"`group_sizes` are numbers of rows, integers; got {group_sizes.dtype}.")
        return self.local((x, group_sizes))

    def local(self, x: tuple[jax.Array, jax.Array]) -> Any:
        rows, sizes = x[0].astype(self.dtype), x[1].astype(jnp.int32)
        divided = self.parallel == "expert" and degree(TP) > 1
        before = jnp.int32(0)
        if divided:  # this rank's experts come first
            mine = self.experts // degree(TP)
            first = lax.axis_index(TP) * mine
            before = (jnp.cumsum(sizes) - sizes)[first]
            sizes, rows = lax.dynamic_slice_in_dim(sizes, first, mine), jnp.roll(rows, -before, axis=0)
        outputs = split_features(self.with_weight(self._product, rows, sizes), self.layouts)
        if divided:
            outputs = tuple(jnp.roll(y, before, axis=0) for y in outputs)
        if self.summed and self.parallel in ("row", "expert") and degree(TP) > 1:
            outputs = tuple(lax.psum(outputs, TP))
        return outputs[0] if self.names == ("",) else dict(zip(self.names, outputs, strict=True))

    def _product(self, weight: jax.Array, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        if self.operands is None:
            return grouped_matmul(rows, weight, sizes)
        return self.in_blocks(
            weight,
            lambda weight, key, operands: grouped_quantized(rows, weight, sizes, key, operands),
        )
