"""Provides dense layers whose kernels are sharded over gtp, and in parallel layers also over tp."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers
from jax.sharding import PartitionSpec

from .._numbers import is_size
from ..collectives import (
    Parts,
    gather_linear,
    gather_linear_blocks,
    gather_linear_fp8,
    gather_sequence,
    join_parts,
    join_split,
    linear_scatter,
    linear_scatter_blocks,
    linear_scatter_fp8,
    reduce_scatter_sequence,
    split_parts,
)
from ..layout import Layout, layouts_of_kernels
from ..mesh import current_view, degree, sequence_axis
from ..ops import save_for_backward
from ..weights import GradReduce, split_features
from ._adapter import Adapter
from ._layer import between_layers, inside_layer
from ._norm import Norm, make_norm, normalized
from ._options import LayerNormDenseOptions
from ._weight import Initializer, WeightOwner, make_vector, make_weight

Parallel = Literal["column", "row"] | None

default_init = initializers.variance_scaling(1.0, "fan_in", "normal")


class Dense(WeightOwner):
    """Computes `x @ kernel + bias`. The kernel is sharded over gtp, and in a parallel layer also over tp.

    | parallel | how the kernel `(in, out)` is sharded | input features | output features |
    |---|---|---|---|
    | `column` | out over tp, then gtp | whole | sharded over tp |
    | `row` | in over tp, out over gtp | sharded over tp | whole, summed over tp |
    | `None` | out over gtp | whole | whole |

    If gtp does not divide `out`, or if only shards along `in` consist of whole blocks of the quantized formats, gtp
    shards `in` instead; see `gtp_jax.layout.layouts_of_kernels`. If tp does not divide the `units` of the features
    evenly, tp ranks own different numbers of units, and the kernel is gathered over tp too (see
    `gtp_jax.layout.Layout`). Other mesh axes can take the roles of gtp and tp; see `gtp_jax.mesh.Roles`.

    With sequence parallelism, the input of a column-parallel layer and the output of a row-parallel layer are sharded
    over tp along the sequence. The parts of the sequence are sent between ranks one at a time, each while another part
    is multiplied (`collectives.gather_linear`). Only reverse-mode differentiation is then supported. If a recipe
    multiplies in FP8, parts that are gathered are sent as codes. If it multiplies in a format with blocks, or with
    delayed scaling, the whole sequence is sent at once: as codes in blocks of 128 and in MXFP8, if a part consists of
    whole blocks of tokens (`moves_as_codes`), otherwise as values. An input of two dimensions, `(batch, in_features)`,
    has no sequence to shard.

    Args:
        in_features: the size of the last dimension of the input.
        out_features: the size of the last dimension of the output; or a mapping from names to sizes, for several
            kernels that have the same input and share one gather and one matmul. The call then returns a dict of
            outputs.
        parallel: how tp divides the layer; see the table.
        use_bias: whether to add a bias. The bias is whole on every rank, with one exception: in a column-parallel
            layer, it is sharded over tp if tp divides the `units` of all kernels evenly.
        units: the number of consecutive features that stay together on a tp rank, such as the features of a head: one
            number, or one for each name of `out_features`. These are output features of a column-parallel layer, and
            otherwise input features.
        padding_value: the value of the padding after a rank's last feature if tp divides the output unevenly. The
            default, -inf, does not affect softmax, maxima or `cross_entropy`. Row-parallel layers ignore the padding of
            their input, whatever its values.
        sequence_parallel: whether to shard activations between parallel layers over tp, along the sequence.
        dtype: the compute dtype, to which input and weight are cast.
        param_dtype: the dtype in which kernels and biases are stored.
        grad_reduce: how weight gradients are summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`.
        kernel_init: the initializer, called with the key, the logical shape and `param_dtype`.
        rngs: the random streams; only the stream `params` is used.

    Attributes:
        lora: the `Adapter` that `gtp_jax.nn.lora` added, or a dict of adapters by the names of kernels; `None` without
            adapters.

    Raises:
        ValueError: if a size is not a positive integer, or `out_features` is an empty mapping; if `units` does not
            divide the features, or its names are not those of `out_features`; or if `parallel` or `grad_reduce` is not
            one of its names.
    """

    context_parallel = True

    codes_multiply = True
    fewest_dims = 2

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        parallel: Parallel = None,
        use_bias: bool = False,
        units: int | Mapping[str, int] = 1,
        padding_value: float = -math.inf,
        sequence_parallel: bool = True,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        grad_reduce: GradReduce = "float32",
        kernel_init: Initializer = default_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, grad_reduce=grad_reduce)
        if parallel not in ("column", "row", None):
            raise ValueError(f"`parallel` is {parallel!r}; it must be 'column', 'row' or None.")
        sizes = dict(out_features) if isinstance(out_features, Mapping) else {"": out_features}
        if not sizes or not all(map(is_size, (in_features, *sizes.values()))):
            raise ValueError(
                f"Dense({in_features}, {out_features}): feature sizes must be whole numbers of at least 1, and a "
                "mapping must have at least one name."
            )
        in_features, sizes = int(in_features), {name: int(size) for name, size in sizes.items()}
        self.in_features = in_features
        self.names = tuple(sizes)
        self.parallel = parallel
        self.padding_value = padding_value
        self.sequence_parallel = sequence_parallel and parallel is not None
        layouts = layouts_of_kernels(
            [(in_features, size) for size in sizes.values()],
            rows=1,
            split_dim={"column": 1, "row": 0, None: None}[parallel],
            units=_checked_units(units, sizes if parallel == "column" else dict.fromkeys(sizes, in_features)),
        )

        def kernel(layout: Layout) -> nnx.Param:
            return make_weight(layout, kernel_init, rngs.params(), param_dtype)

        def vector(layout: Layout) -> nnx.Param:
            behind = layout if parallel == "column" else None
            return make_vector(layout.shape[1], initializers.zeros, rngs.params(), param_dtype, behind=behind)

        kernels = {name: kernel(layout) for name, layout in zip(sizes, layouts, strict=True)}
        biases = {name: vector(layout) for name, layout in zip(sizes, layouts, strict=True)} if use_bias else {}
        alone = self.names == ("",)
        self.kernel: Any = kernels[""] if alone else nnx.Dict(kernels)
        self.bias: Any = nnx.data(None) if not use_bias else biases[""] if alone else nnx.Dict(biases)
        self.lora: Any = nnx.data(None)

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.kernel,) if self.names == ("",) else tuple(self.kernel[name] for name in self.names)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        if self.parallel is None:
            tokens = between_layers(self.roles, ndim, False)
            return tokens, tokens
        inside = inside_layer(self.roles, ndim, even=not self.layouts[0].takes_part)
        sides = between_layers(self.roles, ndim, self.shards_sequence(ndim)), inside
        return sides if self.parallel == "column" else (sides[1], sides[0])

    @property
    def converts(self) -> tuple[bool, bool]:
        uneven = self.layouts[0].takes_part
        return uneven and self.parallel == "row", uneven and self.parallel == "column"

    def from_global(self, x: Any) -> Any:
        split = self.layouts[0].split
        return split.take(x, -1) if self.converts[0] and split is not None else x

    def to_global(self, y: Any) -> Any:
        if not self.converts[1]:
            return y
        parts = zip(self.layouts, self._parts_of(y), strict=True)
        return self._by_name([part if one.split is None else join_split(part, one.split, -1) for one, part in parts])

    def __call__(self, x: jax.Array) -> Any:
        """Maps `(batch, ..., in_features)` to `(batch, ..., out_features)`, or to a dict of such arrays if
        `out_features` is a mapping. Inside a `shard_map`, both are this rank's parts.

        Raises:
            ValueError: if the last dimension of the input does not have the expected size; if the model was built for
                other mesh degrees; or if the mesh cannot divide the input.
        """
        self._check_features(x)
        return super().__call__(x)

    def local(self, x: jax.Array) -> Any:
        if self.parallel == "row":
            return self.from_parts((x,))
        return jax.tree.map(lambda *parts: self._whole(parts), *self.to_parts(x))

    def moves_in_parts(self, x: jax.Array) -> bool:
        """Returns whether the parts of the sequence are sent over tp one at a time, overlapped with matmuls. If
        not, a parallel layer sends everything at once, before or after the matmul."""
        operands = self.operands
        as_values_or_codes = operands is None or (operands.weight.block is None and operands.delayed is None)
        return self.shards_sequence(x.ndim) and degree(self.roles.tensor) > 1 and as_values_or_codes

    def moves_as_codes(self, x: jax.Array, parts: int | None = None) -> bool:
        """Returns whether a sequence that is sent over tp at once is gathered as codes with blocks.

        Args:
            x: one of the equal `parts` of the sequence, `(batch, sequence / parts, ..., features)`.
            parts: their number; the degree of tp by default.
        """
        operands, ranks = self.operands, degree(self.roles.tensor)
        if operands is None or ranks == 1 or not self.shards_sequence(x.ndim) or self.moves_in_parts(x):
            return False
        return operands.blocks_divide(math.prod(x.shape[1:-1]) * (parts or ranks) // ranks)

    def to_parts(self, x: jax.Array) -> tuple[Any, ...]:
        """Returns the output of a layer that is not row-parallel, as one output for each part of the sequence
        (`collectives.Parts`). If `moves_in_parts` is false, there is a single part."""
        x, axis, whole = self.left_operand(x), self.roles.tensor, self.shards_sequence(x.ndim)
        low = self._low(x)
        if self.parallel == "column":  # gathered at once: it is small, because its last dimension is the adapters' rank
            low = [gather_sequence(own, axis, sequence_parallel=whole) for own in low]
        if axis is not None and self.moves_in_parts(x):
            products = save_for_backward(self.with_weight(lambda w, x: self._gather_linear(x, w, axis), x))
            lows = zip(*(split_parts(own, axis) for own in low), strict=True) if low else [()] * len(products)
        elif axis is not None and self.parallel == "column" and self.moves_as_codes(x):
            y = self.with_weight(lambda w, x: self._in_codes(gather_linear_blocks, x, w, axis), x)
            products, lows = (save_for_backward(y),), [low]
        else:
            if self.parallel == "column":
                x = gather_sequence(x, axis, sequence_parallel=whole)
            products, lows = (self.with_weight(lambda w, x: self.product(x, w), x),), [low]
        return tuple(self._named(self._outputs(y, low)) for y, low in zip(products, lows, strict=True))

    def from_parts(self, parts: Parts) -> Any:
        """Returns the output of a row-parallel layer, given its input as the parts of the sequence, or as a single part
        that is the whole sequence."""
        self._check_features(parts[0])
        split, axis = self.layouts[0].split, self.roles.tensor
        assert split is not None
        parts = tuple(split.mask(x.astype(self.dtype), -1) for x in parts)
        x = parts[0]
        if axis is not None and self.moves_in_parts(x):
            parts = parts if len(parts) > 1 else split_parts(x, axis)
            y = save_for_backward(self.with_weight(lambda w, *parts: self._linear_scatter(parts, w, axis), *parts))
            of_parts = [self._low(part, number) for number, part in enumerate(parts)]
            # summed at once, before the product with `b`: it is small, because its last dimension is the adapters' rank
            low = [
                reduce_scatter_sequence(join_parts(own, axis), axis, sequence_parallel=True)
                for own in zip(*of_parts, strict=True)
            ]
            return self._named(self._outputs(y, low))
        x = self._whole(parts)
        if axis is not None and self.moves_as_codes(x, parts=1):
            y = self.with_weight(lambda w, x: self._in_codes(linear_scatter_blocks, x, w, axis), x)
            low = [reduce_scatter_sequence(own, axis, sequence_parallel=True) for own in self._low(x)]
            return self._named(self._outputs(save_for_backward(y), low))
        outputs = self._outputs(self.with_weight(lambda w, x: self.product(x, w), x), self._low(x))
        whole = self.shards_sequence(x.ndim)
        return self._named([reduce_scatter_sequence(y, axis, sequence_parallel=whole) for y in outputs])

    def _gather_linear(self, x: jax.Array, weight: Any, axis: str) -> Parts:
        if self.operands is None:
            return gather_linear(x, weight, axis)
        return self._in_codes(gather_linear_fp8, x, weight, axis)

    def _linear_scatter(self, parts: Parts, weight: Any, axis: str) -> jax.Array:
        if self.operands is None:
            return linear_scatter(parts, weight, axis)
        return self._in_codes(linear_scatter_fp8, parts, weight, axis)

    def _in_codes(self, operation: Callable[..., Any], x: jax.Array | Parts, weight: Any, axis: str) -> Any:
        """Returns `operation(x, weight, products, axis)` in the formats of the recipe."""
        return self.in_products(weight, lambda weight, products: operation(x, weight, products, axis))

    @property
    def plain_fp8(self) -> bool:
        """Whether the layer is only a matmul in FP8 with current scaling per tensor, without a bias, adapters or tensor
        parallelism."""
        operands, alone = self.operands, degree(self.roles.tensor) == 1 and self.bias is None and self.lora is None
        return alone and operands is not None and operands.weight.block is None and operands.delayed is None

    def left_operand(self, x: jax.Array) -> jax.Array:
        """Returns the left operand of the matmul, computed from the input, in the compute dtype."""
        self._check_features(x)
        return self.prepare(x).astype(self.dtype)

    def prepare(self, x: jax.Array) -> jax.Array:
        """Returns the left operand of the matmul before it is cast."""
        return x

    def _low(self, x: jax.Array, part: int = 0) -> list[jax.Array]:
        """Returns a list of one array, the concatenation of the results of `Adapter.low` of all adapters along the last
        dimension. Returns an empty list if the layer has no adapters."""
        if self.lora is None:
            return []
        # without a sequence, ranks of its axis compute the same, and need the same mask for dropout
        ranks = self.roles.batch if sequence_axis(self.roles, x.ndim) is None else self.roles.tokens
        if self.roles.tensor is not None and (self.parallel == "row" or self.shards_sequence(x.ndim)):
            ranks = (*ranks, self.roles.tensor)
        pairs = zip(self._adapters(), self.layouts, strict=True)
        return [jnp.concatenate([one.low(x, layout, ranks, part) for one, layout in pairs if one is not None], axis=-1)]

    def _outputs(self, y: jax.Array, low: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns each kernel's output, given the product with the fused weight and the result of `_low`."""
        outputs = split_features(y, self.layouts)
        if not low:
            return outputs
        adapters = self._adapters()
        widths = np.cumsum([0 if one is None else one.rank for one in adapters])
        lows = jnp.split(low[0], widths[:-1], axis=-1)
        return [
            y if one is None else y + one.output(own, layout).astype(y.dtype)
            for y, one, own, layout in zip(outputs, adapters, lows, self.layouts, strict=True)
        ]

    def _adapters(self) -> list[Adapter | None]:
        return [self.lora] if self.names == ("",) else [self.lora.get(name) for name in self.names]

    def _check_features(self, x: jax.Array) -> None:
        if current_view() != "global":
            self.check_mesh()
        of_rank = self.parallel == "row" and current_view() == "local"
        split = self.layouts[0].split
        expected = split.width if of_rank and split is not None else self.in_features
        if x.shape[-1] != expected:
            rank = " on each tp rank" if of_rank else ""
            raise ValueError(f"{type(self).__name__} takes {expected} input features{rank}; got shape {x.shape}.")

    def _named(self, outputs: Sequence[jax.Array]) -> Any:
        """Adds the biases, fills the padding of column-parallel outputs with `padding_value`, and returns the output,
        or a dict of outputs by name."""
        column = self.parallel == "column"
        if self.bias is not None:
            biases = [b.get_value() for b in self._parts_of(self.bias)]
            if column:
                biases = [
                    layout.split.take(b, 0) if layout.takes_part and layout.split is not None else b
                    for b, layout in zip(biases, self.layouts, strict=True)
                ]
            outputs = [y + b.astype(y.dtype) for y, b in zip(outputs, biases, strict=True)]
        if column:
            outputs = [
                y if layout.split is None else layout.split.mask(y, -1, self.padding_value)
                for y, layout in zip(outputs, self.layouts, strict=True)
            ]
        return self._by_name(outputs)

    def _parts_of(self, named: Any) -> list[Any]:
        return [named] if self.names == ("",) else [named[name] for name in self.names]

    def _by_name(self, outputs: Sequence[jax.Array]) -> Any:
        return outputs[0] if self.names == ("",) else dict(zip(self.names, outputs, strict=True))

    def _whole(self, parts: Parts) -> jax.Array:
        if len(parts) == 1:
            return parts[0]
        assert self.roles.tensor is not None
        return join_parts(parts, self.roles.tensor)


def _checked_units(units: int | Mapping[str, int], sizes: Mapping[str, int]) -> list[int]:
    """Returns the unit of each kernel, in the order of `sizes`.

    Raises:
        ValueError: if the unit of a kernel is missing, or is not a whole number that divides its features; or if
            `units` has a name that no kernel has.
    """
    by_name = dict(units) if isinstance(units, Mapping) else dict.fromkeys(sizes, units)
    unknown = [name for name in by_name if name not in sizes]
    if unknown:
        raise ValueError(f"`units` has {unknown}, but there are no kernels of these names; there are {list(sizes)}.")
    for name, size in sizes.items():
        unit = by_name.get(name)
        if not is_size(unit) or size % unit:
            of_name = f"the {size} features of {name!r}" if name else f"{size}"
            raise ValueError(
                f"`units` is {units!r}; it must be a whole number of features that divides {of_name}, or a dict with "
                "one number per name."
            )
    return [int(by_name[name]) for name in sizes]


class LayerNormDense(Dense):
    """A `Dense` layer, column-parallel by default, that first normalizes its input.

    Each rank normalizes its own part of the sequence, or the whole sequence if it is not sharded. The parameters of the
    norm are whole on every rank.

    Args:
        norm: `"rms"` (RMSNorm), `"zero_centered_rms"` (RMSNorm that multiplies by 1 + scale, as in Gemma), `"layer"`
            (LayerNorm with bias), or `None` for no norm.
        epsilon: the epsilon of the norm.

    The other arguments are as in `Dense`, but `parallel` is `"column"` by default, and may not be `"row"`.

    Raises:
        ValueError: if `parallel` is `"row"`, `norm` is none of these, or `Dense` refuses an argument.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        parallel: Parallel = "column",
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Unpack[LayerNormDenseOptions],
    ) -> None:
        if parallel == "row":
            raise ValueError(
                "`parallel` is 'row', so the input is sharded over tp and no rank has all the features that a norm "
                "needs. Use `Dense`, which has no norm, or pass `parallel=None`."
            )
        super().__init__(in_features, out_features, parallel=parallel, param_dtype=param_dtype, rngs=rngs, **options)
        self.scale, self.shift = make_norm(norm, in_features, rngs, param_dtype)
        self.norm: Norm = norm
        self.epsilon = epsilon

    def prepare(self, x: jax.Array) -> jax.Array:
        return normalized(self.norm, x, self.scale, self.shift, self.epsilon)
