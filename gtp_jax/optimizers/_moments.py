"""Finds the moments in the state of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax
import optax.contrib

from ..mesh import Path, of_parameter, with_paths
from ._codes import Kind

Tree = Any

# Arrays of fewer elements, and of one dimension, stay in float32 if others become codes.
LEAST_CODED = 4096

# The moments of Optax's transformations. Those that are missing keep something else in float32 arrays, such as weights
# or sums, or subtract moments from each other, as a centered RMSProp does.
_KINDS: Mapping[type, Mapping[str, Kind]] = {
    optax.ScaleByAdamState: {"mu": Kind.MEAN, "nu": Kind.SQUARES},
    optax.ScaleByAmsgradState: {"mu": Kind.MEAN, "nu": Kind.SQUARES, "nu_max": Kind.SQUARES},
    optax.ScaleByBeliefState: {"mu": Kind.MEAN, "nu": Kind.SQUARES},
    optax.ScaleByLionState: {"mu": Kind.MEAN},
    optax.ScaleByRmsState: {"nu": Kind.SQUARES},
    optax.TraceState: {"trace": Kind.MEAN},
    optax.contrib.MuonState: {"mu": Kind.MEAN},
}


def moments_of(state: Tree, params: Tree) -> set[Path]:
    """Returns the paths of the moments: floats that belong to a parameter and have its shape.

    Raises:
        TypeError: if one is of another dtype than float32.
    """
    parameters = {path: param.shape for path, param in with_paths(params)}
    found = set()
    for path, leaf in with_paths(state):
        if of_parameter(path, parameters) == leaf.shape and jnp.issubdtype(leaf.dtype, jnp.floating):
            if leaf.dtype != jnp.float32:
                raise TypeError(
                    f"the optimizer's state at {'.'.join(path)!r} is {leaf.dtype}; `low_precision` rounds only float32 "
                    "moments. Use float32 parameters and no `mu_dtype`, or, for bfloat16 parameters, "
                    "`stochastic_rounding(low_precision(optimizer))`."
                )
            found.add(path)
    return found


def coded_moments(state: Tree, params: Tree) -> dict[Path, Kind]:
    """Returns the moments that become codes, by path: those of two dimensions and `LEAST_CODED` elements or more.

    Raises:
        TypeError: if a moment is of another dtype than float32.
        ValueError: if it is not known what an array of a parameter's shape is.
    """
    shapes, kinds = dict(with_paths(state)), _kinds(state)
    found = {}
    for path in sorted(moments_of(state, params)):
        if shapes[path].ndim < 2 or shapes[path].size < LEAST_CODED:
            continue
        if (kind := kinds.get(path)) is None:
            raise ValueError(
                f'`moments` is "float8", but the optimizer\'s state at {".".join(path)!r} is not known to be a mean of '
                "gradients or of their squares. Known are those of Adam (also AdamW, AMSGrad, AdaBelief, Yogi), Lion, "
                "RMSProp without bias correction, SGD with momentum, and Muon. Put "
                '`low_precision(..., moments="float8")` around only these, or use `moments="bfloat16"`.'
            )
        found[path] = kind
    return found


def _kinds(state: Tree) -> dict[Path, Kind]:
    found = {}
    for path, node in with_paths(state, is_leaf=lambda node: type(node) in _KINDS):
        for name, kind in _KINDS.get(type(node), {}).items():
            found |= {(*path, name, *own): kind for own, _ in with_paths(getattr(node, name))}
    return found
