"""Finds products with weights in the jaxpr of a call, so that they can be computed in another way.

[Note: products found]
A product with a weight is a `dot_general` with contracting dimensions and without batch dimensions. Exactly one of its
operands is a view of a weight: the gathered weight after any number of casts, reshapes, transposes, squeezes and
copies. The result has the dtype of the operands, a float of at least 16 bits. A nested jit that reads a view is
searched for more views and products, unless it is in `Parts.before`. All other operations are evaluated as they are.

If a weight has a slot (`SlottedWeight`, and [Note: words of the hook]), so do its views. A product that the hook
computes can return the weight's gradient as the gradient of the slot. A cast changes the dtype of a view, but not that
of its slot.

[Note: order of a view]
Whether a product can be computed in blocks depends on which elements of a weight it contracts, and in which order
(`multiplies`). A view therefore records where its elements are in the weight, unless a reshape makes that impossible.
Each dimension of the view is a list of runs, outermost first. A run `(stride, size)` consists of `size` positions that
are `stride` elements of the weight apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Literal, Var

from ..ops import SlottedWeight

Runs = tuple[tuple[int, int], ...]


class View(NamedTuple):
    """A view of a weight: an array that consists of the weight's elements.

    Attributes:
        number: the weight's number, its index among the weights of the call.
        dims: the runs of each dimension; `None` if a reshape has made a dimension that cannot be written as runs.
    """

    number: int
    dims: tuple[Runs, ...] | None


class Factor(NamedTuple):
    """A weight as a factor of a product.

    Attributes:
        number: the weight's number, its index among the weights of the call.
        contracted: the runs of the contracted dimensions, with contiguous runs joined; `None` if unknown.
        kept: the runs of the other dimensions, with contiguous runs joined; `None` if unknown.
        precision: the precision that the model's code asks for, as in `jax.lax.dot_general`.
    """

    number: int
    contracted: Runs | None
    kept: Runs | None
    precision: Any = None


# For each of several arrays (the inputs or outputs of a jaxpr, or the operands of an operation), how it is a view of a
# weight; `None` if it is not one.
Views = Sequence[View | None]
Array = jax.Array | SlottedWeight
# A function that multiplies `x`, `(..., contracted features)`, by the transpose of a matrix of shape
# `(kept features, contracted features)`.
Times = Callable[[jax.Array, Array], jax.Array]
# A function that may compute a product with a weight in another way than the jaxpr does. Its arguments are the weight
# as a factor, a function `f`, and the operands of the product: `x`, which is not a view, and then `view`. It returns
# `f(times, x, view)` for a `Times` of its choice, or `None` to leave the product to the jaxpr.
Multiply = Callable[[Factor, Callable[[Times, jax.Array, Array], jax.Array], jax.Array, Array], jax.Array | None]

_VIEWS = ("convert_element_type", "reshape", "transpose", "squeeze", "copy")
_NESTED = ("pjit", "jit", "closed_call")


def views_of(before: Jaxpr) -> tuple[View | None, ...]:
    """Returns how each output of a jaxpr is a view of a weight; `None` if it is not. The inputs of the jaxpr must be
    the weights. Nested jits are not searched."""
    known: dict[Any, View | None] = dict(zip(before.invars, inputs_of(before), strict=True))
    for eqn in before.eqns:
        if eqn.primitive.name in _VIEWS and isinstance(eqn.invars[0], Var):
            known[eqn.outvars[0]] = _through(eqn, known.get(eqn.invars[0]))
    return tuple(known.get(v) for v in before.outvars)


def inputs_of(before: Jaxpr) -> list[View | None]:
    """Returns a view for each input of a jaxpr. The inputs must be the weights; each is a view of itself."""
    return [View(i, _whole(v)) for i, v in enumerate(before.invars)]


def values_of(array: Any) -> Any:
    """Returns an array without its slot, if it has one."""
    return array.values if isinstance(array, SlottedWeight) else array


def is_narrow(dtype: Any) -> bool:
    """Returns whether a dtype is a float narrower than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def widened(dtype: Any) -> np.dtype:
    """Returns float32 for a narrower float, and any other dtype as it is."""
    return np.dtype(jnp.float32 if is_narrow(dtype) else dtype)


def evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], views: Views, multiply: Multiply, used: set[int]
) -> tuple[list[Any], Views]:
    """Evaluates a jaxpr, and lets `multiply` compute the products with weights that are found in it.

    Args:
        jaxpr: the jaxpr.
        consts: its constants.
        inputs: its inputs.
        views: for each input, how it is a view of a weight, or `None`.
        multiply: the function that may compute products.
        used: a set to which the numbers of the weights are added that an operation reads other than to make a view, or
            in a product that `multiply` computes.

    Returns:
        The outputs, and, for each output, how it is a view of a weight, or `None`. A view of a weight with a slot has a
        slot too.
    """
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    known: dict[Any, View | None] = dict(zip(jaxpr.invars, views, strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else values[v]

    def view(v: Any) -> View | None:
        return None if isinstance(v, Literal) else known.get(v)

    for eqn in jaxpr.eqns:
        name, own = eqn.primitive.name, [view(v) for v in eqn.invars]
        read = [value(v) for v in eqn.invars]
        found: Any = None
        if name == "dot_general":
            found, own = _product(eqn, read, own, multiply), []
        elif name in _NESTED and any(one is not None for one in own):
            inner = eqn.params["jaxpr"]
            found, own = evaluate(inner.jaxpr, inner.consts, read, own, multiply, used)
        if found is None:
            if name not in _VIEWS:
                used.update(one.number for v in eqn.invars if (one := view(v)) is not None)
            variables = list(dict.fromkeys(v for v in eqn.invars if isinstance(v, Var)))
            alone = jaxpr.replace(constvars=[], invars=variables, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
            found = eval_jaxpr(alone, [], *(values_of(value(v)) for v in variables))
            own = [_through(eqn, own[0])] if name in _VIEWS else []
            if name in _VIEWS and isinstance(read[0], SlottedWeight):
                found = [SlottedWeight(found[0], _slot_through(eqn, read[0].slot))]
        values.update(zip(eqn.outvars, found, strict=True))
        known.update(zip(eqn.outvars, own, strict=False))
    return [value(v) for v in jaxpr.outvars], [view(v) for v in jaxpr.outvars]


def _product(eqn: Any, read: Sequence[Any], views: Views, multiply: Multiply) -> list[jax.Array] | None:
    """Returns a product that `multiply` computed, in a list. Returns `None` if the equation is not a product with a
    weight, or if `multiply` leaves it to the jaxpr."""
    (contracted, batch), out = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    if (views[0] is None) == (views[1] is None) or any(batch):
        return None
    if (
        any(values_of(a).dtype != out.dtype for a in read)
        or not jnp.issubdtype(out.dtype, jnp.floating)
        or out.dtype.itemsize < 2
    ):
        return None
    at = 0 if views[1] is None else 1  # the weight's side
    (x, w), (of_x, of_w) = ([pair[1 - at], pair[at]] for pair in (read, contracted))
    if not of_x:  # an outer product
        return None
    rows, cols = ([d for d in range(values_of(a).ndim) if d not in dims] for a, dims in ((x, of_x), (w, of_w)))
    shapes = [x.shape[d] for d in rows], [values_of(w).shape[d] for d in cols]
    features = math.prod(x.shape[d] for d in of_x)

    def in_matrices(times: Times, x: jax.Array, w: Array) -> jax.Array:
        x = jnp.reshape(jnp.transpose(x, (*rows, *of_x)), (*shapes[0], features))
        to_matrix = lambda a: jnp.reshape(jnp.transpose(a, (*cols, *of_w)), (math.prod(shapes[1]), features))  # noqa: E731
        if isinstance(w, SlottedWeight):
            w = SlottedWeight(to_matrix(values_of(w)), on_slot(to_matrix, w.slot, values_of(w).ndim))
        else:
            w = to_matrix(w)
        y = jnp.reshape(times(x, w), (*shapes[0], *shapes[1]))
        return y if at else jnp.moveaxis(y, range(len(rows)), range(-len(rows), 0))

    seen = views[at]
    assert seen is not None
    factor = Factor(seen.number, _joined(seen, of_w), _joined(seen, cols), eqn.params["precision"])
    y = multiply(factor, in_matrices, x, w)
    return None if y is None else [y]


def _whole(weight: Var) -> tuple[Runs, ...]:
    """Returns the runs of a whole weight, one for each dimension."""
    shape = weight.aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(((math.prod(shape[dim + 1 :]), size),) for dim, size in enumerate(shape))


def _through(eqn: Any, view: View | None) -> View | None:
    """Returns the view that an operation of `_VIEWS` makes of its operand; `None` if the operand is not a view."""
    if view is None or view.dims is None:
        return view
    if eqn.primitive.name == "transpose":
        return View(view.number, tuple(view.dims[dim] for dim in eqn.params["permutation"]))
    return View(view.number, _reshaped(view.dims, eqn.outvars[0].aval.shape))


def _slot_through(eqn: Any, slot: jax.Array) -> jax.Array:
    """Returns the slot of the result of an operation of `_VIEWS`, given the slot of the operand."""
    if eqn.primitive.name == "convert_element_type":
        return slot
    return on_slot(lambda a: eqn.primitive.bind(a, **eqn.params), slot, eqn.invars[0].aval.ndim)


def on_slot(function: Callable[[jax.Array], jax.Array], slot: jax.Array, ndim: int) -> jax.Array:
    """Applies a function to the slot of a view of `ndim` dimensions, and returns the result. If the slot has one more
    dimension, its first dimension is that of ranks, and the function is applied to the slot of each rank."""
    return jax.vmap(function)(slot) if slot.ndim > ndim else function(slot)


def _reshaped(dims: tuple[Runs, ...], shape: Sequence[int]) -> tuple[Runs, ...] | None:
    """Returns the runs of each dimension after a reshape to `shape`; `None` if a dimension would divide a run
    unevenly."""
    rest = [run for dim in dims for run in dim if run[1] != 1]
    found = []
    for size in shape:
        own: list[tuple[int, int]] = []
        while size > 1:
            stride, count = rest.pop(0)
            taken = math.gcd(size, count)
            if taken not in (size, count):
                return None
            own.append((stride * (count // taken), taken))
            if taken < count:
                rest.insert(0, (stride, count // taken))
            size //= taken
        found.append(tuple(own))
    return tuple(found)


def _joined(view: View, dims: Sequence[int]) -> Runs | None:
    """Returns the runs of some dimensions of a view, with contiguous runs joined; `None` if the view's runs are
    unknown."""
    if view.dims is None:
        return None
    found: list[tuple[int, int]] = []
    for stride, size in (run for dim in dims for run in view.dims[dim] if run[1] != 1):
        if found and found[-1][0] == stride * size:
            found[-1] = (stride, found[-1][1] * size)
        else:
            found.append((stride, size))
    return tuple(found)
