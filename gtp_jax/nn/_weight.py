"""Weights that are gathered, and the modules that own them."""

from __future__ import annotations

import abc
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from ..collectives import (
    Packed,
    Shards,
    exchange_gradients,
    gather_codes,
    gather_packed,
    gather_weight,
    gathered,
    in_order,
    scatter_gradient,
    use_rows,
)
from ..formats import Format, Operands, QuantizedArray
from ..layout import Layout
from ..mesh import current_view, multiplies_blocks
from ..ops import SlottedWeight, linear, linear_blocks, linear_fp8
from ._grad_reduce import reduction_of
from ._layer import Layer
from ._rounding import CallKeys

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


def make_weight(layout: Layout, init: Initializer, key: jax.Array, dtype: Any) -> nnx.Param:
    """Makes a weight, of the values that `init` gives to the logical array, whatever the mesh."""
    return nnx.Param(init(key, layout.shape, dtype), layout=layout, **_partition(layout.spec))


def make_vector(size: int, init: Initializer, key: jax.Array, dtype: Any, *, behind: Layout | None = None) -> nnx.Param:
    """Makes a bias or a norm's scale: whole on every rank.

    As the bias of a column-parallel kernel's output (`behind` is the kernel's layout) it is sharded over the tensor
    axis alone, where that divides the features evenly.
    """
    split = None if behind is None or behind.takes_part else behind.split
    axis = None if split is None else split.axis
    return nnx.Param(init(key, (size,), dtype), **_partition(PartitionSpec(axis)))


def make_whole(shape: tuple[int, ...], init: Initializer, key: jax.Array, dtype: Any) -> nnx.Param:
    """Makes a matrix that is whole on every rank: a router."""
    return nnx.Param(init(key, shape, dtype), **_partition(PartitionSpec(*(None,) * len(shape))))


def weight_owners(module: nnx.Module) -> dict[tuple[Any, ...], WeightOwner]:
    """The modules within one, itself included, that own weights, by path."""
    return {path: m for path, m in nnx.iter_modules(module) if isinstance(m, WeightOwner)}


def scatter(owners: Mapping[Any, WeightOwner], gradients: Mapping[Any, jax.Array]) -> dict[Any, Shards]:
    """Fused weights' gradients to those of their slices; what a recipe exchanges alike travels together."""
    found: dict[Any, Shards] = {}
    together: dict[Any, list[Any]] = defaultdict(list)
    for path, owner in owners.items():
        if owner.exchanged is not None and owner.layouts[0].ranks > 1:
            together[owner.exchanged, owner.layouts[0].axes].append(path)
        else:
            sums = owner.grad_reduce.sums
            found[path] = scatter_gradient(gradients[path], owner.layouts, sums, owner.slice_dtypes)
    for (wire, _), paths in together.items():
        members = [owners[path] for path in paths]
        layouts, kinds = [one.layouts for one in members], [one.slice_dtypes for one in members]
        slices = exchange_gradients([gradients[path] for path in paths], layouts, wire, kinds)
        found.update(zip(paths, slices, strict=True))
    return found


def _resized(x: jax.Array, sizes: tuple[int, ...], wanted: tuple[int, ...], axis: int) -> jax.Array:
    """The parts of an array along an axis, each filled up with zeros at its end, or cut there."""
    if sizes == wanted:
        return x
    parts = jnp.split(jnp.moveaxis(x, axis, 0), np.cumsum(sizes)[:-1])
    fitted = [
        jnp.pad(part[:size], ((0, max(0, size - len(part))), *((0, 0),) * (part.ndim - 1)))
        for part, size in zip(parts, wanted, strict=True)
    ]
    return jnp.moveaxis(jnp.concatenate(fitted), 0, axis)


def _partition(spec: PartitionSpec) -> dict[str, Any]:
    return {"out_sharding": tuple(spec), "eager_sharding": current_view() == "global"}


