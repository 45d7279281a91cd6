"""The recipe in scope, for models that no `train_step` trains."""

from __future__ import annotations

import contextlib

import jax

from ._recipe import Recipe, check_recipe

_scope = jax.make_user_context(default_value=None)


def use_recipe(recipe: Recipe | None) -> contextlib.AbstractContextManager[None]:
    """Puts a recipe in scope, such as that of a model trained with `nnx.Optimizer` under `nnx.jit`, or of Flax Linen.

    It is part of the key of `jax.jit`'s cache, so one jitted function may be called under several recipes. A scope
    within another replaces it; under `None` nothing is quantized. Modules that a `train_step` with a recipe of its own
    calls have that one.

    Every call of a module quantizes its shards anew: once in forward, and backward gathers the same codes again. So a
    step quantizes a module as often as it calls it: in every microbatch, and a tied table for each of its uses, unless
    XLA finds that two calls in one program do the same. A `Stack` quantizes all its layers at once, at each call of its
    own. `train_step(recipe=...)` quantizes once a step.

    Patterns are matched with paths in the model that `gtp_jax.init` built or `gtp_jax.shard` sharded. That a pattern
    matches something is checked by `gtp_jax.explain(model, recipe)`, not here.

    Raises:
        TypeError: if `recipe` is something else.
        ValueError: if it rounds stochastically, which needs a key for every step; by a call, if it has patterns and the
            module does not know its path.
    """
    check_recipe(recipe)
    if recipe is not None and any(kind.operands is not None and kind.operands.stochastic for kind in recipe.kinds):
        raise ValueError(
            f"`recipe` is a {type(recipe).__name__} that rounds gradients stochastically, which takes a key for every "
            "step, and `use_recipe` has none. Pass `stochastic=False`, or train with `gtp_jax.train_step`."
        )
    return _scope(recipe)


def current_recipe() -> Recipe | None:
    """Returns the recipe in scope; `None` by default."""
    return _scope.value


def recipe_of_call(recipe: Recipe | None) -> Recipe | None:
    """Returns the recipe of a call of a step: the argument that the step was made with, otherwise the one in scope at
    the call."""
    return current_recipe() if recipe is None else recipe
