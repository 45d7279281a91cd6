"""Decides how weights are partitioned: as `specs` or the model's annotations say, or over the axes that divide them."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_pspec
from jax.sharding import NamedSharding, PartitionSpec

from ..layout import Placement, place, placed, shares_may_be_even
from ..mesh import Roles, axes_by_dim, axes_of, degree, degrees, spec_by_dim
from ._choice import matches, name_of
from ._variables import Paths, size_of

# A value of `specs`: the partition in which weights are stored; `None` to leave them whole, or as the model annotates
# them.
Spec = PartitionSpec | tuple[Any, ...] | None

_LARGE = 1 << 20  # elements; a warning is issued if a weight of at least this size has too few shards


def first_match(specs: Iterable[str], paths: Paths) -> str | None:
    """Returns the first pattern that matches any of these paths; `None` if no pattern does."""
    return next((pattern for pattern in specs if any(matches(pattern, path) for path in paths)), None)


def check_patterns(
    specs: Mapping[str, Spec],
    variables: Mapping[Paths, nnx.Variable],
    weights: Collection[Paths],
    min_size: int,
    own: Collection[int],
) -> None:
    """Raises an error if a pattern with a partition matches no weight to shard, or if a pattern with `None` matches no
    variable.

    Args:
        specs: the argument `specs` of `shard`.
        variables: the variables of the model.
        weights: the paths of the weights to shard.
        min_size: the argument `min_size` of `shard`.
        own: the `id`s of the variables within gtp_jax's own layers.
    """
    for pattern, spec in specs.items():
        allowed = variables if spec is None else weights
        if not any(first_match([pattern], paths) for paths in allowed):
            found = next((paths for paths in variables if first_match([pattern], paths)), None)
            if found is not None:
                variable = variables[found]
                why = _why_whole(variable, min_size, own=id(variable) in own)
                matched = name_of(next(path for path in found if matches(pattern, path)))
                raise ValueError(
                    f"`specs` has the pattern {pattern!r}, which matches {matched}. That is not a weight to shard: "
                    f"{why}"
                )
            names = [name_of(path) for paths in allowed for path in paths]
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            kind = "variables" if spec is None else "weights to shard"
            raise ValueError(
                f"`specs` has the pattern {pattern!r}, which matches none of the model's {kind}; the nearest are "
                f"{', '.join(near)}."
            )


def _why_whole(variable: nnx.Variable, min_size: int, *, own: bool) -> str:
    if own or "layout" in variable.get_metadata():
        return (
            "it is a `gtp_jax.Param`, or belongs to one of gtp_jax's own layers, which partition their own weights. "
            "Leave the pattern out."
        )
    size = size_of(variable.get_raw_value()) if isinstance(variable, nnx.Param) else 0
    if 0 < size < min_size:
        return (
            f"it has {size} elements, fewer than `min_size`, {min_size}. Pass a smaller `min_size`, or leave the "
            "pattern out."
        )
    return (
        "it is not a floating-point `nnx.Param` of at least one element. Name such a parameter, or leave the pattern "
        "out."
    )


def placement_by(
    paths: Paths, variable: nnx.Variable, specs: Mapping[str, Spec], roles: Roles, *, of_layers: bool
) -> Placement | None:
    """Returns the placement of a weight. Returns `None` for a scalar, for a weight with the value `None` in `specs`,
    and for one whose partition in `specs` has no axes of more than one rank. With `of_layers`, the first dimension may
    be that of layers, see `place`.

    Raises:
        ValueError: for the same reasons as `_checked_spec`.
    """
    shape = variable.get_raw_value().shape
    gathered = {*roles.weights, *roles.over_optimizer, *roles.batch}
    pattern = first_match(specs, paths)
    named = annotation(variable) if pattern is None else specs[pattern]
    if pattern is not None and named is None:
        return None
    spec = _checked_spec(paths[0], shape, named, "its `out_sharding`" if pattern is None else f"`specs[{pattern!r}]`")
    used = spec_by_dim([[axis for axis in axes if axis not in gathered] for axes in axes_by_dim(spec)])
    if pattern is None and not axes_of(spec) & gathered:
        return place(shape, roles, used, can_pad=_can_pad(variable), of_layers=of_layers)
    return placed(spec, used, shape) if axes_of(spec) else None


def warn_of_whole(placements: Mapping[Paths, Placement | None], variables: Any, specs: Any, roles: Roles) -> None:
    """Warns about each large weight that is not divided over all axes of the role `weights`, unless a pattern of
    `specs` matches it."""
    names = jax.sharding.get_abstract_mesh().axis_names
    all_axes = tuple(axis for axis in (*roles.over_optimizer, *roles.weights) if axis in names and degree(axis) > 1)
    ranks = degrees(tuple(axis for axis in all_axes if axis in roles.weights))
    for paths, placement in placements.items():
        shape, asked = variables[paths].get_raw_value().shape, first_match(specs, paths)
        sizes = {} if placement is None else dict((placement.even or placement).degrees)
        divided = math.prod(size for axis, size in sizes.items() if axis in roles.weights)
        if divided < ranks and math.prod(shape) >= _LARGE and not asked:
            over = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            parts = f"is divided over {over} only" if over else "stays whole on every rank"
            pad = "" if shares_may_be_even() else "leave out `gtp_jax.layout.even_shares(False)`, "
            warnings.warn(
                f"a weight of shape {shape} {parts}: {name_of(paths[0])}. {degrees(all_axes)} ranks of "
                f"{' x '.join(all_axes)} divide none of its dimensions, or the model annotates another partition. "
                f"Choose sizes that these ranks divide, {pad}or name a partition in `specs` (the present one, if it is "
                "intended).",
                stacklevel=3,
            )


def _can_pad(variable: nnx.Variable) -> bool:
    """Returns whether a parameter may be stored padded, as a `PaddedParam`. A parameter of a subclass of `nnx.Param`
    may not, because it would lose the methods of its class. `PaddedParam` does not support the metadata below."""
    metadata = variable.get_metadata()
    special = any(metadata.get(name) for name in ("on_create_value", "on_get_value", "hijax", "ref", "linen_meta_type"))
    return type(variable) is nnx.Param and not special


def annotation(variable: nnx.Variable) -> Any:
    """Returns the partition in a variable's metadata (`out_sharding`), with logical names replaced as Flax's rules say;
    `None` if there is none."""
    metadata = variable.get_metadata()
    named = metadata.get("out_sharding")
    spec = None if named is None else get_pspec(named, metadata.get("sharding_rules"))
    return spec.spec if isinstance(spec, NamedSharding) else spec


def _checked_spec(path: Any, shape: tuple[int, ...], named: Any, where: str) -> PartitionSpec:
    """Checks a partition that the user or the model's author has named, and returns it without axes of size 1.

    Raises:
        ValueError: if the partition has more dimensions than the weight, names an axis of several ranks twice, names an
            axis that the mesh lacks, or does not divide the weight evenly.
    """
    entries = () if named is None else tuple(named)
    names = jax.sharding.get_abstract_mesh().axis_names
    axes = [() if e is None else tuple(e) if isinstance(e, tuple) else (e,) for e in entries]
    unknown = [axis for entry in axes for axis in entry if axis not in names]
    if unknown or len(entries) > len(shape):
        raise ValueError(
            f"the weight {name_of(path)} of shape {shape} is to be partitioned as {entries} by {where}. That does not "
            f"fit the shape, or the mesh in scope, which has the axes {names}. In `specs`, give each dimension an axis "
            "of the mesh, a tuple of axes, or `None`. If the model has names of its own, map them to axes with "
            "`nnx.logical_axis_rules`, or make a mesh with axes of these names and pass `roles`."
        )
    axes = [tuple(axis for axis in entry if degree(axis) > 1) for entry in axes]
    used = [axis for entry in axes for axis in entry]
    if len(set(used)) < len(used):
        raise ValueError(
            f"the weight {name_of(path)} of shape {shape} is to be partitioned as {entries} by {where}, which names an "
            "axis twice. Choose another partition with `specs`."
        )
    for dim, entry in enumerate(axes):
        if shape[dim] % degrees(entry):
            raise ValueError(
                f"the weight {name_of(path)} of shape {shape} is to be partitioned as {entries} by {where}, but "
                f"{degrees(entry)} ranks of {' x '.join(entry)} do not divide dimension {dim}. Choose another "
                "partition with `specs`."
            )
    return spec_by_dim(axes)
