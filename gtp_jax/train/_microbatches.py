"""Sums gradients over microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ..mesh import platform
from ._uncast import traced_uncast

Tree = Any


def over_microbatches(
    of_part: Callable[[Tree, Tree, jax.Array], tuple[Tree, tuple[Tree, Tree]]],
    carried: Tree,
    parts: Tree,
    *,
    addends: Callable[[Tree], Tree] = lambda others: others,
    placed: Callable[[Tree], Tree] = lambda gradients: gradients,
) -> tuple[Tree, Tree, Tree, Tree]:
    """Runs one microbatch after another, and sums their results.

    A gradient whose last operation is a cast to its parameter's dtype stays in the narrower dtype until it is added.
    This changes no value.

    Args:
        of_part: `(carried, part, number) -> (gradients, (others, carried))`.
        carried: what one microbatch passes to the next, such as variables that the model writes.
        parts: a pytree of arrays of shape `(microbatches, ...)`.
        addends: a function that returns the form in which `others` are summed.
        placed: a function that constrains the shardings of gradients.

    Returns:
        The sums of the gradients and of the addends, what the last microbatch carried, and the shapes and dtypes of
        the `others` of one microbatch.
    """
    numbers = jnp.arange(jax.tree.leaves(parts)[0].shape[0])
    first = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], (parts, numbers)))
    narrow, (gradients, (own, _)) = traced_uncast(of_part, carried, *first)

    def add(sums: Tree, numbered: Tree) -> tuple[Tree, None]:
        gradients, others, carried = sums
        found, (more, carried) = narrow(carried, *numbered)
        gradients = placed(jax.tree.map(lambda g, new: g + new.astype(g.dtype), gradients, found))
        return (gradients, jax.tree.map(jnp.add, others, addends(more)), carried), None

    sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (gradients, jax.eval_shape(addends, own)))
    (gradients, others, carried), _ = lax.scan(add, (placed(sums[0]), sums[1], carried), (parts, numbers))
    return gradients, others, carried, own


def as_stored(params: Tree, number: jax.Array) -> Tree:
    """Returns parameters in the memory layout in which they are stored, for the computation of one microbatch.

    XLA chooses the layout of values that a loop reads but does not change. If weights are transposed before they are
    sent, XLA would copy all of them into the transposed layout, in 32 bits, before the loop. On CPUs, where memory is
    no concern, parameters are returned unchanged, because `jax.export` does not support constraints on layouts.

    Args:
        params: the parameters.
        number: the number of the microbatch. The result depends on it, so that XLA cannot move it out of the loop.
    """
    if platform() != "gpu":
        return params
    params, _ = lax.optimization_barrier((params, number))
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), params)
