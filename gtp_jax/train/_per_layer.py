"""Makes optimizers update each layer of a `Stack` as if its arrays were stored separately.

A `Stack` stores one array per parameter for all its layers, with a leading dimension of layers. Such a parameter is
called stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ..mesh import Path, of_parameter, with_paths
from ..nn import layer_counts
from ._scope import arrays_in_scope, counts_in_scope, is_examined, placed_of_one_layer
from ._terms import Terms, input_values

Tree = Any


class NotPerLayer(ValueError):
    """Raised if an optimizer's `init` or `update` cannot be mapped over layers."""


def per_layer(
    optimizer: optax.GradientTransformation, model: nnx.Module | None = None
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates every layer of a `Stack` as `optimizer` would in a list of layers.

    A `Stack` stores one array per parameter for all its layers. Adam's updates do not depend on that. Other optimizers
    treat the layers as one tensor: those that compute norms, factors or products of whole arrays (Muon, LAMB, LARS,
    Adafactor), and those that read an array's number of dimensions
    (`mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)`). `per_layer` maps such an optimizer over the
    layers with `jax.vmap`. It does not change how parameters outside stacks are updated. The state keeps the
    optimizer's structure. Arrays of a stacked parameter have a leading dimension of layers, and are sharded like the
    parameter if they have its shape; others are replicated. Step counts stay scalars.

        optimizer = optax.chain(optax.clip_by_global_norm(1.0), gtp_jax.train.per_layer(optax.contrib.muon(1e-3)))
        state = gtp_jax.TrainState.create(model, optimizer)
        step = gtp_jax.train_step(loss, optimizer)

    Args:
        optimizer: the optimizer to map. Functions in it that compute masks or labels get the arrays of one layer.
            Masks, labels and dimension numbers that are trees have one entry per parameter, as without `per_layer`.
            Its update does not get extra arguments that are functions, such as the `value_fn` of a line search.
        model: the model whose parameters `init` and `update` get. `TrainState.create` and `train_step` do not need it;
            pass it for `nnx.Optimizer`, or if you call `init` and `update` yourself.

    Raises:
        ValueError: by `init` and `update`, not by `per_layer` itself: if the model is not known; if an array is not one
            of its parameters, or does not have the parameter's number of layers; if the update or the state of a
            stacked parameter depends on random numbers; or if an update or a part of the state depends on a stacked
            parameter to which it does not belong (as a norm of all gradients does).
    """
    inner = optax.with_extra_args_support(optimizer)
    own = None if model is None else layer_counts(model)

    def init(params: Tree) -> Tree:
        counts = _counts(params, own)

        def one(params: Tree) -> tuple[tuple[()], Tree]:  # the form of `update`'s result, with no updates
            return (), inner.init(params)

        with arrays_in_scope(dict.fromkeys(counts, 0)):
            traced, like = jax.make_jaxpr(one, return_shape=True)(_of_one_layer(params, counts))
            _check_separable(traced, (params,), like, counts)
            return _mapped(one, (params,), like, counts)[1]

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        counts, examined = _counts(updates, own), is_examined()
        extra = {name: value for name, value in extra.items() if not callable(value)}  # drops `value_fn`
        given = (updates, state, params, extra)

        def one(updates: Tree, state: Tree, params: Tree, extra: Tree) -> tuple[Tree, Tree]:
            return inner.update(updates, state, params, **extra)

        none = dict.fromkeys(counts, 0)
        with arrays_in_scope(none):
            traced, like = jax.make_jaxpr(one, return_shape=True)(*_of_one_layer(given, counts))
        _check_separable(traced, given, like, counts)
        if examined:
            return updates, state
        with arrays_in_scope(none, placed=placed_of_one_layer(counts)):
            return _mapped(one, given, like, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _mapped(function: Callable[..., Tree], args: tuple[Tree, ...], like: Tree, counts: Mapping[Path, int]) -> Tree:
    """Maps a function of one layer over all layers.

    Args:
        function: the function. It gets `args`, in which arrays of stacked parameters lack the dimension of layers.
        args: trees of arrays, some of which belong to parameters (see `of_parameter`).
        like: the shapes and dtypes of what the function returns for one layer.
        counts: the number of layers of each parameter, by path. Stacks of the same length are mapped together.
    """
    leaves, structure = jax.tree.flatten(args)
    into, out = _counts_within(args, counts), _counts_within(like, counts)

    def run(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    for length in sorted({*into, *out} - {0}):
        axes = tuple(0 if count == length else None for count in into)
        run = jax.vmap(run, axes, [0 if count == length else None for count in out], axis_size=length)
    return jax.tree.unflatten(jax.tree.structure(like), run(*leaves))


def _of_one_layer(tree: Tree, counts: Mapping[Path, int]) -> Tree:
    """Returns the tree with each array of a stacked parameter replaced by the shape of one layer's array."""
    leaves = [
        jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if count else leaf
        for leaf, count in zip(jax.tree.leaves(tree), _counts_within(tree, counts), strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _counts(params: Tree, own: Mapping[Path, int] | None) -> dict[Path, int]:
    """Returns the number of layers of each parameter in a tree, by its path in that tree.

    Args:
        params: the parameters, or arrays of the same structure and shapes.
        own: the number of layers of each parameter of the model that `per_layer` was given; `None` without a model. The
            numbers in scope, if there are any, take precedence.

    Raises:
        ValueError: if no numbers are known, if an array is not a parameter of the model, or if the first dimension of a
            stacked parameter is not its number of layers.
    """
    known = own if (counts := counts_in_scope()) is None else counts
    if known is None:
        raise ValueError(
            "`per_layer` does not know which arrays hold the layers of a `Stack`. `TrainState.create` and `train_step` "
            "tell it; elsewhere pass the model: `gtp_jax.train.per_layer(optimizer, model)`."
        )
    found = {}
    for path, leaf in with_paths(params):
        name = path[:-1] if path not in known and path[-1:] == ("value",) else path  # in an `nnx.Variable`
        if name not in known:
            raise ValueError(
                f"`per_layer` got an array at {'.'.join(path)!r}, which is not a parameter of the model: it looks up "
                "by path whether a parameter holds the layers of a `Stack`. Put it around transformations that change "
                "the tree of parameters, such as `optax.flatten`, not inside."
            )
        if known[name] and jnp.shape(leaf)[:1] != (known[name],):
            raise ValueError(
                f"`per_layer` got an array of shape {jnp.shape(leaf)} for {'.'.join(path)!r}, a parameter of "
                f"{known[name]} layers; the first dimension must index layers. Pass the arrays that the `Stack` stores."
            )
        found[path] = known[name]
    return found


def _counts_within(tree: Tree, counts: Mapping[Path, int]) -> list[int]:
    """Returns, for each leaf of a tree, the number of layers of the parameter that it belongs to; 0 if it belongs to
    none."""
    return [of_parameter(path, counts) or 0 for path, _ in with_paths(tree)]


def _check_separable(traced: Any, given: Tree, like: Tree, counts: Mapping[Path, int]) -> None:
    """Refuses an update or a state that cannot be computed one layer at a time.

    Args:
        traced: the jaxpr of `init` or `update` for the arrays of one layer.
        given: the arguments that it was traced for, with stacked arrays. The first has the parameters' structure and
            shapes.
        like: the shapes of its results: `(updates, new state)`, or `((), state)` for `init`.
        counts: the number of layers of each parameter, by path.

    Raises:
        NotPerLayer: if a result depends on a stacked parameter to which it does not belong, or if a result for a
            stacked parameter depends on random numbers.
    """
    if not any(counts.values()):
        return
    own = {path: frozenset({path}) for path in counts}
    inputs = input_values(given, counts)
    ndims = {path: jnp.ndim(leaf) - (counts[path] > 0) for path, leaf in with_paths(given[0])}
    for (path, _), value in zip(with_paths(like), Terms(()).of(traced, inputs, ndims), strict=True):
        owner = of_parameter(path, own) or frozenset()
        reads = frozenset().union(*(of_parameter(one, own) or frozenset() for one in value.depends))
        others = sorted(other for other in reads - owner if counts[other])
        what = f"the update of {'.'.join(*owner)!r}" if path[0] == "0" else f"the optimizer's {'.'.join(path[1:])!r}"
        if others:
            raise NotPerLayer(
                f"{what} depends on {'.'.join(others[0])!r}, of which `per_layer` sees one layer at a time. Put "
                "transformations over several parameters, such as clipping by a global norm, around it: "
                "`optax.chain(optax.clip_by_global_norm(1.0), gtp_jax.train.per_layer(...))`."
            )
        if value.random and any(counts[path] for path in owner):
            raise NotPerLayer(
                f"{what} depends on random numbers, which would be the same for every layer under `per_layer`. "
                "Put that transformation around it: `optax.chain(gtp_jax.train.per_layer(...), optax.add_noise(...))`."
            )
