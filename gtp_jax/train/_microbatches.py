"""Sums gradients over microbatches.

A batch in one part does without this loop: there is nothing to add, so its `aux` may hold what cannot be added, and its
variables may change their shapes and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from ..mesh import platform
from ._uncast import Examine, traced_uncast

Tree = Any


def over_microbatches(
    of_part: Callable[[Tree, Tree, jax.Array], tuple[Tree, tuple[Tree, Tree]]],
    carried: Tree,
    parts: Tree,
    *,
    addends: Callable[[Tree], Tree] = lambda others: others,
    placed: Callable[[Tree], Tree] = lambda gradients: gradients,
    examine: Examine | None = None,
) -> tuple[Tree, Tree, Tree, Tree]:
    """Runs one microbatch after another in a `lax.scan`, and sums their results.

    The last operation on a gradient may be a cast to its parameter's wider dtype. Such a gradient stays in the narrower
    dtype until it is added to the sum, which has the wider one. This changes no value.

    Args:
        of_part: `(carried, part, number) -> (gradients, (others, carried))`, the computation of one microbatch. `part`
            has the arrays of `parts` without their first dimension, and `number` is the microbatch's number.
        carried: the values that one microbatch passes to the next, such as variables that the model writes.
        parts: a pytree of arrays of shape `(microbatches, ...)`.
        addends: a function that converts `others` to the arrays that are summed.
        placed: a function that constrains the shardings of gradients.
        examine: a function that is called with the trace of `of_part`, as for `uncast`.

    Returns:
        The sum of the gradients; the sum of the addends; `carried` after the last microbatch; and the shapes and dtypes
        of the `others` of one microbatch.
    """
    numbers = jnp.arange(jax.tree.leaves(parts)[0].shape[0])
    first = jax.eval_shape(lambda: jax.tree.map(lambda a: a[0], (parts, numbers)))
    narrow, (gradients, (own, _)) = traced_uncast(of_part, carried, *first, examine=examine)

    def add(sums: Tree, numbered: Tree) -> tuple[Tree, None]:
        gradients, others, carried = sums
        found, (more, carried) = narrow(carried, *numbered)
        gradients = placed(jax.tree.map(lambda g, new: g + new.astype(g.dtype), gradients, found))
        return (gradients, jax.tree.map(jnp.add, others, addends(more)), carried), None

    sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (gradients, jax.eval_shape(addends, own)))
    (gradients, others, carried), _ = lax.scan(add, (placed(sums[0]), sums[1], carried), (parts, numbers))
    return gradients, others, carried, own


def as_stored(params: Tree, number: jax.Array) -> Tree:
    """Keeps parameters in the row-major memory layout in which they are stored, for the computation of one microbatch.

    XLA chooses the layout of values that a loop reads but does not change. If weights are transposed before they are
    sent, XLA would therefore copy all of them into the transposed layout, in their stored dtype (float32 by default),
    before the loop. The constraint prevents these copies. On platforms other than GPUs parameters are returned
    unchanged: `jax.export` does not support constraints on layouts, and memory is no concern on CPUs.

    Args:
        params: the parameters.
        number: the number of the microbatch. The result depends on it, so that XLA cannot move the result out of the
            loop.
    """
    if platform() != "gpu":
        return params
    params, _ = lax.optimization_barrier((params, number))
    return jax.tree.map(lambda x: with_layout_constraint(x, Layout(tuple(range(x.ndim)))), params)
