"""Splits the jaxpr of a call into the casts of weights, the computation that reads only weights, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal, Var


class Parts(NamedTuple):
    """The jaxpr of a call in parts.

    Attributes:
        casts: for each weight, the narrower float dtype to which the call casts it, if that cast is the only use of the
            weight and is outside of nested functions. The weight is then gathered or decoded in this dtype, and
            `before` does not contain the cast. Otherwise `None`.
        before: the jaxpr of the operations that compute values from weights alone, except those with side effects. Its
            inputs are the weights, cast as in `casts`; its outputs are the values that `after` or the result of the
            call needs.
        after: the jaxpr of the rest of the call. Its inputs are the outputs of `before`, then the call's inputs other
            than weights.
    """

    casts: tuple[np.dtype | None, ...]
    before: Jaxpr
    after: Jaxpr


def in_parts(jaxpr: Jaxpr, weights: int) -> Parts:
    """Splits the jaxpr of a call into parts.

    Args:
        jaxpr: the jaxpr, whose first inputs are the weights.
        weights: the number of weights.
    """
    own, rest = jaxpr.invars[:weights], jaxpr.invars[weights:]
    casts = {v: eqn for v in own if (eqn := _only_cast(v, jaxpr)) is not None}
    dropped = {id(eqn) for eqn in casts.values()}
    inputs = [casts[v].outvars[0] if v in casts else v for v in own]
    of_weights, before, after = set(inputs), [], []
    for eqn in jaxpr.eqns:
        if id(eqn) in dropped:
            continue
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        alone = bool(read) and not eqn.effects and all(v in of_weights for v in read)
        (before if alone else after).append(eqn)
        of_weights.update(eqn.outvars if alone else ())
    wanted = {v for eqn in after for v in eqn.invars if not isinstance(v, Literal)}
    wanted |= {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    made = dict.fromkeys([*inputs, *(v for eqn in before for v in eqn.outvars)])
    between = [v for v in made if v in wanted]
    return Parts(
        tuple(_dtype_of(casts[v].outvars[0]) if v in casts else None for v in own),
        jaxpr.replace(constvars=[], invars=inputs, outvars=between, eqns=before),
        jaxpr.replace(invars=[*between, *rest], eqns=after),
    )


def cast(weights: Sequence[Any], casts: Sequence[np.dtype | None]) -> list[jax.Array]:
    """Returns each weight, cast to its dtype in `casts`; a weight with `None` there stays as it is."""
    return [w if dtype is None else w.astype(dtype) for w, dtype in zip(weights, casts, strict=True)]


def _only_cast(weight: Var, jaxpr: Jaxpr) -> Any:
    """Returns the equation that casts a weight to a narrower float dtype, if the weight has no other use; otherwise
    `None`."""
    readers = [eqn for eqn in jaxpr.eqns if any(v is weight for v in eqn.invars)]
    if len(readers) != 1 or any(v is weight for v in jaxpr.outvars):
        return None
    (eqn,) = readers
    if eqn.primitive.name != "convert_element_type":
        return None
    kind = _dtype_of(eqn.outvars[0])
    narrower = jnp.issubdtype(kind, jnp.floating) and kind.itemsize < _dtype_of(weight).itemsize
    return eqn if narrower else None


def _dtype_of(variable: Var) -> np.dtype:
    return np.dtype(variable.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
