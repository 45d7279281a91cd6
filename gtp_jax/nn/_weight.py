"""Defines weights that are gathered where they are used, and the modules that own them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..chain import Remat, Schedule, with_remat
from ..formats import Operands, Tiled
from ..layout import ArrayLayout, Layout, is_padded, pad
from ..mesh import current_view
from ..ops import (
    BlockProducts,
    Fp8Products,
    Products,
    TileProducts,
    linear,
    linear_fp8_delayed,
    linear_rounded,
    saves_codes,
)
from ..recipes import Recipe, current_recipe
from ..variables import PaddedParam, RefuseLinen, even_layout, padded_layout, refuse_optimizer, warn_optimizer
from ..weights import (
    CallKeys,
    FrozenAs,
    Gathered,
    GradReduce,
    Holds,
    Layers,
    ModulePath,
    Scaling,
    Shards,
    Stored,
    Stretch,
    WeightGroup,
    Wire,
    frozen_wires,
    gathered,
    of_layers,
    quantize_together,
    reduction_of,
    scaling_of_replaced,
    use_rows,
)
from ._layer import Layer, check_shape, refuse_broadcast, value_of, wrap_methods

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
# Arguments of one layer's call that are not arrays, as pairs of name and value.
Named = tuple[tuple[str, Any], ...]


def make_weight(layout: Layout, init: Initializer, key: jax.Array, dtype: jax.typing.DTypeLike) -> nnx.Param:
    """Makes a weight that is gathered where it is used. On every mesh, `init` computes the values of the logical
    array."""
    kind = PaddedParam if is_padded(layout) else nnx.Param
    return _sharded(pad(init(key, layout.shape, dtype), layout), layout.spec, kind, layout=layout)


def make_vector(
    size: int, init: Initializer, key: jax.Array, dtype: jax.typing.DTypeLike, *, behind: Layout | None = None
) -> nnx.Param:
    """Makes a vector, such as a bias or the scale of a norm. It is whole on every rank, unless `behind` shards it.

    Args:
        size: the number of elements.
        init: the initializer.
        key: the random key.
        dtype: the dtype of the vector.
        behind: for a vector that is applied to the output of a column-parallel kernel, the layout of that kernel. If
            `behind.takes_part`, the vector is whole; otherwise, it is sharded over tp, but not over gtp.
    """
    split = None if behind is None or behind.takes_part else behind.split
    axis = None if split is None else split.axis
    return _sharded(init(key, (size,), dtype), PartitionSpec(axis))


def make_whole(shape: tuple[int, ...], init: Initializer, key: jax.Array, dtype: jax.typing.DTypeLike) -> nnx.Param:
    """Makes a parameter that is whole on every rank."""
    return _sharded(init(key, shape, dtype), PartitionSpec(*(None,) * len(shape)))


def _resized(x: jax.Array, sizes: tuple[int, ...], wanted: tuple[int, ...], axis: int) -> jax.Array:
    """Resizes the parts of an array along an axis. Pads a part with zeros at its end, or cuts off its end.

    Args:
        x: the array, the concatenation of the parts.
        sizes: the sizes of the parts.
        wanted: the sizes of the parts in the result.
        axis: the axis.
    """
    if sizes == wanted:
        return x
    parts = jnp.split(jnp.moveaxis(x, axis, 0), np.cumsum(sizes)[:-1])
    fitted = [
        jnp.pad(part[:size], ((0, max(0, size - len(part))), *((0, 0),) * (part.ndim - 1)))
        for part, size in zip(parts, wanted, strict=True)
    ]
    return jnp.moveaxis(jnp.concatenate(fitted), 0, axis)


def _sharded(value: jax.Array, spec: PartitionSpec, kind: type[nnx.Param] = nnx.Param, **metadata: Any) -> nnx.Param:
    eager = current_view() == "global"
    return placed_once(kind(value, out_sharding=tuple(spec), eager_sharding=eager, **metadata))


def placed_once[P: nnx.Variable](variable: P) -> P:
    """Changes a variable's metadata so that NNX does not place arrays according to them, and returns the variable. Its
    own array is already placed, and optimizer state with the same metadata must not be placed like it. A weight also
    gets a hook that refuses to fill it by broadcasting an array. A weight that is stored padded also gets hooks that
    refuse to store a variable like it in an `nnx.Optimizer` or in Linen; one that a `TrainState` would pad, a hook that
    warns in an `nnx.Optimizer`.

    `nnx.Optimizer` copies a parameter's metadata to its own variables. It would otherwise shard Adafactor's factors,
    which have fewer dimensions, like the parameter. Moments still get the parameter's sharding, because `zeros_like`
    keeps it.
    """
    variable.set_metadata(eager_sharding=False)
    if "layout" in variable.get_metadata():
        variable.set_metadata(on_set_value=refuse_broadcast)
    if even_layout(variable) is not None:
        variable.set_metadata(on_create_value=warn_optimizer)
    if padded_layout(variable) is not None:
        variable.set_metadata(on_create_value=refuse_optimizer, linen_meta_type=RefuseLinen)
    return variable


class StackedLayers(Layer):
    """A module with layers of the same structure, whose variables are stacked.

    Attributes:
        length: the number of layers.
        schedule: how the chain of these layers is run.
        each: for each layer, the arguments that only its call receives; empty if there are none.
    """

    length: int
    schedule: Schedule
    each: tuple[Named, ...]


@wrap_methods
class Weight(abc.ABC):
    """Arrays that are gathered together into one fused weight.

    Outside a chain, the variables hold what is stored, possibly with the decisions about it (`Stored`). In a chain, and
    in a model that `with_gathered_weights` returned, the first variable holds the fused weight (`Gathered`), and the
    others hold `None`.

    Attributes:
        dtype: the dtype in which the weight is sent and used, unless a recipe sets a format.
        grad_reduce: how the weight's gradient is summed over the ranks, unless a recipe decides otherwise.
        codes_multiply: whether the owner can multiply gathered codes without decoding them, if they have a single scale
            or are in tiles.
    """

    codes_multiply: ClassVar[bool] = False
    dtype: np.dtype
    grad_reduce: GradReduce

    @abc.abstractmethod
    def weights(self) -> tuple[nnx.Variable, ...]:
        """Returns the variables of the weight, in the order of their rows in the fused weight."""

    @property
    def name(self) -> str:
        """The name of the weight in error messages."""
        return type(self).__name__

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The logical shapes of the arrays."""
        return tuple(layout.shape for layout in self.layouts)

    @property
    def array(self) -> ArrayLayout | None:
        """The layout of the array, for a weight of any shape; `None` for kernels, which are matrices."""
        return None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the kernels. For a weight of any shape, the only layout is that of its matrix; see
        `ArrayLayout`."""
        return tuple(w.get_metadata()["layout"] for w in self.weights())

    @property
    def value(self) -> Any:
        """The value of the first kernel's variable, as `value_of` returns it."""
        return value_of(self.weights()[0])

    @property
    def frozen(self) -> FrozenAs | None:
        """The formats with which the weight was frozen; `None` if it is trained."""
        return self.weights()[0].get_metadata().get("frozen")

    def stored(self) -> tuple[Any, ...]:
        """Returns what each variable holds outside a chain: an array, or codes if the kernel was frozen as codes. For a
        weight of any shape, returns its matrix. In local view, these are this rank's parts; otherwise, they are global
        arrays."""
        return tuple(w.get_raw_value() for w in self.weights())

    def shards(self) -> Shards:
        """Returns what `stored` returns: the arrays with respect to which gradients are taken. Returns an empty tuple
        if the weight is frozen."""
        return () if self.frozen else self.stored()

    @property
    def built_group(self) -> WeightGroup:
        """The weight group of the kernels before the recipe in scope is applied."""
        kept = self.frozen
        trained = self.weights() if kept is None else ()
        return WeightGroup(
            layouts=self.layouts,
            param_dtypes=tuple(np.dtype(w.get_raw_value().dtype) for w in trained),
            dtype=self.dtype,
            grad_reduce=self.grad_reduce,
            codes_multiply=self.codes_multiply,
            array=self.array,
            **({} if kept is None else {"frozen": True, **kept._asdict()}),
        )

    def groups(self, length: int | None = None) -> tuple[tuple[Layers, WeightGroup], ...]:
        """Returns the weight groups of the kernels, each with the layers that it applies to.

        Args:
            length: the number of layers of the stack that contains the weight; `None` outside stacks.

        Raises:
            ValueError: if the recipe in scope has patterns, but the weight's path in the model is unknown; or if that
                recipe cannot apply to the weight (see `of_layers`).
        """
        value, recipe = self.value, current_recipe()
        if isinstance(value, Stored):
            return value.groups
        built = self.built_group
        layers = Layers(0, 1) if length is None else Layers(0, length, ())
        if recipe is None or not built.follows_recipes:
            return ((layers, built),)
        return of_layers(built, self._path_for(recipe), recipe, layers)

    def _path_for(self, recipe: Recipe) -> ModulePath:
        path = self.weights()[0].get_metadata().get("path")
        if path is None and recipe.rules:
            patterns = ", ".join(repr(pattern) for pattern, _ in recipe.rules)
            raise ValueError(
                f"the recipe in scope has patterns ({patterns}), but the {self.name} that is called does not know "
                "its path in the model. Build the model with `gtp_jax.init`; or pass `exclude=()` and no "
                "`override`, and use `gtp_jax.use_recipe(None)` around what stays in high precision."
            )
        return path or ()

    @property
    def group(self) -> WeightGroup:
        """The weight group of the kernels. Valid outside stacks, and in one layer of a stack."""
        value = self.value
        if isinstance(value, Gathered):
            return value.group
        ((_, group),) = self.groups()
        return group

    def group_for(self, x: Any) -> WeightGroup:
        """Returns the weight group of the kernels for a call with the input `x`. This is `group`, unless a subclass
        needs only a part of the weight for some inputs."""
        del x
        return self.group

    @property
    def operands(self) -> Operands | None:
        """The formats in which the weight is multiplied; `None` if it is multiplied in `dtype`."""
        return self.group.operands

    @property
    def keys(self) -> CallKeys | None:
        """The keys for stochastic rounding in the owner's calls; `None` if nothing is rounded stochastically, or if no
        step has provided keys."""
        value = self.value
        return value.keys if isinstance(value, Stored | Gathered) else None

    @property
    def scaling(self) -> Scaling | None:
        """The scaling of the matmuls' operands by amaxes of earlier steps; `None` if they are not scaled this way."""
        value = self.value
        scaling = value.scaling if isinstance(value, Stored | Gathered) else None
        if scaling is None or not self.replaced:
            return scaling
        return scaling_of_replaced(scaling, self.group.layouts, self.shards())

    @property
    def replaced(self) -> bool:
        """Whether the array of a kernel has been replaced since it was prepared."""
        values = [value_of(w) for w in self.weights()]
        return any(isinstance(value, Stored) and value.holds is Holds.REPLACED for value in values)

    @property
    def prepared(self) -> tuple[Stretch, ...]:
        """The prepared wires that are gathered instead of shards; empty if there are none, or a kernel has been
        replaced since."""
        value = self.value
        return value.prepared if isinstance(value, Stored) and not self.replaced else ()

    def wire(self) -> Wire | None:
        """Returns the wire that this rank sends when the weight of a module outside stacks is gathered; `None` if it
        sends its shards. Quantizes the shards if the weight group has a wire format and nothing was prepared."""
        if self.frozen:
            (wire,) = frozen_wires({(): self.group}, {(): self.stored()})
            return wire
        if self.prepared:
            return self.prepared[0].wire
        if self.group.wire is None:
            return None
        scaling = self.scaling
        amaxes = {} if scaling is None else {(): scaling.of_weight}
        (wire,) = quantize_together({(): self.group}, {(): lax.stop_gradient(self.shards())}, amaxes)
        return wire

    def product(self, x: jax.Array, weight: Any) -> jax.Array:
        """Returns `x @ weight.T`, multiplied in the formats of the recipe, if there are any."""
        if self.operands is None:
            return linear(x, weight)
        if self.operands.delayed is not None:
            scaling = self.scaling
            assert scaling is not None, "delayed scaling without a state"
            return linear_fp8_delayed(x, weight, scaling.amaxes, scaling.slot, self.operands.gradient)
        return self.in_products(weight, lambda weight, products: linear_rounded(x, weight, products))

    def in_products(self, weight: Any, multiply: Callable[[Any, Products], Any]) -> Any:
        """Returns `multiply(weight, products)`, which is one output or several, in the formats of the recipe.

        Args:
            weight: the fused weight.
            multiply: a function that multiplies by a weight in `products`. In formats with blocks, it gets the weight
                of `in_blocks`.
        """
        operands = self.operands
        assert operands is not None
        if operands.weight.block is None:
            return multiply(weight, Fp8Products(operands.gradient, saves_codes(operands.keep_codes)))
        if isinstance(self.group.wire, Tiled):
            return multiply(weight, TileProducts(self.group.order))
        return self.in_blocks(weight, lambda weight, key, operands: multiply(weight, BlockProducts.of(key, operands)))

    def call_key(self) -> jax.Array:
        """Returns the key for the stochastic rounding of the current call, uint32 `(2,)`; zeros if there are no
        `keys`."""
        return jnp.zeros(2, jnp.uint32) if self.keys is None else self.keys.next()

    def in_blocks(
        self,
        weight: Any,
        multiply: Callable[[Any, jax.Array, Operands], Any],
        key: jax.Array | None = None,
    ) -> Any:
        """Pads the rows of kernels to whole blocks where `WeightGroup.rows_in_blocks` requires it, calls
        `multiply(weight, key, operands)` with the padded weight, and returns its outputs without padding.

        Args:
            weight: the fused weight without padding.
            multiply: a function that multiplies by the padded weight.
            key: the key for stochastic rounding; by default, the result of `call_key`.
        """
        assert self.operands is not None
        rows, padded = use_rows(self.layouts), self.group.rows_in_blocks
        key = self.call_key() if key is None else key
        weight = jax.tree.map(lambda a: _resized(a, rows, padded, -2), weight)  # also the weight's slot, if any
        return jax.tree.map(lambda y: _resized(y, padded, rows, -1), multiply(weight, key, self.operands))

    def check_mesh(self) -> None:
        """Checks that the kernels were laid out for the degrees of the mesh in scope, and that their variables hold
        arrays of the shapes that they were built with (see `check_shape`).

        Raises:
            ValueError: if not.
        """
        for variable in self.weights():
            check_shape(variable, self.name)
        for shape, layout in zip(self.shapes, self.layouts, strict=True):
            layout.check_mesh(f"the weight of shape {shape} of {self.name}")

    def gathered(self) -> Any:
        """Returns the fused weight, gathered unless a chain has done so; with a slot (`SlottedWeight`) if its gradient
        needs one. If backward needs the weight, it is saved: unlike `with_weight`, nothing gathers it again."""
        self.check_mesh()
        value = self.value
        return value.weight if isinstance(value, Gathered) else gathered(self.group, self.shards(), self.wire())

    def with_weight(self, function: Callable[..., Any], *operands: Any) -> Any:
        """Returns `function(weight, *operands)`; see `apply_gathered`."""
        return apply_gathered((self,), function, *operands)


