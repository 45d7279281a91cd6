"""Keeps the moments of an optimizer in bfloat16 or FP8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import unflatten_dict
from jax import lax

from .._words import MOMENTS, Moments
from ..mesh import Path, with_paths
from ..train import is_examined
from ._codes import Codes, Kind, decoded, encoded
from ._moments import coded_moments, moments_of
from ._rounding import rounded, step_key

Tree = Any


class LowPrecisionState(NamedTuple):
    """The state of `low_precision`.

    Attributes:
        step: the number of updates made, int32.
        inner_state: the state of the wrapped optimizer, with moments in bfloat16, or as FP8 codes.
        scales: for each moment that is codes, the binary logarithm of the scale of each 16 elements along the last
            dimension, int8: a nested dict by the keys of the moment's path in `inner_state`. Empty for bfloat16.
    """

    step: jax.Array
    inner_state: Any
    scales: Any


def low_precision(
    optimizer: optax.GradientTransformation, *, moments: Moments = "bfloat16", seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer, so that its moments take a half or a quarter of the memory.

    Moments are the float32 arrays of the optimizer's state that belong to a parameter and have its shape. They are
    converted to float32 before an update, and rounded stochastically after it. Rounding to nearest would stop a second
    moment: with `b2=0.999` a step changes it by up to 0.1 %, and neighboring bfloat16 numbers differ by 0.4 % or more.

    In FP8, a moment is e4m3 codes and a scale for each 16 elements: 1.06 bytes. A mean of squares is
    stored as its square root, and never rounded to 0, so that updates stay bounded. Inf becomes NaN. Arrays of one
    dimension, or of fewer than 4096 elements (all layers of a `Stack` together), stay in float32. The update has no
    collective if shards have a multiple of 16 elements in the last dimension. Ranks that share a block exchange its
    largest number if they have 8, 4, 2 or 1 of its elements, and otherwise XLA gathers parts of the moment in float32;
    the results are the same.

    Args:
        optimizer: any optax optimizer. For FP8, one whose state is known: Adam, AdamW, AMSGrad, AdaBelief, Yogi, Lion,
            RMSProp, SGD and Muon, also in chains, with masks and labels, schedules and `per_layer`.
        moments: the format of stored moments, "bfloat16" or "float8".
        seed: the seed of stochastic rounding.

    Raises:
        ValueError: if `moments` is another word; by `init`, if it is "float8" and a float32 array of a parameter's
            shape is not known to be a moment; or, by `update`, if it is called without the parameters, or with a state
            for other `moments`.
        TypeError: by `init`, if a moment is a float of another dtype.
    """
    if moments not in MOMENTS:
        raise ValueError(f"`moments` is {moments!r}; it must be one of {', '.join(map(repr, MOMENTS))}.")
    inner = optax.with_extra_args_support(optimizer)

    def encode(state: Tree, params: Tree, count: jax.Array) -> LowPrecisionState:
        key = step_key(seed, count)
        if moments == "bfloat16":
            found = moments_of(state, params)
            leaves = [rounded(leaf, key, path) if path in found else leaf for path, leaf in with_paths(state)]
            return LowPrecisionState(count, jax.tree.unflatten(jax.tree.structure(state), leaves), {})
        kinds = _kinds(state, params)
        found = {path: encoded(leaf, kinds[path], key, path) for path, leaf in with_paths(state) if path in kinds}
        leaves = [found[path].codes if path in found else leaf for path, leaf in with_paths(state)]
        scales = unflatten_dict({path: one.scales for path, one in found.items()})
        return LowPrecisionState(count, jax.tree.unflatten(jax.tree.structure(state), leaves), scales)

    def decode(state: LowPrecisionState, params: Tree) -> Tree:
        shapes = jax.eval_shape(inner.init, params)
        kinds = {} if moments == "bfloat16" else _kinds(shapes, params)
        scales = dict(with_paths(state.scales))
        if scales.keys() != kinds.keys():
            raise ValueError(
                f"`moments` is {moments!r}, but `state` holds moments in another format. Pass the state that `init` of "
                "this optimizer made."
            )
        pairs = zip(with_paths(state.inner_state), jax.tree.leaves(shapes), strict=True)
        leaves = [
            decoded(Codes(leaf, scales[path]), kinds[path]) if path in kinds else leaf.astype(shape.dtype)
            for (path, leaf), shape in pairs
        ]
        return jax.tree.unflatten(jax.tree.structure(state.inner_state), leaves)

    def init(params: Tree) -> Any:
        # without the barrier, XLA computes the codes of constants, element by element, while it compiles
        state, count = lax.optimization_barrier((inner.init(params), jnp.zeros((), jnp.int32)))
        return encode(state, params, count)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ValueError(
                "`low_precision` needs the parameters to find the moments, but `params` is None. Call "
                "`update(gradients, state, params)`."
            )
        updates, own = inner.update(updates, decode(state, params), params, **extra)
        count: Any = optax.safe_increment(state.step)
        return updates, encode(own, params, count)

    return optax.GradientTransformationExtraArgs(init, update)


def _kinds(state: Tree, params: Tree) -> Mapping[Path, Kind]:
    """Returns the moments that become codes; none while an update is only examined, because encoding is not elementwise
    but never mixes layers."""
    return {} if is_examined() else coded_moments(state, params)
