"""Ties arrays: makes arrays wait until other arrays are available, without changing values.

[Note: ties that hold]
If nothing reads an output of a barrier, XLA drops the output, and with it the tie. Therefore, one of the arrays that
must wait passes through a select on a zero that a barrier returned. XLA cannot know that this value is zero, so the
select must wait for it. The other arrays wait for the selected array in a second barrier. A select on each array would
also hold, but could read and write each of them once more. In global view, a sharding constraint to the stored
partition keeps a gather after the second barrier (`_movement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap


def is_float(leaf: Any) -> bool:
    """Returns whether an array has an inexact dtype, and so a gradient."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def after(zero: jax.Array, arrays: Sequence[Any]) -> list[Any]:
    """Makes arrays wait for `zero`, and returns them. Random keys, float0 arrays and non-arrays do not wait."""
    found = list(arrays)
    real = [i for i, a in enumerate(found) if is_real(a)]
    if real:
        least = min(real, key=lambda i: found[i].size)  # the smallest, because the select copies it
        found[least] = jnp.where(zero == 0, found[least], jnp.zeros((), found[least].dtype))
    return together(found)


def stamped(arrays: Sequence[Any]) -> tuple[jax.Array, list[Any]]:
    """Ties arrays and a new zero together, and returns both. The zero is available once all tied arrays are. Random
    keys, float0 arrays and non-arrays are not tied."""
    zero, *tied = together([jnp.zeros((), jnp.float32), *arrays])
    return zero, tied


def together(arrays: Sequence[Any]) -> list[Any]:
    """Ties arrays, so that none is available before all are, and returns them. Random keys, float0 arrays and
    non-arrays are not tied."""
    found = list(arrays)
    real = [i for i, leaf in enumerate(found) if is_real(leaf)]
    if real:
        for i, leaf in zip(real, lax.optimization_barrier([found[i] for i in real]), strict=True):
            found[i] = leaf
    return found


def mapped_with(outputs: Any, inputs: Sequence[Any]) -> Any:
    """Returns the outputs of a `custom_vjp`. Inside a `jax.vmap`, makes all outputs of inexact dtypes batched if any of
    them, or any input, is batched. Inputs that are random keys or float0 arrays do not count.

    Otherwise, JAX may not support the gradient of an unbatched output, such as a zero, with respect to unbatched
    inputs: jax 0.12 may raise an error, and jax 0.11 may count the output's gradient once per index.

    Args:
        outputs: the outputs, a pytree of arrays.
        inputs: the inputs.
    """
    leaves, tree = jax.tree.flatten(outputs)
    floats = [i for i, leaf in enumerate(leaves) if is_real(leaf) and is_float(leaf)]
    mapped = _mapped([leaves[i] for i in floats], [leaf for leaf in inputs if is_real(leaf)])
    for i, leaf in zip(floats, mapped, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(tree, leaves)


@jax.custom_jvp
def _mapped(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    return _broadcast_inside_vmap(outputs, inputs)


@_mapped.defjvp
def _mapped_jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    return _mapped(*primals), tangents[0]


@custom_vmap
def _broadcast_inside_vmap(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    del inputs
    return outputs


@_broadcast_inside_vmap.def_vmap
def _broadcast(size: int, batched: Any, outputs: list[Any], inputs: list[Any]) -> tuple[list[Any], list[bool]]:
    every = any(jax.tree.leaves(batched))
    whole = [
        jnp.broadcast_to(x, (size, *x.shape)) if every and not mapped else x
        for x, mapped in zip(outputs, batched[0], strict=True)
    ]
    return _mapped(whole, inputs), [every for _ in whole]


@jax.custom_jvp
def shared(zero: jax.Array) -> jax.Array:
    """Returns `zero`. Inside a `jax.vmap`, all indices share the zero of the first, so that unbatched arrays that wait
    for it stay unbatched."""
    return _first(zero)


@shared.defjvp
def _shared_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return shared(*primals), jnp.zeros_like(tangents[0])


@custom_vmap
def _first(zero: jax.Array) -> jax.Array:
    return zero


@_first.def_vmap
def _first_of_all(size: int, batched: Any, zero: jax.Array) -> tuple[jax.Array, bool]:
    return shared(zero[0] if batched[0] else zero), False


def is_real(leaf: Any) -> bool:
    """Returns whether a value is an array that is neither made of random keys nor float0."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and dtype != jax.dtypes.float0 and not jnp.issubdtype(dtype, jax.dtypes.extended)