class WeightOwner(Layer):
    """A module with kernels that are gathered together into one fused weight.

    Attributes:
        dtype: of the weight on the wire and in the matmul.
        grad_reduce: how its gradient is summed over the ranks, unless a recipe says otherwise.
        whole_weight: the gathered weight, an array or a `SlottedWeight`, put there by a chain; `None` where the module
            gathers for itself.
        packed: the slices as a recipe has quantized them, to be gathered in their stead: one, or none without a recipe.
        operands: formats in which it multiplies; `None`: in `dtype`.
        keys: of its calls' stochastic rounding; `None` where nothing is rounded so.
        reduction: in what a recipe has its gradient exchanged, to be summed in float32; `None`: as `grad_reduce` says.
    """

    whole_weight: Any = nnx.data()
    packed: Any = nnx.data()
    keys: CallKeys | None = nnx.data()

    def __init__(self, *, dtype: Any, grad_reduce: str) -> None:
        super().__init__()
        self.dtype = np.dtype(dtype)
        self.grad_reduce = reduction_of(grad_reduce, dtype)
        self.whole_weight = nnx.data(None)
        self.packed = nnx.data(())
        self.operands: Operands | None = None
        self.keys = nnx.data(None)
        self.reduction: Format | np.dtype | None = None

    @abc.abstractmethod
    def weights(self) -> tuple[nnx.Param, ...]:
        """The kernels, in the order in which their rows are laid out."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The kernels' layouts."""
        return tuple(w.get_metadata()["layout"] for w in self.weights())

    def slices(self) -> Shards:
        """This rank's slice of each kernel."""
        return tuple(w.get_value() for w in self.weights())

    @property
    def slice_dtypes(self) -> tuple[Any, ...]:
        """The dtype of each kernel's slices."""
        return tuple(w.get_value().dtype for w in self.weights())

    def sent(self) -> Shards | Packed:
        """What this rank sends in a gather."""
        return self.packed[0] if self.packed else self.slices()

    def takes_codes(self, operands: Operands | None) -> bool:
        """Whether it multiplies in these formats the very codes that travel."""
        del operands
        return False

    def gather(self, sent: Shards | Packed) -> jax.Array | QuantizedArray:
        """The fused weight, or its codes where the module multiplies those."""
        if not isinstance(sent, Packed):
            return gather_weight(sent, self.layouts, self.dtype)
        if self.takes_codes(self.operands):
            return gather_codes(sent, self.layouts)
        return gather_packed(sent, [self.layouts], self.dtype)[0]

    @property
    def exchanged(self) -> Format | np.dtype | None:
        """What each rank sends the others of its gradient, to be summed in float32; `None`: it is reduce-scattered."""
        return self.grad_reduce.wire if self.reduction is None else self.reduction

    def slot(self, weight: jax.Array | QuantizedArray) -> jax.Array | None:
        """Where the gradient of a gathered weight goes; `None` where its own gradient has the right dtype."""
        if isinstance(weight, QuantizedArray):
            return jnp.zeros(weight.matrix, self.grad_reduce.slot)
        return None if weight.dtype == self.grad_reduce.slot else jnp.zeros(weight.shape, self.grad_reduce.slot)

    def product(self, x: jax.Array, weight: Any) -> jax.Array:
        """`x @ weight.T`, as a recipe has it."""
        if self.operands is None:
            return linear(x, weight)
        if self.operands.weight.block is None:
            return linear_fp8(x, weight, self.operands.gradient)
        return self.in_blocks(
            weight, lambda weight, key, operands: linear_blocks(x, weight, key, operands, multiplies_blocks())
        )

    def in_blocks(self, weight: Any, multiply: Callable[[Any, jax.Array, Operands], jax.Array]) -> jax.Array:
        """`multiply(weight, key, operands)`, with each kernel's rows as `rows_in_blocks` has them."""
        assert self.operands is not None
        rows, padded = use_rows(self.layouts), self.rows_in_blocks(self.operands)
        key = jnp.zeros(2, jnp.uint32) if self.keys is None else self.keys.next()
        weight = jax.tree.map(lambda a: _resized(a, rows, padded, -2), weight)  # and its slot
        return _resized(multiply(weight, key, self.operands), padded, rows, -1)

    def rows_in_blocks(self, operands: Operands) -> tuple[int, ...]:
        """Each kernel's rows in a fused weight that is multiplied, filled up with zeros to whole blocks.

        So no block of dgrad, which runs along them, has two kernels' in it. Where the fused weight is rank after rank,
        shards are whole blocks already.
        """
        rows = use_rows(self.layouts)
        if (in_order(self.layouts) and self.layouts[0].ranks > 1) or operands.gradient.block is None:
            return rows
        run = operands.gradient.block[1]
        return (*(-(-one // run) * run for one in rows[:-1]), rows[-1])

    def with_weight(self, function: Callable[..., Any], *operands: Any) -> Any:
        """`function(weight, *operands)`, the weight gathered for it here, and again in backward, unless a chain did."""
        if self.whole_weight is not None:
            return function(self.whole_weight, *operands)

        def gather(sent: Shards | Packed) -> Any:
            weight = self.gather(sent)
            slot = self.slot(weight)
            return weight if slot is None else SlottedWeight(weight, slot)

        def to_slices(gradient: Any) -> Shards:
            array = gradient.slot if isinstance(gradient, SlottedWeight) else gradient
            return scatter({(): self}, {(): array})[()]

        def gather_and_apply(slices: Shards, *operands: Any) -> Any:
            return function(gathered(slices, self.sent(), gather, to_slices), *operands)

        if self.layouts[0].ranks > 1:
            gather_and_apply = jax.checkpoint(gather_and_apply)  # else backward would keep the gathered weight
        return gather_and_apply(self.slices(), *operands)
