"""Finds the parameters of a `Stack` whose layers an optimizer treats as one tensor.

A `Stack` stores one array per parameter for all its layers, with a leading dimension of layers. Such a parameter is
called stacked.

`per_layer` asks whether an update can be mapped over layers; this module asks whether that would change it, and only
warns: one tensor may be meant, and of a chain only its author knows which transformations must see all layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..mesh import Path, of_parameter, with_paths
from ..nn import ModelDef
from ._per_layer import NotPerLayer
from ._scope import arrays_in_scope
from ._terms import Terms, Value, input_values

Tree = Any


def warn_of_layers_as_one(optimizer: optax.GradientTransformation, model_def: ModelDef, params: Tree) -> None:
    """Warns if an optimizer treats the layers of a `Stack` as one tensor; see `layers_as_one`.

    Raises:
        NotPerLayer: if a `per_layer` in the optimizer raises it.
    """
    counts = model_def.layer_counts
    found = layers_as_one(optimizer, params, counts)
    if not found:
        return
    few = [f"{'.'.join(path)} ({counts[path]} layers)" for path in found[:3]]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    warnings.warn(
        f"the optimizer treats the layers of a `Stack` as one tensor: its updates of {', '.join(few)}{more} are not "
        "those of a list of layers with separate arrays. It may compute norms, factors or products of whole arrays, "
        "or read their number of dimensions. Pass `gtp_jax.train.per_layer(optimizer)` to update each layer "
        "separately. Within a chain put `per_layer` around the transformations that see one parameter at a time, not "
        "around clipping by a global norm. Nothing was changed; to keep one tensor, filter this warning.",
        stacklevel=3,
    )


def layers_as_one(optimizer: optax.GradientTransformation, params: Tree, counts: Mapping[Path, int]) -> list[Path]:
    """Returns the paths of the parameters whose layers an optimizer treats as one tensor, in the order of `counts`.

    Traces the update twice on abstract arrays: once with all layers of a stack in one array, and once with the arrays
    of a single layer. A stacked parameter is reported if the two traces compute different functions. It is also
    reported if the update of a single layer uses a reduction over the layer's array, or another operation on it that is
    not elementwise; see [Note: layers in a list and layers in one array]. Returns an empty list if no parameter is
    stacked, or if a trace fails.

    Args:
        optimizer: any optax optimizer.
        params: the parameters, or their shapes.
        counts: the number of layers of each parameter, by path; 0 outside a `Stack`.

    Raises:
        NotPerLayer: if a `per_layer` in the optimizer raises it.
    """
    stacked = {path for path, count in counts.items() if count}
    if not stacked:
        return []
    terms, own = Terms(stacked), {path: path for path in counts}
    try:
        whole = _outputs(terms, optimizer, params, counts)
        single = _outputs(terms, optimizer, params, counts, one_layer=True)
    except NotPerLayer:
        raise
    except Exception:  # an optimizer of other authors may raise any error
        return []
    found = set().union(*(value.as_one for value in single.values()))
    for path in whole.keys() | single.keys():
        values = [outputs[path] for outputs in (whole, single) if path in outputs]
        if len(values) == 1 or values[0].term != values[1].term:
            read = (path,) if of_parameter(path, own) else values[0].depends
            found |= stacked.intersection(own_path for one in read if (own_path := of_parameter(one, own)))
    return [path for path in counts if path in found]


def _outputs(
    terms: Terms, optimizer: optax.GradientTransformation, params: Tree, counts: Mapping[Path, int], *, one_layer=False
) -> dict[Path, Value]:
    """Returns the `Value` of each output of an update, by its path in `(updates, new state)`. Leaves out state that no
    later update reads.

    Args:
        terms: the reader of both traces.
        optimizer: any optax optimizer.
        params: the parameters, or their shapes.
        counts: the number of layers of each parameter, by path; 0 outside a `Stack`.
        one_layer: whether to trace the update of the arrays of one layer, instead of the stacked arrays.
    """
    known = dict.fromkeys(counts, 0) if one_layer else counts
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape[1:] if one_layer and counts[path] else leaf.shape, leaf.dtype)
        for path, leaf in with_paths(params)
    ]
    like = jax.tree.unflatten(jax.tree.structure(params), leaves)
    traced, given, out = traced_update(optimizer, like, known)
    ndims = {path: leaf.ndim for path, leaf in with_paths(like)}
    values = terms.of(traced, input_values(given, counts), ndims)
    return _used(dict(zip((path for path, _ in with_paths(out)), values, strict=True)))


def traced_update(
    optimizer: optax.GradientTransformation, like: Tree, counts: Mapping[Path, int], *, examined: bool = True
) -> tuple[Any, tuple[Any, ...], tuple[Tree, Tree]]:
    """Traces an update on abstract arrays.

    Args:
        optimizer: any optax optimizer.
        like: the shapes and dtypes of the parameters.
        counts: the number of layers of each parameter, by path; 0 outside a `Stack`.
        examined: whether a `per_layer` in the optimizer only checks its own update, and then returns the updates and
            the state that it got (see `arrays_in_scope`).

    Returns:
        The closed jaxpr; the shapes and dtypes of its arguments, `(gradients, state, parameters, loss)`; and the shapes
        and dtypes of its results, `(updates, new state)`.
    """
    update = optax.with_extra_args_support(optimizer).update

    def run(grads: Tree, state: Tree, params: Tree, value: Any) -> tuple[Tree, Tree]:
        return update(grads, state, params, value=value, grad=grads, value_fn=_any_loss)

    with arrays_in_scope(counts, examined=examined):
        state = jax.eval_shape(lambda params: optimizer.init(params), like)
        given = (like, state, like, jax.ShapeDtypeStruct((), jnp.float32))
        traced, out = jax.make_jaxpr(run, return_shape=True)(*given)
    return traced, given, out


def _used(outputs: dict[Path, Value]) -> dict[Path, Value]:
    """Returns the outputs that affect parameters: the updates, and the parts of the new state that a later update
    reads."""
    found = {path: value for path, value in outputs.items() if path[0] == "0"}
    while True:
        read = frozenset().union(*(value.depends for value in found.values()))
        # The state is item 1 both of the update's arguments and of its results, so a path means the same in both.
        more = {path: value for path, value in outputs.items() if path in read and path[0] == "1"}
        if more.keys() <= found.keys():
            return found
        found |= more


def _any_loss(params: Tree) -> jax.Array:
    return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(params)), jnp.zeros(())).astype(jnp.float32)
