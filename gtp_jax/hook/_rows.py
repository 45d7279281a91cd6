"""Divides the examples that a call of a model receives among the ranks.

[Note: batches that come whole]
If a program leaves its batch whole, each rank computes all of it, and XLA partitions activations as it does the
gradients, the only arrays whose partitions it knows. It may partition queries, keys and values in different dimensions,
which cuDNN's attention cannot compile. So the outermost call of a model divides its examples as `train_step` does.
For a batch that is divided already, the compiled program is the same as before.
"""

from __future__ import annotations

import contextvars
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..mesh import degrees
from ._recording import current_recording

Tree = Any

# Differs from a sharding constraint under `jax.vmap`, where the first dimension of an array is not that of examples.
_divided = Primitive("gtp_divided")


def divided(arguments: Tree, axes: tuple[str, ...]) -> Tree:
    """Returns the arguments of a call. In traced code in global view, divides their examples over `axes` ([Note:
    batches that come whole]), and leaves the other dimensions to XLA.

    The first array that is not a scalar tells the number of examples. Arrays whose first dimension has another size,
    variables and modules stay as they are. If the degrees of `axes` do not divide the number of examples, or the call
    is inside a `jax.vmap`, all arguments do.

    Args:
        arguments: a tree of any values.
        axes: the axes of the mesh in scope that divide the batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if degrees(axes) == 1 or mesh.manual_axes or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return arguments
    leaves, structure = _leaves(arguments)
    examples = _examples(leaves, axes)
    if not examples:
        return arguments
    found = [_held(x, axes) if _is_array(x) and x.shape[0] == examples else x for x in leaves]
    return jax.tree.unflatten(structure, found)


def divisible_examples(arguments: Tree, axes: tuple[str, ...]) -> int:
    """Returns the number of examples that a call receives; 0 if `axes` do not divide them, if there is no traced array,
    or if the first is mapped by a `jax.vmap`, under which its first dimension is another."""
    examples, found = _examples(_leaves(arguments)[0], axes), current_recording()
    mapped = examples and (is_mapped(arguments) if found is None else found.mapped)
    return 0 if mapped else examples


def _leaves(arguments: Tree) -> tuple[list[Any], Any]:
    return jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, nnx.Module | nnx.Variable))


def _examples(leaves: list[Any], axes: tuple[str, ...]) -> int:
    """Returns the size of the first dimension of the first array; 0 if there is none, or `axes` do not divide it."""
    found = next(filter(_is_array, leaves), None)
    return 0 if found is None or found.shape[0] % degrees(axes) else found.shape[0]


def _is_array(x: Any) -> bool:
    """Returns whether a value is a traced array that is neither a scalar nor made of random keys."""
    traced = isinstance(x, Tracer) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return traced and x.ndim > 0


def _held(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    others = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(axes, *others))
    return _divided.bind(x, sharding=sharding)


def is_mapped(arguments: Tree) -> bool:
    """Returns whether the first array among the arguments of a call that is not a scalar is mapped by a `jax.vmap`. One
    around a jit in which the array is traced does not count."""
    found: list[bool] = []
    mark = _maps.set(found)
    try:
        first = next(filter(_is_array, _leaves(arguments)[0]), None)
        if first is not None:
            _probe.bind(first)
    finally:
        _maps.reset(mark)
    return bool(found)


def _note_map(operands: Any, dims: Any) -> tuple[jax.Array, int]:
    if (found := _maps.get()) is not None:
        found.append(True)
    return operands[0], dims[0]


# Returns its operand. Its batching rule adds an entry to the list in `_maps`.
_probe = Primitive("gtp_probe")
_maps: contextvars.ContextVar[list[bool] | None] = contextvars.ContextVar("gtp_jax_maps", default=None)
_probe.def_impl(lambda x: x)
_probe.def_abstract_eval(lambda x: x)
ad.deflinear2(_probe, lambda cotangent, x: [cotangent])
batching.primitive_batchers[_probe] = _note_map
mlir.register_lowering(_probe, mlir.lower_fun(lambda x: x, multiple_results=False))

_divided.def_impl(lambda x, *, sharding: x)
_divided.def_abstract_eval(lambda x, *, sharding: x)
ad.deflinear2(_divided, lambda cotangent, x, *, sharding: [_divided.bind(cotangent, sharding=sharding)])
batching.primitive_batchers[_divided] = lambda operands, dims, *, sharding: (operands[0], dims[0])
mlir.register_lowering(
    _divided,
    mlir.lower_fun(lambda x, *, sharding: lax.with_sharding_constraint(x, sharding), multiple_results=False),
)