def apply_gathered(
    owners: Sequence[Weight],
    function: Callable[..., Any],
    *operands: Any,
    groups: Sequence[WeightGroup] | None = None,
    remat: Remat = "nothing",
) -> Any:
    """Returns `function(*weights, *operands)`. Gathers the weights, and gathers them again in backward, unless a chain
    has already gathered them. If no weight is sharded, nothing is gathered again.

    Args:
        owners: the owners of the weights.
        function: the function.
        operands: its further arguments.
        groups: the weight groups by which the weights are gathered; those of the owners by default.
        remat: what is saved for backward besides the operands if the weights are gathered again; see `with_remat`.
    """
    for owner in owners:
        owner.check_mesh()
    if all(isinstance(owner.value, Gathered) for owner in owners):
        return function(*(owner.value.weight for owner in owners), *operands)
    groups = [owner.group for owner in owners] if groups is None else groups
    wires = [owner.wire() for owner in owners]

    def gather_and_apply(shards: Sequence[Shards], *operands: Any) -> Any:
        return function(*map(gathered, groups, shards, wires), *operands)

    if any(group.ranks > 1 or group.divided for group in groups):
        # otherwise, the gathered weights are saved for backward
        gather_and_apply = with_remat(gather_and_apply, remat, prevent_cse=True)
    return gather_and_apply([owner.shards() for owner in owners], *operands)


class WeightOwner(Weight, Layer):
    """A module that owns kernels, which are gathered together into one fused weight."""

    def __init__(self, *, dtype: jax.typing.DTypeLike, grad_reduce: GradReduce) -> None:
        super().__init__()
        self.dtype = np.dtype(dtype)
        reduction_of(grad_reduce, dtype)  # raises an error for unknown names
        self.grad_reduce = grad_reduce


class ArrayWeight(Weight):
    """A weight of any shape, described by the metadata of its variable; see `gtp_jax.Param`."""

    def __init__(self, variable: nnx.Variable) -> None:
        metadata = variable.get_metadata()
        self.variable = variable
        self.dtype = metadata["gathered_dtype"]
        self.grad_reduce = metadata["grad_reduce"]

    def weights(self) -> tuple[nnx.Variable, ...]:
        return (self.variable,)

    @property
    def name(self) -> str:
        return type(self.variable).__name__

    @property
    def array(self) -> ArrayLayout:
        return self.variable.get_metadata()["array"]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.array.shape,)

    def stored(self) -> tuple[Any, ...]:
        return (self.array.to_matrix(self.value),)
