"""The recipe in scope, for models that are not trained with `train_step`."""

from __future__ import annotations

import contextlib

import jax

from ._check import check_recipe
from ._recipe import Recipe

_scope = jax.make_user_context(default_value=None)


def use_recipe(recipe: Recipe | None) -> contextlib.AbstractContextManager[None]:
    """Puts a recipe in scope, such as for a model trained with `nnx.Optimizer` under `nnx.jit`, or with Flax Linen.

    The recipe is part of the key of `jax.jit`'s cache, so one jitted function may be called under several recipes. An
    inner scope replaces the outer one; under `None` nothing is quantized. A `train_step` that was given a recipe uses
    its own instead.

    Every call of a module quantizes its shards once, in forward; backward gathers the same codes again. So a step
    quantizes a module as often as it calls it: in every microbatch, and for each use of a tied table, unless XLA merges
    identical calls in one program. A `Stack` quantizes all its layers at once, in each of its calls. In contrast,
    `train_step(recipe=...)` quantizes once per step.

    Patterns are matched against the paths of modules in the model that `gtp_jax.init` built or `gtp_jax.shard` sharded.
    Patterns that match no module are not reported here; use `gtp_jax.explain(model, recipe)`.

    Raises:
        TypeError: if `recipe` is neither a recipe nor `None`.
        ValueError: if the recipe rounds stochastically, which requires a key for every step, or scales by amaxes of
            earlier steps, which requires a state. Calling a module raises it if its path is unknown and the recipe has
            patterns, as it has by default (`exclude`).
    """
    check_recipe(recipe)
    for kind in () if recipe is None else recipe.kinds:
        name, operands = type(kind).__name__, kind.operands
        if operands is not None and operands.delayed is not None:
            raise ValueError(
                f"`recipe` contains {name}, which scales by amaxes of earlier steps, for which `use_recipe` has no "
                "state. Pass the recipe to `gtp_jax.TrainState.create` and `gtp_jax.train_step`, or replace "
                f"{name} by `gtp_jax.FP8(matmuls=True)`, which scales each operand by its own amax."
            )
        if operands is not None and operands.stochastic:
            raise ValueError(
                f"`recipe` contains {name}, which rounds gradients stochastically. This requires a key for every step, "
                f"and `use_recipe` has none. Pass `stochastic=False` to {name}, or train with `gtp_jax.train_step`."
            )
    return _scope(recipe)


def current_recipe() -> Recipe | None:
    """Returns the recipe in scope; `None` by default."""
    return _scope.value


def recipe_of_call(recipe: Recipe | None) -> Recipe | None:
    """Returns the recipe for a call of a step: the one the step was created with, otherwise the one in scope."""
    return current_recipe() if recipe is None else recipe
