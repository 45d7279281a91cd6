"""Provides weights of any shape that are gathered where they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..collectives import join_split
from ..layout import ArrayLayout, cut, is_padded, layout_of_array, pad
from ..mesh import Roles, check_mesh_in_scope, current_view, degree, sequence_axis, spec_of_batch
from ..variables import Padded, PaddedParam
from ..weights import Gathered, GradReduce, gathered, on_ranks, ranks_spec, reduction_of
from ._layer import partition_of
from ._weight import ArrayWeight, placed_once


class GatheredOnUse(Padded):
    """Provides the methods of variables that hold a weight of any shape; see `Param`."""

    def gather(self) -> jax.Array:
        """Returns the array to compute with, in `dtype`.

        Without a mesh and in global view, returns the logical array. In global view, it is sharded over tp along
        `tensor_dim` if tp divides that dimension evenly. In local view, returns the array gathered over gtp. If there
        is a `tensor_dim`, the result contains only this tp rank's part of that dimension, padded with zeros if tp
        divides it unevenly.

        In a `Stack` or another chain, the chain has already gathered the array. Elsewhere, the gathered array is saved
        if backward needs it. Wrap your code in `nnx.remat` to gather the array again in backward instead.

        Raises:
            ValueError: if the variable holds the stacked arrays of all layers of a `Stack`; if the weight was built for
                other mesh degrees than those in scope; or, outside a `shard_map`, if the array does not have the shape
                that the weight was built with.
        """
        return gather_array(self)

    def get_value(self, **index: Any) -> Any:
        """Returns the value of the variable. In a layer of a chain, such as a `Stack`, the variable of a weight of any
        shape holds the gathered weight, and this method returns what `gather` returns.

        Without a mesh and in global view, reads such as `param[...]` and `param * x` thus give the logical array in a
        chain too. In local view, they give what `gather` returns in a chain, and this rank's shard elsewhere.
        """
        value = self.get_raw_value()
        if not isinstance(value, Gathered) or value.group.array is None:  # a frozen kernel, which others are fused with
            return super().get_value(**index)
        array, at = self.gather(), index.get("index", ...)
        return array if at is ... else array[at]


class Param(GatheredOnUse, nnx.Param):
    """A parameter of any shape, sharded over gtp in storage and gathered where it is used.

        self.queries = gtp_jax.Param(nnx.initializers.normal(0.02)(rngs.params(), (16, 4, 64)))    # in `__init__`
        scores = jnp.einsum("bshd,qhd->bqhs", x, self.queries.gather())                            # in `__call__`

    It is an `nnx.Param`. Outside a `shard_map`, `param[...]` is the logical array; checkpoints store the logical array
    too. gtp shards the longest dimension other than `tensor_dim` that it divides evenly; if there is none,
    `tensor_dim`. If it divides no dimension, fewer axes or none shard the array; a `TrainState` stores it padded, and
    so does the model under `gtp_jax.layout.even_shares`. See `gtp_jax.layout.layout_of_array`. No recipe quantizes it.

    Args:
        value: the logical array, of floating-point numbers.
        tensor_dim: the dimension that tp shards, as in a parallel layer; `None` for none. Negative numbers count from
            the end.
        dtype: the dtype in which the array is sent, and of the gathered array; by default, the dtype of `value`.
        grad_reduce: how its gradient is summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see `reduction_of`.
            Your computation produces the gradient in `dtype`. In global view outside a chain, XLA sums the gradient,
            also in `dtype`.
        metadata: metadata as for any `nnx.Variable`, except a sharding such as `out_sharding`, which follows from the
            mesh.

    Raises:
        TypeError: if `value` is not an array of floating-point numbers.
        ValueError: if the array is empty or does not have the dimension `tensor_dim`, if `grad_reduce` is not one of
            its names, or if a sharding is given.
    """

    def __init__(
        self,
        value: Any,
        *,
        tensor_dim: int | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        grad_reduce: GradReduce = "float32",
        **metadata: Any,
    ) -> None:
        if not isinstance(value, np.ndarray | jax.Array) or not jnp.issubdtype(value.dtype, jnp.floating):
            kind = f"an array of {value.dtype}" if hasattr(value, "dtype") else f"a {type(value).__name__}"
            raise TypeError(
                f"`value` is {kind}; it must be a floating-point array, such as an initializer returns: "
                "`gtp_jax.Param(init(rngs.params(), shape))`. Use `nnx.Variable` for values without a gradient."
            )
        given = [name for name in ("out_sharding", "sharding_names", "sharding") if name in metadata]
        if given:
            raise ValueError(
                f"`{given[0]}` is given to a gtp_jax.Param, whose sharding follows from the mesh in scope. Remove "
                "it, and pass the dimension that tp divides as `tensor_dim`; or use `nnx.Param` for a sharding of "
                "your own."
            )
        found = array_metadata(value, tensor_dim, dtype, grad_reduce)
        super().__init__(_placed(value, found["array"]), **found, **metadata)
        placed_once(self)


def array_metadata(
    value: Any, tensor_dim: int | None, dtype: jax.typing.DTypeLike | None, grad_reduce: GradReduce
) -> dict[str, Any]:
    """Returns the metadata by which `weight_owners` recognizes a variable as a weight of any shape."""
    array = layout_of_array(jnp.shape(value), tensor_dim=tensor_dim)
    dtype = np.dtype(jnp.result_type(value) if dtype is None else dtype)
    reduction_of(grad_reduce, dtype)
    return {
        "layout": array.matrix,
        "array": array,
        "gathered_dtype": dtype,
        "grad_reduce": grad_reduce,
        "out_sharding": tuple(array.spec),
        "eager_sharding": current_view() == "global",
    }


def gather_array(variable: nnx.Variable) -> jax.Array:
    """Returns the gathered array of any variable with `array_metadata`; see `Param.gather`."""
    check_mesh_in_scope()
    owner = ArrayWeight(variable)
    array, value, view = owner.array, owner.value, current_view()
    if isinstance(value, Gathered):
        if view == "global":
            return on_ranks(lambda weight: _joined(weight, array), (ranks_spec(),), array.use_spec)(value.weight)
        return jnp.reshape(value.weight, array.use_shape)  # a scalar has a dimension in global view
    _check_not_stacked(owner)
    owner.check_mesh()
    if view == "plain":
        return value.astype(owner.dtype)
    if view == "global":
        return _gathered_by_xla(value, array, owner.dtype, owner.group.summed.sums)
    return gathered(owner.group, owner.shards(), owner.wire())


def _placed(value: Any, array: ArrayLayout) -> jax.Array:
    """Returns an array padded for storage. In global view, unless JAX traces a program, the result is on the devices of
    the mesh in scope, even if the array, such as a pretrained one, was made elsewhere."""
    value = pad(value, array)
    if current_view() != "global":
        return jnp.asarray(value)
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # in a trace, even of `vmap`: the program that makes the array, or the `Stack`, places it
        return jnp.asarray(value)
    return jax.device_put(value, NamedSharding(mesh, array.spec))


def array_weight(kernel: nnx.Param, dtype: jax.typing.DTypeLike | None, grad_reduce: GradReduce) -> nnx.Param:
    """Returns the kernel of a Flax module as a weight that is gathered where it is used.

    The result is a plain `nnx.Param`, so that Flax, especially its Linen bridge, treats it as one; or a `PaddedParam`
    if the kernel is stored padded.
    """
    value = kernel.get_value()
    found = array_metadata(value, None, dtype, grad_reduce)
    array = found["array"]
    kind = PaddedParam if is_padded(array) else nnx.Param
    return placed_once(kind(pad(value, array), **found))


def refuse_options(name: str, options: Mapping[str, Any], *refused: str) -> None:
    """Raises a `ValueError` if the caller passed options of a Flax module that gtp_jax's module `name` does not
    support."""
    for option in refused:
        if options.get(option) is not None:
            raise ValueError(
                f"`{option}` is given to gtp_jax.nn.{name}, whose kernel is sharded according to the mesh in scope "
                "and gathered unchanged. Remove it, or write the layer with `gtp_jax.Param`."
            )


def over_batch(
    module: Any, function: Callable[[Any, jax.Array], jax.Array], x: jax.Array, *, batched: bool, by_token: bool
) -> jax.Array:
    """Returns `function(module, x)`. If the module's `kernel` is sharded, gathers it for the call, and again in
    backward, unless a chain has already gathered it.

    In global view, each rank calls the function on its own examples, and computes the gradient for these examples
    alone; the gradients of all ranks are then summed. If `x` is not a batch, or the ranks cannot divide the batch
    evenly, every rank calls the function on all of `x`.

    Args:
        module: a module whose `kernel` has `array_metadata`, and whose other parameters are whole on every rank.
        function: a function written for one rank's examples.
        x: the input.
        batched: whether dimension 0 of `x` and of the result is the batch, and examples are computed independently of
            each other.
        by_token: whether dimension 1 is computed in the same way.

    Raises:
        ValueError: in local view, if an axis divides sequences and the result depends on whole ones.
    """
    check_mesh_in_scope()
    graph, state = nnx.split(module)
    kernel = state.pop("kernel")
    owner = ArrayWeight(kernel)
    if current_view() == "local" and not by_token:
        _refuse_parts(module, owner.layouts[0].roles, x)
    if not isinstance(owner.value, Gathered):
        _check_not_stacked(owner)
        owner.check_mesh()
        if current_view() == "plain":
            return function(module, x)

    def call(value: Any, others: Any, x: jax.Array) -> jax.Array:
        own = ArrayWeight(kernel.replace(value))

        def with_array(weight: jax.Array, others: Any, x: jax.Array) -> jax.Array:
            put = nnx.State({**others, "kernel": kernel.replace(weight)})
            return function(nnx.merge(graph, put), x)

        return own.with_weight(with_array, others, x)

    if current_view() != "global":
        return call(owner.value, state, x)
    sharded = spec_of_batch(owner.layouts[0].roles, x.shape) if batched else PartitionSpec()
    into = ranks_spec() if isinstance(owner.value, Gathered) else partition_of(kernel)
    return on_ranks(call, (into, PartitionSpec(), sharded), sharded)(owner.value, state, x)


def _refuse_parts(module: nnx.Module, roles: Roles, x: jax.Array) -> None:
    if (axis := sequence_axis(roles, x.ndim)) is not None:
        raise ValueError(
            f"{type(module).__name__} is called in local view, or in a `Stack`, with shape {x.shape}: this rank's part "
            f"of every sequence ({axis} = {degree(axis)}). Its result depends on whole sequences. Call it in global "
            "view, outside of a `Stack`."
        )


def _gathered_by_xla(value: jax.Array, array: ArrayLayout, dtype: jax.typing.DTypeLike, sums: np.dtype) -> jax.Array:
    """Returns what `Param.gather` returns in global view outside a chain: the logical array, which XLA gathers from the
    stored one. Constrains its gradient to the partition of the stored array."""

    def gather(value: jax.Array) -> jax.Array:
        return cut(lax.with_sharding_constraint(value.astype(dtype), array.use_spec), array)

    def fwd(value: jax.Array) -> tuple[jax.Array, None]:
        return gather(value), None

    def bwd(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        summed = lax.with_sharding_constraint(pad(gradient.astype(sums), array), array.spec)
        return (summed.astype(value.dtype),)

    apply = jax.custom_vjp(gather)
    apply.defvjp(fwd, bwd)
    return apply(value)


def _joined(weight: jax.Array, array: ArrayLayout) -> jax.Array:
    """Returns this rank's part of the global array with the partition `array.use_spec`, given the gathered weight."""
    part, split = jnp.reshape(weight, array.use_shape), array.matrix.split
    return part if split is None or not array.matrix.takes_part else join_split(part, split, array.tensor_dim or 0)


def _check_not_stacked(owner: ArrayWeight) -> None:
    if owner.value.ndim == len(owner.array.shape) + 1:
        raise ValueError(
            f"the {owner.name} of shape {owner.array.shape} to be gathered holds an array of shape "
            f"{owner.value.shape}, the weights of all layers of a `Stack`. Gather it inside a layer's call, or read "
            "the logical arrays from `param[...]` one by one."
        )
