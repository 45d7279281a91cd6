"""Determines from jaxprs whether an optimizer can update padded arrays as it would update the logical arrays.

An array that the mesh cannot divide evenly is stored padded (`even_shares`). The logical array is the same array
without its padding.

[Note: optimizers on padding] Outside the padding, an elementwise update of a padded array is correct, whatever the
padding holds. A sum over a whole array is correct if the padding is zero. An optimizer is given the logical arrays if
it does anything else with a padded array. Examples are a mean, which divides by the number of elements, a factored
moment, a matrix product, and a random number per element.

To decide this, the update is traced once for the padded and once for the logical shapes, and the two jaxprs are
compared operation by operation. They must have the same operations. Each value then either has the same shape in both,
or is an array with padding in the first. Its padding is zero (`Kind.ZERO`) or unknown (`Kind.ANY`). Unknown padding of
a result is set to zero after the update, so the padding of parameters and of the optimizer's state is always zero.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax

from ..nn import ModelDef
from ._layers_as_one import traced_update
from ._padding import Paddings
from ._per_layer import NotPerLayer
from ._terms import CALLS, COPIES, ELEMENTWISE, called_jaxpr

Tree = Any


class Kind(enum.IntEnum):
    """The contents of the padding of a value."""

    NONE = 0  # the value has no padding: its shape is the same in both jaxprs
    ZERO = 1  # only zeros
    ANY = 2  # possibly other values, also Inf and NaN


class ReadsPadding(Exception):
    """Raised if an update of padded arrays may give other results, outside the padding, than an update of the logical
    arrays."""


def left_in_padding(
    optimizer: optax.GradientTransformation, model_def: ModelDef, paddings: Paddings, like: Tree
) -> tuple[bool, ...] | None:
    """Determines how an optimizer must be called for padded parameters.

    Args:
        optimizer: any optax optimizer.
        model_def: the definition of the model.
        paddings: how its parameters are padded.
        like: the stored parameters, their gradients, or the shapes of either.

    Returns:
        `None` if the optimizer must be given the logical arrays, if its update cannot be traced, or if no parameter is
        padded. Otherwise the optimizer can update the padded arrays. The tuple then says, for each leaf of
        `(updates, new state)`, whether the update may leave values other than zero in the padding.

    Raises:
        NotPerLayer: if a `per_layer` in the optimizer raises it.
    """
    if not paddings.known:
        return None
    leaves, structure = jax.tree.flatten(like)
    return _found(optimizer, model_def, paddings, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))


@functools.lru_cache(maxsize=8)
def _found(
    optimizer: optax.GradientTransformation, model_def: ModelDef, paddings: Paddings, structure: Any, forms: tuple
) -> tuple[bool, ...] | None:
    stored = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*form) for form in forms])
    logical = paddings.shapes(stored)
    try:
        one, given, _ = traced_update(optimizer, stored, model_def.layer_counts, examined=False)
        other, again, _ = traced_update(optimizer, logical, model_def.layer_counts, examined=False)
        pairs = zip(jax.tree.leaves(given), jax.tree.leaves(again), strict=True)
        kinds = kinds_of(one, other, [Kind.NONE if a.shape == b.shape else Kind.ZERO for a, b in pairs])
    except NotPerLayer:
        raise
    except Exception:  # `ReadsPadding`, or any error of an optimizer of other authors
        return None
    return tuple(kind is Kind.ANY for kind in kinds)


_ZERO_OF_ZEROS = frozenset(
    "abs add add_any asin asinh atan atanh cbrt convert_element_type expm1 floor ceil log1p max min neg real "
    "reduce_precision round sign sin sinh sqrt square sub tan tanh".split()
)


def kinds_of(stored: Any, logical: Any, inputs: Sequence[Kind]) -> list[Kind]:
    """Returns what the padding of an update's results holds.

    Args:
        stored: the closed jaxpr of the update of padded arrays.
        logical: the closed jaxpr of the update of logical arrays.
        inputs: what the padding of each argument holds.

    Raises:
        ReadsPadding: if the results outside the padding may differ from those for logical arrays.
    """
    one, other = (getattr(closed, "jaxpr", closed) for closed in (stored, logical))
    pairs = zip(getattr(stored, "consts", ()), getattr(logical, "consts", ()), strict=True)
    if len(one.eqns) != len(other.eqns) or not all(same_constants(a, b) for a, b in pairs):
        raise ReadsPadding
    known = dict.fromkeys(one.constvars, Kind.NONE) | dict(zip(one.invars, inputs, strict=True))

    def kind_of(atom: Any) -> Kind:
        return Kind.NONE if isinstance(atom, jax.extend.core.Literal) else known[atom]

    for eqn, again in zip(one.eqns, other.eqns, strict=True):
        literals = [
            (a.val, b.val)
            for a, b in zip(eqn.invars, again.invars, strict=True)
            if isinstance(a, jax.extend.core.Literal) and isinstance(b, jax.extend.core.Literal)
        ]
        if eqn.primitive is not again.primitive or not all(same_constants(a, b) for a, b in literals):
            raise ReadsPadding
        kinds = _kinds_of_results(eqn, again, [kind_of(atom) for atom in eqn.invars])
        known |= dict(zip(eqn.outvars, kinds, strict=True))
    return [kind_of(atom) for atom in one.outvars]


def _kinds_of_results(eqn: Any, again: Any, args: list[Kind]) -> list[Kind]:
    name = eqn.primitive.name
    if name in CALLS:
        return kinds_of(called_jaxpr(eqn), called_jaxpr(again), args)
    if name == "cond" and args[0] is Kind.NONE:
        branches = zip(eqn.params["branches"], again.params["branches"], strict=True)
        each = [kinds_of(one, other, args[1:]) for one, other in branches]
        return [max(kinds) for kinds in zip(*each, strict=True)]
    shapes = [(a.aval.shape, b.aval.shape) for a, b in zip(eqn.outvars, again.outvars, strict=True)]
    alike = all(a == b for a, b in shapes)
    if (name in ELEMENTWISE or alike) and str(eqn.params) != str(again.params):
        raise ReadsPadding  # for example, an exponent that is the number of rows
    if alike:
        if not any(args):
            return [Kind.NONE] * len(shapes)
        if name == "reduce_sum" and shapes == [((), ())] and args == [Kind.ZERO]:
            return [Kind.NONE]
        raise ReadsPadding
    if len(shapes) > 1:
        raise ReadsPadding
    scalars = [atom.aval.shape == () for atom in eqn.invars]
    if name == "broadcast_in_dim" and scalars == [True]:
        return [Kind.ZERO if _is_zero(eqn.invars[0]) else Kind.ANY]
    if name in COPIES:
        return args
    fits = all(kind is not Kind.NONE or scalar for kind, scalar in zip(args, scalars, strict=True)) and all(
        atom.aval.shape in ((), shapes[0][0]) for atom in eqn.invars
    )
    if name not in ELEMENTWISE or not fits:
        raise ReadsPadding
    zeros = [kind is Kind.ZERO or _is_zero(atom) for kind, atom in zip(args, eqn.invars, strict=True)]
    return [Kind.ZERO if _is_zero_of(eqn, zeros, args) else Kind.ANY]


def _is_zero_of(eqn: Any, zeros: list[bool], args: list[Kind]) -> bool:
    """Returns whether the result of an elementwise operation is known to be zero in the padding.

    A scalar factor or divisor counts as finite and not zero. Otherwise the logical array is not finite either.

    Args:
        eqn: the operation.
        zeros: for each argument, whether it is known to be zero in the padding.
        args: for each argument, what its padding holds.
    """
    name = eqn.primitive.name
    if name == "mul":  # in unknown padding the other factor may be Inf or NaN, whose product with zero is NaN
        return any(zeros) and Kind.ANY not in args
    if name == "div":
        return zeros[0] and args[1] is Kind.NONE
    if name == "integer_pow":
        return all(zeros) and eqn.params["y"] > 0
    if name == "select_n":
        return all(zeros[1:])
    return name in _ZERO_OF_ZEROS and all(zeros)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jax.extend.core.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def same_constants(one: Any, other: Any) -> bool:
    if jnp.issubdtype(getattr(one, "dtype", np.float32), jax.dtypes.prng_key):
        return one is other
    return np.shape(one) == np.shape(other) and np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False)
