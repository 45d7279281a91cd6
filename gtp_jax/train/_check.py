"""Compares a step on the mesh in scope with the same step on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from .._random_keys import as_key, is_key, key_impl, key_words
from ..mesh import with_paths
from ..nn import init
from ..recipes import Recipe, recipe_of_call
from ._gradients import gradients, mean_gradients
from ._loss import Loss, mean
from ._padding import paddings
from ._request import Request, View
from ._state import TrainState

Tree = Any


def check(
    loss: Loss,
    factory: Callable[[nnx.Rngs], nnx.Module],
    batch: Tree,
    *,
    rngs: nnx.Rngs | None = None,
    has_aux: bool = False,
    microbatches: int = 1,
    recipe: Recipe | None = None,
    view: View = "global",
    tolerance: float = 1e-4,
) -> dict[str, float]:
    """Compares the loss and the gradients of a new model on the mesh in scope with those on one device.

    This finds mistakes in code that computes on a rank's own part of the arrays (`view="local"`, the `local` of a
    `gtp_jax.nn.Layer`, your own `shard_map`). Use a model in float32 or float64 that fits on one device. In bfloat16,
    sums in a different order differ by up to a few percent.

    Args:
        loss: the loss function, as in `train_step`.
        factory: a function that makes the model, as in `gtp_jax.init`.
        batch: a pytree of arrays.
        rngs: the random streams, as in `gtp_jax.init`; `nnx.Rngs(0)` by default.
        has_aux: as in `train_step`.
        microbatches: as in `train_step`.
        recipe: the recipe of both steps, such as `gtp_jax.NVFP4()`; the recipe in scope by default.
        view: as in `train_step`.
        tolerance: the largest difference that is accepted in a tensor, relative to the largest finite magnitude in that
            tensor. The default suffices for a recipe that quantizes only weights, because both steps round each weight
            to the same codes. With `matmuls=True` use 1e-2, because a sum in a different order may round to a different
            code. `NVFP4(matmuls=True)` needs `stochastic=False`, because each rank rounds with different random bits.
            With `grad_wire` use 1e-2 for `"bf16"` and 0.1 for the other formats, because one device does not round
            gradients.

    Returns:
        The relative difference of each tensor, by name: the loss, the tensors in `aux`, the gradients, and the model's
        variables that are neither parameters nor frozen. Infinity for a tensor that is NaN or infinite at a position on
        the mesh or on one device alone, or infinite with another sign. For a tensor of integers or booleans, 0 if all
        elements are equal, otherwise 1.

    Raises:
        TypeError: if `loss` is not callable, or `recipe` is not a recipe.
        ValueError: if `view` or `microbatches` has a value that `train_step` would refuse, if `has_aux` is used in
            local view, if there is no mesh in scope, if the loss on the mesh is not finite, or if a tensor differs by
            more than `tolerance`; the message names the first such tensor. Errors of the factory and of the step pass
            through.
    """
    request = Request(loss, view, has_aux, microbatches, recipe).checked()
    request = request._replace(recipe=recipe_of_call(recipe))
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError(
            "`check` compares the mesh in scope with one device, but no mesh is in scope. Call it in "
            "`with jax.set_mesh(gtp_jax.make_mesh(gtp=...)):`."
        )
    alone = Mesh(np.asarray(mesh.devices).reshape(-1)[:1].reshape((1,) * len(mesh.axis_names)), mesh.axis_names)
    streams, state = nnx.split(nnx.Rngs(0) if rngs is None else rngs)
    leaves, tree = jax.tree.flatten((state, batch))
    copies = [_copied(jnp.asarray(leaf)) for leaf in leaves]  # arrays may be on the devices of the mesh

    def computed() -> dict[str, np.ndarray]:
        state, batch = jax.tree.unflatten(tree, [copy() for copy in copies])
        model = init(factory, nnx.merge(streams, state))
        state = TrainState.create(model, optax.identity(), recipe=request.recipe)

        def named(state: TrainState, batch: Tree) -> dict[str, Any]:
            found = gradients(request, state, batch)
            grads = paddings(state.model_def, state.params).cut(mean_gradients(state.params, found))
            parts = {"aux": found.aux, "gradient": grads, "model_state": found.model_state}
            return {"loss": mean(found.total, found.tokens)} | {
                f"{part} {'.'.join(path)}": leaf for part, tree in parts.items() for path, leaf in with_paths(tree)
            }

        return {name: np.asarray(value) for name, value in jax.jit(named)(state, batch).items()}

    here = computed()
    if not np.isfinite(here["loss"]):
        raise ValueError(
            f"the loss is {here['loss']} on the mesh, so there is nothing to compare. One cause is a token outside the "
            "vocabulary, which `gtp_jax.ops.check_ids` finds."
        )
    with jax.set_mesh(alone):
        there = computed()
    errors = {name: _difference(here[name], there[name]) for name in ["loss", *(n for n in here if n != "loss")]}
    for name, error in errors.items():
        if not error <= tolerance:
            sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
            raise ValueError(
                f"{name} differs between {sizes} and one device: by {error:.2e} of its largest magnitude, but "
                f"`tolerance` is {tolerance:.0e}; {sum(not e <= tolerance for e in errors.values())} of {len(errors)} "
                "tensors differ. Check code that computes on a rank's own part: `view='local'`, the `local` of a "
                "`gtp_jax.nn.Layer`, and each `shard_map`."
            )
    return errors


def _copied(leaf: Any) -> Callable[[], Any]:
    """Returns a function that makes a copy of an array on the devices in scope when it is called. For a plain number,
    the function returns the number."""
    if not hasattr(leaf, "dtype"):
        return lambda: leaf
    if not is_key(leaf):
        value = np.asarray(leaf)
        return lambda: jnp.asarray(value)
    words, impl = np.asarray(key_words(leaf)), key_impl(leaf)
    return lambda: as_key(jnp.asarray(words), impl)


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest difference between the finite elements of two arrays, relative to the largest finite
    magnitude in `other`. The real and imaginary parts of complex numbers count as elements.

    Returns infinity if at some position only one array is NaN or infinite, or if they differ in the sign of an
    infinity. For arrays of integers or booleans, returns 0 if they are equal, otherwise 1.
    """
    if not jnp.issubdtype(one.dtype, jnp.inexact):  # `np.issubdtype` does not count bfloat16
        return float(not np.array_equal(one, other))
    one, other = _parts(one), _parts(other)
    finite = np.isfinite(other)
    if not np.array_equal(np.where(np.isfinite(one), 0, one), np.where(finite, 0, other), equal_nan=True):
        return float("inf")
    one, other = one[finite], other[finite]
    largest = max(float(np.max(np.abs(other), initial=0.0)), float(np.finfo(np.float32).tiny))
    return float(np.max(np.abs(one - other), initial=0.0)) / largest


def _parts(array: np.ndarray) -> np.ndarray:
    """Returns floating-point numbers in float64. Stacks the real and the imaginary parts of complex numbers."""
    parts = [np.real(array), np.imag(array)] if np.iscomplexobj(array) else [array]
    return np.stack([part.astype(np.float64) for part in parts])
