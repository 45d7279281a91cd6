"""Determines whether an optimizer's update of padded arrays is that of the logical arrays, from its jaxprs.

[Note: optimizers on padding] An elementwise update of a padded array is right outside the padding, whatever the
padding holds. A sum over a whole array is right if the padding is zero. An optimizer that does anything else with a
padded array (a mean, whose divisor is the number of elements; a factor, a product, a random number per element) is
given the logical arrays instead. The update is traced for both shapes. Where the two jaxprs compute the same, each
value either has the same shape in both, or is an array with padding, which may be known to be zero. Padding that is not
known to be zero is set to zero after the update, so that the padding of parameters and of the optimizer's state is
always zero.
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
from ._terms import CALLS, ELEMENTWISE

Tree = Any


class Kind(enum.IntEnum):
    """The contents of the padding of a value."""

    NONE = 0  # nothing: the value has the same shape without padding
    ZERO = 1
    ANY = 2


class ReadsPadding(Exception):
    """Raised if an update may depend on the padding."""


def left_in_padding(
    optimizer: optax.GradientTransformation, model_def: ModelDef, paddings: Paddings, like: Tree
) -> tuple[bool, ...] | None:
    """Returns, for each leaf of `(updates, new state)`, whether an optimizer that updates padded arrays may leave
    values other than zero in the padding; `None` if it must be given the logical arrays, or nothing is padded.

    Args:
        optimizer: any optax optimizer.
        model_def: the definition of the model.
        paddings: how its parameters are padded.
        like: the stored parameters, their gradients, or the shapes of either.
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
        one, given, _ = traced_update(optimizer, stored, model_def.layer_counts)
        other, again, _ = traced_update(optimizer, logical, model_def.layer_counts)
        pairs = zip(jax.tree.leaves(given), jax.tree.leaves(again), strict=True)
        kinds = kinds_of(one, other, [Kind.NONE if a.shape == b.shape else Kind.ZERO for a, b in pairs])
    except NotPerLayer:
        raise
    except Exception:  # any error: the optimizer is code that others wrote, and raises its errors in the step
        return None
    return tuple(kind is Kind.ANY for kind in kinds)


_SAME = ("copy", "copy_p", "stop_gradient", "pvary")
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
        ReadsPadding: if the results outside the padding may differ from those of logical arrays.
    """
    one, other = (getattr(closed, "jaxpr", closed) for closed in (stored, logical))
    pairs = zip(getattr(stored, "consts", ()), getattr(logical, "consts", ()), strict=True)
    if len(one.eqns) != len(other.eqns) or not all(_same_constants(a, b) for a, b in pairs):
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
        if eqn.primitive is not again.primitive or not all(_same_constants(a, b) for a, b in literals):
            raise ReadsPadding
        kinds = _kinds_of_results(eqn, again, [kind_of(atom) for atom in eqn.invars])
        known |= dict(zip(eqn.outvars, kinds, strict=True))
    return [kind_of(atom) for atom in one.outvars]


def _kinds_of_results(eqn: Any, again: Any, args: list[Kind]) -> list[Kind]:
    name = eqn.primitive.name
    if name in CALLS:
        inner = next(key for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params)
        return kinds_of(eqn.params[inner], again.params[inner], args)
    if name == "cond" and args[0] is Kind.NONE:
        branches = zip(eqn.params["branches"], again.params["branches"], strict=True)
        each = [kinds_of(one, other, args[1:]) for one, other in branches]
        return [max(kinds) for kinds in zip(*each, strict=True)]
    shapes = [(a.aval.shape, b.aval.shape) for a, b in zip(eqn.outvars, again.outvars, strict=True)]
    alike = all(a == b for a, b in shapes)
    if (name in ELEMENTWISE or alike) and str(eqn.params) != str(again.params):
        raise ReadsPadding  # such as a power that is the number of rows
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
    if name in _SAME:
        return args
    fits = all(kind is not Kind.NONE or scalar for kind, scalar in zip(args, scalars, strict=True)) and all(
        atom.aval.shape in ((), shapes[0][0]) for atom in eqn.invars
    )
    if name not in ELEMENTWISE or not fits:
        raise ReadsPadding
    zeros = [kind is Kind.ZERO or _is_zero(atom) for kind, atom in zip(args, eqn.invars, strict=True)]
    return [Kind.ZERO if _is_zero_of(eqn, zeros, args) else Kind.ANY]


def _is_zero_of(eqn: Any, zeros: list[bool], args: list[Kind]) -> bool:
    """Returns whether the result of an elementwise operation is zero wherever the arguments marked in `zeros` are."""
    name = eqn.primitive.name
    if name == "mul":
        return any(zeros)
    if name == "div":
        return zeros[0] and args[1] is Kind.NONE
    if name == "integer_pow":
        return all(zeros) and eqn.params["y"] > 0
    if name == "select_n":
        return all(zeros[1:])
    return name in _ZERO_OF_ZEROS and all(zeros)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, jax.extend.core.Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)


def _same_constants(one: Any, other: Any) -> bool:
    if jnp.issubdtype(getattr(one, "dtype", np.float32), jax.dtypes.prng_key):
        return one is other
    return np.shape(one) == np.shape(other) and np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False)
