"""Provides the base class of layers, whose call works without a mesh, in global view and inside a `shard_map`."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from ..formats import QuantizedArray
from ..hook import with_maxima, without_maxima
from ..layout import Layout, is_padded
from ..mesh import (
    Roles,
    axes_of,
    check_mesh_in_scope,
    current_roles,
    current_view,
    degree,
    degrees,
    refuse_parts_of_sequences,
    sequence_axis,
    stacked_spec,
    use_roles,
)
from ..variables import Leaf, is_variable, leaves_of, padded_by_state, raw_value, split_nodes
from ..weights import Beside, Gathered, Holds, Scaling, Stored, codes_specs, forget_after, on_ranks, ranks_spec
from ._attributes import attributes_of, refuse_set_attributes
from ._cache import Cache
from ._shared import SharedInputs


def layout_of(leaf: Leaf) -> Layout | None:
    """Returns the layout of a weight that is gathered, from its metadata; `None` for any other leaf, and for the
    parameters that `gtp_jax.shard` gathers.

    Weights are recognized by this metadata and not by their type: most kernels are plain `nnx.Param`s, so that Flax,
    especially its Linen bridge, treats them as such.
    """
    return leaf.get_metadata().get("layout") if is_variable(leaf) else None


def partition_of(leaf: Leaf) -> Any:
    """Returns the partition spec of a leaf's array, including the leading dimension of a stack. If its metadata contain
    no sharding, the array is whole. For quantized weights, returns the partition specs of the arrays of codes and
    scales."""
    layout, value = layout_of(leaf), raw_value(leaf)
    if layout is not None and isinstance(value, QuantizedArray):
        return codes_specs(layout, value.format, value.codes.ndim - len(layout.shape))
    if layout is not None:
        layout = leaf.get_metadata().get("array") or layout  # an array of any shape has both
    if layout is not None:
        return stacked_spec(layout.spec, value.ndim)
    named = leaf.get_metadata().get("out_sharding") if is_variable(leaf) else None
    return PartitionSpec(*(named or ()))


def value_of(leaf: Leaf) -> Any:
    """Returns the value of a leaf. The value of a variable is usually an array. It is a `Stored` if decisions about a
    weight are kept with its array, and a `Gathered` if the weight has been gathered already, as in a chain. A leaf that
    is an array is returned unchanged."""
    if not is_variable(leaf):
        return leaf
    value, beside = leaf.get_raw_value(), leaf.get_metadata().get("beside")
    return value if beside is None or value is None or isinstance(value, Gathered) else beside.of(value)


def with_value(variable: Leaf, value: Any) -> Leaf:
    """Returns a copy of the variable that holds `value`, in the form that `value_of` reads. For a leaf that is an
    array, returns `value` itself."""
    if not isinstance(variable, nnx.Variable):
        return value
    if not isinstance(value, Stored):
        return variable.replace(value)
    refused = _REFUSED_READS.get(value.holds)
    read = {} if refused is None else {"on_get_value": refused}
    return variable.replace(value.shard, beside=Beside(value), **read)


def _refuse_read(variable: nnx.Variable, value: Any) -> Any:
    layout = variable.get_metadata()["layout"]
    raise ValueError(
        f"the loss reads the array of a weight of shape {layout.shape} in a step with `reduce_over_dp='last'`. "
        "Such a step differentiates with respect to whole shards and replaces the stored arrays with placeholders, so "
        "a loss cannot read them. Use `reduce_over_dp='each'`."
    )


def _refuse_rounded_read(variable: nnx.Variable, value: Any) -> Any:
    layout = variable.get_metadata()["layout"]
    raise ValueError(
        f"the loss reads the array of a weight of shape {layout.shape} in a step over replicas of unequal degree. "
        "Such a step rounds weights to the dtype of the matmuls before it sends them, so a loss cannot read the stored "
        "values. Replace a penalty on weights by the optimizer's weight decay, or build the model with "
        "`dtype='float32'`."
    )


_REFUSED_READS = {Holds.PLACEHOLDER: _refuse_read, Holds.ROUNDED: _refuse_rounded_read}


class _Method:
    """A method that `nnx.tabulate` ignores, because it is not a function. `nnx.tabulate` treats every public function
    of a class as a call that maps arrays to arrays."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__dict__.update(vars(function))  # including the mark of abstract methods
        self.__doc__, self.__name__, self.__wrapped__ = function.__doc__, function.__name__, function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.__wrapped__.__get__(instance, owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def check_shape(variable: Leaf, owner: str) -> None:
    """Checks that a weight holds an array of the shape that it was built with. Checks nothing in local view, where a
    rank sees only its part, and nothing about codes, which cannot be set, or leaves that are not weights.

    Args:
        variable: the variable of the weight, possibly with a leading dimension of layers.
        owner: the name of the weight's owner in error messages.

    Raises:
        ValueError: if the array has another shape. The message names both shapes.
    """
    if not isinstance(variable, nnx.Variable) or isinstance(variable.get_raw_value(), QuantizedArray):
        return  # codes have the shape of the matrix, and cannot be set
    metadata = variable.get_metadata()
    layout, shape = metadata.get("array") or metadata.get("layout"), getattr(variable.get_raw_value(), "shape", None)
    if layout is None or shape is None or current_view() == "local":
        return
    ahead = len(shape) - len(layout.shape)
    if ahead not in (0, 1) or tuple(shape[ahead:]) != layout.array_shape:
        spec = stacked_spec(layout.spec, len(shape))
        if layout.even is not None and tuple(shape[ahead:]) == layout.even.array_shape:
            raise padded_by_state(f"the weight of shape {layout.shape} of {owner}", tuple(shape))
        raise ValueError(
            f"the weight of shape {layout.shape} of {owner} holds an array of shape {tuple(shape)}. Set an array of "
            "the weight's own shape, which is the logical one on every mesh: `kernel.set_value(array)`. "
            + (
                "This also pads and shards it."
                if is_padded(layout)
                else f"On a mesh, partition the array first as {spec}: `set_value` stores it as it is."
            )
        )


class _RefuseBroadcast:
    """A hook for `on_set_value` that refuses to fill a weight by broadcasting an array. Scalars are allowed.

    It is a hook because most weights are plain `nnx.Param`s, which cannot have a `set_value` of their own. A hook does
    not receive the index, so it refuses `kernel[0] = row` as well as `kernel[...] = row`. Its truth value is false,
    because `nnx.Optimizer` copies a parameter's metadata to new variables, and NNX warns if a new variable has a hook
    whose truth value is true.

    Raises:
        ValueError: if the array has another shape than the weight, but could be broadcast to it. The message names both
            shapes.
    """

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "refuse_broadcast"

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        held, given = (getattr(one, "shape", None) for one in (variable.get_raw_value(), value))
        if held is None or not given or given == held:
            return value
        ahead = (1,) * (len(held) - len(given))
        if len(given) <= len(held) and all(a in (1, b) for a, b in zip((*ahead, *given), held, strict=True)):
            raise ValueError(
                f"an array of shape {tuple(given)} is assigned to a weight of shape {tuple(held)}, and would be "
                "broadcast. Assign an array of the weight's own shape: `kernel[...] = array`; to set a part of it, "
                "`kernel[...] = kernel[...].at[index].set(array)`."
            )
        return value


refuse_broadcast = _RefuseBroadcast()


class Layer(nnx.Module):
    """A module whose call works in every view; see `gtp_jax.mesh.current_view`.

    Without a mesh, or inside a `shard_map`, a call runs `local`. In global view, it opens a `shard_map`, and runs
    `local` in local view inside it.

    Attributes:
        sequence_parallel: whether activations between layers are sharded along the sequence, over the tensor axis; see
            `shards_sequence`.
        fewest_dims: the minimum number of dimensions of the input if the batch is sharded. Dimension 0 must then be the
            batch.
        context_parallel: whether `local` is right if `x` is this rank's part of every sequence (`Roles.sequence`): it
            computes each token by itself, or calls layers that know. The class that defines `local` sets it.
    """

    sequence_parallel: bool
    fewest_dims: int = 1
    context_parallel: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        wrap_methods(cls)

    def __init__(self) -> None:
        self._roles = current_roles()

    @property
    def roles(self) -> Roles:
        """The roles of mesh axes that were in scope when the layer was built; the roles in scope now if a subclass did
        not call `Layer.__init__`."""
        return getattr(self, "_roles", None) or current_roles()

    @property
    def title(self) -> str:
        """The name of the layer in error messages."""
        return type(self).__name__

    @abc.abstractmethod
    def local(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the call on this rank's part of the input."""

    def shards_sequence(self, ndim: int) -> bool:
        """Returns whether an activation of `ndim` dimensions is sharded along the sequence between layers, if there is
        a tensor axis to shard it over.

        With `sequence_parallel`, an activation of three dimensions or more, `(batch, sequence, ..., features)`, is
        sharded in dimension 1. An activation of two dimensions, `(batch, features)`, has no sequence to shard.

        Raises:
            AttributeError: if the layer does not set `sequence_parallel`.
        """
        if not hasattr(self, "sequence_parallel"):
            raise AttributeError(
                f"{type(self).__name__} does not say whether activations are sharded along the sequence. Set "
                "`self.sequence_parallel` to `True` or `False` in `__init__`, or override `partitions`."
            )
        return self.sequence_parallel and ndim > 2

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        """Returns the partitions of input and output in global view. By default, both are the partition of activations
        between layers.

        Args:
            ndim: the number of dimensions of the input.
        """
        between = between_layers(self.roles, ndim, self.shards_sequence(ndim))
        return between, between

    @property
    def converts(self) -> tuple[bool, bool]:
        """Two flags: whether `from_global` changes its argument, and whether `to_global` does. By default, whether the
        class overrides these methods."""
        own = type(self)
        return own.from_global is not Layer.from_global, own.to_global is not Layer.to_global

    def partition_of_input(self, name: int | str, array: Any) -> PartitionSpec:
        """Returns the partition, in global view, of an array among the inputs after the first. By default, the batch
        axes shard dimension 0, and other dimensions are whole; a scalar, such as a typed random key, is whole.

        Args:
            name: the name of the argument. For a positional argument, its index among those after the first input, from
                0.
            array: the array, or anything with a shape.
        """
        del name
        return PartitionSpec(self.roles.batch) if jnp.ndim(array) else PartitionSpec()

    def from_global(self, x: Any) -> Any:
        """Converts this rank's part of the global input, as `partitions` divides it, to the input of `local`."""
        return x

    def to_global(self, y: Any) -> Any:
        """Converts the output of `local` to this rank's part of the global output, as `partitions` divides it."""
        return y

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        check_mesh_in_scope()
        if current_view() != "global":
            if current_view() == "local" and not _takes_parts(type(self)):
                refuse_parts(self, self.roles)
            return self.local(x, *args, **kwargs)
        return in_shard_map(self, x, *self.partitions(jnp.ndim(x)), SharedInputs(args, kwargs))


@functools.cache
def _takes_parts(cls: type[Layer]) -> bool:
    """Returns whether the class that defines `local` sets `context_parallel`. A subclass may have a `local` that does
    not know."""
    return bool(next(vars(base).get("context_parallel") for base in cls.__mro__ if "local" in vars(base)))


def refuse_parts(module: nnx.Module, roles: Roles) -> None:
    """Raises a `ValueError` if an axis divides sequences, for a module that does not say that it takes parts."""
    refuse_parts_of_sequences(
        roles,
        f"{type(module).__name__} is called",
        "If it computes each token by itself, or calls gtp_jax's layers where it does not, set `context_parallel = "
        "True` in its class, which must be a `gtp_jax.nn.Layer` with a `local` of its own. Otherwise, call it on "
        "global arrays, outside of a `Stack` or in global view.",
    )


def wrap_methods[T: type](cls: T) -> T:
    """Replaces the public functions of a class with methods that `nnx.tabulate` does not call."""
    for name, member in list(vars(cls).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(cls, name, _Method(member))
    return cls


wrap_methods(Layer)


def between_layers(roles: Roles, ndim: int, sequence_parallel: bool) -> PartitionSpec:
    """Returns the partition of activations between layers, `(batch, sequence, ..., features)` of `ndim` dimensions;
    features are whole. The sequence is sharded over the axis `sequence`, and within its parts, with
    `sequence_parallel`, over the tensor axis."""
    tensor = roles.tensor if sequence_parallel and degree(roles.tensor) > 1 else None
    axis = sequence_axis(roles, ndim)
    along = tensor if axis is None else axis if tensor is None else (axis, tensor)
    return PartitionSpec(roles.batch) if along is None else PartitionSpec(roles.batch, along)


def inside_layer(roles: Roles, ndim: int, *, even: bool = True) -> PartitionSpec:
    """Returns the partition of activations inside a parallel layer. Features are sharded over the tensor axis if it
    divides them evenly (`even`). Otherwise, they are whole, because global arrays cannot be sharded unevenly."""
    if ndim == 1:  # features alone
        return PartitionSpec(roles.tensor) if even else PartitionSpec()
    axis = sequence_axis(roles, ndim)
    sequence = () if ndim == 2 else (axis, *(None,) * (ndim - 3))
    if not even:
        return PartitionSpec(roles.batch) if axis is None else PartitionSpec(roles.batch, axis)
    return PartitionSpec(roles.batch, *sequence, roles.tensor)


def states_partitions(module: nnx.Module) -> TypeGuard[Layer]:
    """Returns whether a module states how its input and output are partitioned in global view, by setting
    `sequence_parallel` or overriding `partitions`."""
    if not isinstance(module, Layer):
        return False
    return hasattr(module, "sequence_parallel") or type(module).partitions is not Layer.partitions


def sides_of(layer: Layer, taken: int, returned: int) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the partitions, in global view, of a layer's input with `taken` dimensions and its output with `returned`
    dimensions."""
    if type(layer).partitions is not Layer.partitions:
        return layer.partitions(taken)
    return layer.partitions(taken)[0], layer.partitions(returned)[1]


def in_shard_map(
    module: Layer, x: jax.Array, into: PartitionSpec, out: PartitionSpec, others: SharedInputs | None = None
) -> Any:
    """Calls a module in global view, on every rank's own part. Updates the caches that the call writes.

    Args:
        module: the module, which is called with this rank's part of `x` inside a `shard_map`.
        x: the input, `(batch, ...)`.
        into: the partition of `x`.
        out: the partition of the result, or of each array in it.
        others: further inputs, whose partitions `Layer.partition_of_input` returns.

    Raises:
        ValueError: if the input has too few dimensions; if the mesh does not divide the batch or the sequence evenly;
            if a further input that is sharded over the batch does not have the batch size of `x`; if the model was
            built for other mesh degrees; if a weight's array does not have the shape that it was built with; or if the
            call writes variables other than caches, or changes a plain attribute.
    """
    roles = module.roles
    others = SharedInputs((), {}) if others is None else others
    _check_input(x, into, roles, f"the input of {module.title}", module.fewest_dims)
    template, variables = split_nodes(module)
    caches = _caches(module)
    for variable in variables:
        layout = layout_of(variable)
        if layout is not None:
            layout.check_mesh(f"the weight of shape {layout.shape} of {module.title}")
            check_shape(variable, module.title)

    @forget_after()
    def local(values: list[Any], x: jax.Array, arrays: list[jax.Array]) -> Any:
        values = [_on_rank(value) for value in values]
        merged = template.merged([with_value(v, value) for v, value in zip(variables, values, strict=True)])
        attributes = attributes_of(merged)
        with use_roles(roles):
            args, kwargs = others.arguments(arrays)
            y = merged.to_global(merged(merged.from_global(x), *args, **kwargs))
        _refuse_writes(values, merged)
        refuse_set_attributes(attributes, type(merged).__name__)
        return (y, [cache.get_value() for _, cache in _caches(merged)]) if caches else y

    specs = [_value_spec(v) for v in variables]
    values = [_for_view(value_of(v)) for v in variables]
    of_others = [
        _partition_of_other(module, name, array, x) for name, array in zip(others.names, others.arrays, strict=True)
    ]
    into_ranks = (specs, into, of_others)
    if not caches:
        return on_ranks(local, into_ranks, out)(values, x, others.arrays)
    y, written = on_ranks(local, into_ranks, (out, [partition_of(v) for _, v in caches]))(values, x, others.arrays)
    put = [(path, cache.replace(value)) for (path, cache), value in zip(caches, written, strict=True)]
    nnx.update(module, nnx.from_flat_state(put))
    return y


def _caches(module: nnx.Module) -> list[tuple[Any, Cache]]:
    """Returns the caches of a module, by path. They are the only variables that each rank's own call may write."""
    return list(nnx.to_flat_state(nnx.state(module, Cache)))


def _partition_of_other(module: Layer, name: int | str, array: Any, x: jax.Array) -> PartitionSpec:
    spec, owner = module.partition_of_input(name, array), type(module).__name__
    if len(spec) and spec[0] is not None:
        if array.shape[0] != x.shape[0]:
            raise ValueError(
                f"the input {name!r} of {owner} has shape {array.shape}; on this mesh its first dimension must be "
                f"the batch, {x.shape[0]}. Broadcast it, or return its sharding from `partition_of_input`."
            )
        _check_input(array, spec, module.roles, f"the input {name!r} of {owner}")
    return spec


def _refuse_writes(before: list[Any], module: nnx.Module) -> None:
    """Raises a `ValueError` if a call has written variables other than caches, because each rank may have written a
    different value."""
    known = {id(leaf) for leaf in jax.tree.leaves(before)}
    for path, v in leaves_of(module).items():
        leaves = jax.tree.leaves(value_of(v))
        if not isinstance(v, Cache) and any(id(leaf) not in known for leaf in leaves):
            raise ValueError(
                f"a call of {type(module).__name__} writes {'.'.join(map(str, path))}, a {type(v).__name__}. A "
                "`gtp_jax.nn.Layer` runs on each rank's own part, so each rank would write a different value. Write "
                "it in an `nnx.Module` that calls the layer, or pass the layer what it needs, such as a key."
            )


def _value_spec(variable: Leaf) -> Any:
    """Returns the partitions, in global view, of a variable's value, as a pytree prefix of it."""
    value = value_of(variable)
    if isinstance(value, Stored):
        layout = layout_of(variable)
        assert layout is not None
        return value.specs(layout)
    if isinstance(value, Gathered):
        scaling = None if value.scaling is None else Scaling.specs()
        return Gathered(ranks_spec(), value.group, PartitionSpec(), scaling)  # pyright: ignore[reportArgumentType]
    return PartitionSpec() if value is None else partition_of(variable)


def _for_view(value: Any) -> Any:
    """Returns a variable's value as an argument of a `shard_map`: with the keys of stochastic rounding for the current
    call, and with all arrays in dtypes that a `shard_map` accepts."""
    if not isinstance(value, Stored | Gathered):
        return value
    keys = None if value.keys is None else value.keys.for_view()
    scaling = None if value.scaling is None else without_maxima(value.scaling)
    return dataclasses.replace(value, keys=keys, scaling=scaling)


def _on_rank(value: Any) -> Any:
    """Restores the value that `_for_view` converted, inside the `shard_map`. Makes the keys of stochastic rounding
    differ between ranks."""
    if not isinstance(value, Stored | Gathered):
        return value
    keys, scaling = value.keys, None if value.scaling is None else with_maxima(value.scaling)
    if keys is not None:
        keys = keys.of_rank(lax.axis_index(jax.sharding.get_abstract_mesh().axis_names).astype(jnp.uint32))
    return dataclasses.replace(value, keys=keys, scaling=scaling)


def _check_input(x: jax.Array, into: PartitionSpec, roles: Roles, name: str, fewest: int = 1) -> None:
    batch, tensor = degrees(roles.batch), roles.tensor
    fewest = max(1, len(into), fewest if batch > 1 else 1)
    if x.ndim < fewest:
        raise ValueError(
            f"{name} has shape {x.shape}; on this mesh it needs a batch as dimension 0, and at least "
            f"{fewest} dimensions in all. Add a batch dimension."
        )
    if x.shape[0] % batch:
        raise ValueError(
            f"{name} has shape {x.shape}; its first dimension is the batch and must be a multiple of "
            f"{' * '.join(roles.batch)} = {batch}. Pad the batch, or choose other degrees."
        )
    along = axes_of(PartitionSpec(into[1])) if len(into) > 1 else ()
    axes = tuple(axis for axis in along if axis in (roles.sequence, tensor))
    if axes and (x.ndim > 2 or axes == (roles.sequence,)) and x.shape[1] % degrees(axes):
        instead = ", or pass `sequence_parallel=False`" if tensor in axes else ""
        raise ValueError(
            f"{name} has shape {x.shape}; dimension 1 is the sharded sequence and must be a multiple of "
            f"{' * '.join(axes)} = {degrees(axes)}. Pad the sequence{instead}."
        )
