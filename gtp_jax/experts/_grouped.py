"""Applies dense layers of several experts to rows sorted by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers

from ..formats import Tiled
from ..layout import Layout, Split, layouts_of_kernels
from ..mesh import current_view, degree
from ..nn import Initializer, WeightOwner, make_weight
from ..ops import (
    SlottedRows,
    SlottedWeight,
    Window,
    expand,
    grouped_fp8,
    grouped_matmul,
    grouped_quantized,
    rows_in_codes,
    sum_of_places,
)
from ..weights import GradReduce, split_features

GroupedParallel = Literal["column", "row", "expert"] | None

# applied to each expert separately: the first dimension counts experts
default_init = initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-1, out_axis=-2, batch_axis=0)

_SPLIT_DIM = {"column": 1, "row": 2, "expert": 0, None: None}


class GroupedDense(WeightOwner):
    """Computes `x[row] @ kernel[expert of row].T` for rows that are sorted by expert.

    A kernel is `(experts, out, in)`, unlike that of `Dense`, because matmuls read it and produce its gradient in this
    layout. Transposing all experts of a layer would take longer than some of its matmuls.

    The shards of all experts travel in one gather, and their gradients in one reduce-scatter. With a recipe, every
    expert's kernel is quantized as a separate tensor; with `FP8(matmuls=True)`, the kernels of one expert under several
    names share a scale. Inputs and gradients have one scale for all rows, or one for each block; see
    `gtp_jax.ops.grouped_fp8` and `grouped_quantized`.

    | parallel | kernel `(experts, out, in)` is sharded | input | output |
    |---|---|---|---|
    | `column` | out over tp, then `axes` | features whole | features sharded over tp |
    | `row` | in over tp, out over `axes` | features sharded over tp | features whole, summed over tp |
    | `expert` | experts over tp, out over `axes` | whole | whole, summed over tp |
    | `None` | out over `axes` | whole | whole |

    As in `Dense`, `axes` shard `in` if they do not divide `out`, and tp may divide features or experts unevenly.

    A call needs a rank's own rows, so it must run inside a `shard_map` (as in a `MoE`, or in the loss of a
    `train_step` in `view="local"`) or without a mesh.

    Args:
        num_experts: the number of experts.
        in_features: the size of the input's last dimension.
        out_features: the size of the output's last dimension, or a mapping from names to sizes, as in `Dense`.
        parallel: what tp shards; see the table.
        summed: whether a `row` or `expert` parallel output is summed over tp here. Otherwise the caller must sum the
            ranks' partial sums; with `expert`, these are zeros for rows of other ranks' experts.
        axes: the mesh axes over which kernels are gathered; by default those of dense layers. Other axes may give more
            shards: `("dp", "gtp")` leaves no replicas, and `("tp", "gtp")` further shards kernels that are not
            parallel.
        experts_axis: a mesh axis whose ranks divide the experts equally. Each rank is given only the rows of its own
            experts, and `group_sizes` counts only those. `axes` then defaults to `Roles.over_experts`, and tp divides
            what a rank has.
        dtype: the compute dtype, to which input and weight are cast.
        param_dtype: the dtype of the stored shards.
        grad_reduce: how weight gradients are summed over `axes`: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`.
        kernel_init: the initializer, called with the key, the logical shape `(experts, out, in)` and the dtype.
        rngs: the random streams, of which `params` is used.

    Raises:
        ValueError: if a size is not positive, `parallel` is unknown, or the ranks of `experts_axis` do not divide the
            experts.
    """

    context_parallel = True

    codes_multiply = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        parallel: GroupedParallel = None,
        summed: bool = True,
        axes: tuple[str, ...] | None = None,
        experts_axis: str | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        grad_reduce: GradReduce = "float32",
        kernel_init: Initializer = default_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, grad_reduce=grad_reduce)
        if parallel not in _SPLIT_DIM:
            raise ValueError(f"`parallel` is {parallel!r}; it must be 'column', 'row', 'expert' or None.")
        sizes = dict(out_features) if isinstance(out_features, Mapping) else {"": out_features}
        if not sizes or min(num_experts, in_features, *sizes.values()) < 1:
            raise ValueError(
                f"GroupedDense({num_experts}, {in_features}, {out_features}): experts and feature sizes are whole "
                "numbers of at least 1."
            )
        self.num_experts = num_experts
        self.own_experts = num_experts // degree(experts_axis)
        self.in_features = in_features
        self.names = tuple(sizes)
        self.parallel = parallel
        self.summed = summed
        self.sequence_parallel = False

        layouts = layouts_of_kernels(
            [(num_experts, size, in_features) for size in sizes.values()],
            rows=1,
            split_dim=_SPLIT_DIM[parallel],
            axes=axes if axes is None else tuple(axes),
            experts_axis=experts_axis,
        )

        def kernel(layout: Layout) -> nnx.Param:
            return make_weight(layout, kernel_init, rngs.params(), param_dtype)

        kernels = {name: kernel(layout) for name, layout in zip(sizes, layouts, strict=True)}
        self.kernel: Any = kernels[""] if self.names == ("",) else nnx.Dict(kernels)

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.kernel,) if self.names == ("",) else tuple(self.kernel[name] for name in self.names)

    def __call__(self, x: jax.Array, group_sizes: jax.Array) -> Any:
        """Maps `(rows, in_features)`, sorted by expert, to `(rows, out_features)`, or to a dict of such arrays.

        Args:
            x: this rank's rows.
            group_sizes: integers `(experts,)`: the number of rows of each expert, in order; zeros are allowed. The
                output is zero for rows after those of the last expert.

        Raises:
            ValueError: in global view, or if a shape is wrong.
            TypeError: if `group_sizes` are not integers.
        """
        if current_view() == "global":
            raise ValueError(
                "GroupedDense takes a rank's own rows, which code in global view does not have. Call it through a "
                "`MoE`, in a `shard_map`, or in the loss of a `train_step` in `view='local'`."
            )
        expected = self.layouts[0].use_shape[self.layouts[0].cols]
        if x.ndim != 2 or x.shape[1] != expected:
            raise ValueError(f"GroupedDense takes (rows, {expected}), sorted by expert; got shape {x.shape}.")
        if group_sizes.shape != (self.own_experts,):
            raise ValueError(
                f"`group_sizes` has shape {group_sizes.shape}; it must be ({self.own_experts},), the rows of each "
                "expert."
            )
        if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
            raise TypeError(f"`group_sizes` has dtype {group_sizes.dtype}; it must hold integers, the rows per expert.")
        return self.local((x, group_sizes))

    def local(self, x: tuple[jax.Array, jax.Array]) -> Any:
        self.check_mesh()
        rows, sizes = x[0].astype(self.dtype), x[1].astype(jnp.int32)
        return self.with_weight(self.product_of, rows, sizes)

    def in_codes(self, rows: jax.Array, axis: str) -> jax.Array | SlottedRows:
        """Returns rows in the form in which they travel over a mesh axis to `product_of`: as codes from which it makes
        its operands, or unchanged if the recipe does not allow rounding a row once, before it travels."""
        if self.operands is None or not self.operands.rounds_input_once:
            return rows
        return rows_in_codes(rows, self.operands.activation, axis)

    def product_of(
        self,
        weight: jax.Array | SlottedWeight,
        rows: jax.Array | SlottedRows,
        sizes: jax.Array,
        key: jax.Array | None = None,
        taken: Window | None = None,
        summed: Window | None = None,
    ) -> Any:
        """Returns what a call returns, given the gathered weight.

        Args:
            weight: the weight, in the form that `with_weight` passes.
            rows: the rows in the compute dtype, sorted by expert unless `taken` is given; or the result of `in_codes`.
            sizes: the number of rows of each expert, int32.
            key: the key of stochastic rounding; by default that of a new call.
            taken: the places, sorted by expert, at which rows are multiplied; by default each row is its own place.
            summed: the places that are summed into each row of the result; by default each place is its own row.
        """
        split, tensor = self.layouts[0].split, self.roles.tensor
        divided = self.parallel == "expert" and degree(tensor) > 1
        if self.parallel == "row" and split is not None:
            assert isinstance(rows, jax.Array)
            rows = split.mask(rows, -1)
        before = jnp.int32(0)
        if divided and split is not None:  # rolls the rows so that those of this rank's experts come first
            before = (jnp.cumsum(sizes) - sizes)[split.start()]  # irrelevant on a rank without experts
            sizes = split.take(sizes, 0)
            summed = None if summed is None else summed.rolled(before)
            if taken is not None:
                taken = taken.rolled(before)
            else:
                assert isinstance(rows, jax.Array)
                rows = jnp.roll(rows, -before, axis=0)
        outputs = split_features(self._multiplied(weight, rows, sizes, key, taken, summed), self.layouts)
        if divided and summed is None:
            outputs = tuple(jnp.roll(y, before, axis=0) for y in outputs)
        if self.parallel == "column":
            outputs = tuple(_masked(y, layout.split) for y, layout in zip(outputs, self.layouts, strict=True))
        if self.summed and self.parallel in ("row", "expert") and tensor is not None and degree(tensor) > 1:
            outputs = tuple(lax.psum(outputs, tensor))
        return outputs[0] if self.names == ("",) else dict(zip(self.names, outputs, strict=True))

    def _multiplied(
        self,
        weight: jax.Array | SlottedWeight,
        rows: jax.Array | SlottedRows,
        sizes: jax.Array,
        key: jax.Array | None,
        taken: Window | None,
        summed: Window | None,
    ) -> jax.Array:
        if self.operands is None:
            assert isinstance(rows, jax.Array)
            y = grouped_matmul(rows if taken is None else expand(rows, taken), weight, sizes)
        elif self.operands.weight.block is None:
            return grouped_fp8(rows, weight, sizes, self.operands.gradient, taken=taken, summed=summed)
        elif isinstance(self.group.wire, Tiled):
            key = self.call_key() if key is None else key
            y = grouped_quantized(rows, weight, sizes, key, self.operands, taken=taken, order=self.group.order)
        else:
            y = self.in_blocks(
                weight,
                lambda weight, key, operands: grouped_quantized(rows, weight, sizes, key, operands, taken=taken),
                key,
            )
        return y if summed is None else sum_of_places(y, summed)


def _masked(y: jax.Array, split: Split | None) -> jax.Array:
    return y if split is None else split.mask(y, -1)
