"""Keeps two settings of sharded models in scope: whether calls go through the hook, and the recipe of a step."""

from __future__ import annotations

import contextlib

import jax

from ..recipes import Recipe, current_recipe

_off = jax.make_user_context(default_value=None)
_recipe_of_step = jax.make_user_context(default_value=None)


def without_hook() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the modules of sharded models are called as ordinary modules: XLA decides when to
    gather the weights that `gtp_jax.shard` has sharded, and no recipe quantizes these weights.

    Use it, in global view, for what the hook does not support, such as forward-mode differentiation. In local view,
    where XLA gathers nothing, calls of modules with sharded weights are refused. The setting is part of the cache key
    of `jax.jit`.
    """
    return _off("by the user")


def within_unit() -> contextlib.AbstractContextManager[None]:
    """Returns a context for the code of a unit. The unit's weights, and those of the modules within it, are ready for
    use, so calls of these modules are ordinary calls."""
    return _off("within a unit")


def hook_is_off() -> bool:
    """Returns whether `without_hook` or `within_unit` is in scope."""
    return _off.value is not None


def is_within_unit() -> bool:
    """Returns whether `within_unit` is in scope, and no `without_hook` inside of it."""
    return _off.value == "within a unit"


def recipe_of_step(recipe: Recipe | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context that puts the recipe of a `train_step` in scope for the weights that `shard` has sharded, and
    for nothing else.

    `use_recipe` would also apply to gtp_jax's own layers outside the model, for which the step has no keys of
    stochastic rounding.
    """
    return _recipe_of_step(recipe)


def recipe_in_scope() -> Recipe | None:
    """Returns the recipe that `recipe_of_step` has put in scope; if there is none, that of `use_recipe`; `None` if
    there is neither."""
    return current_recipe() if _recipe_of_step.value is None else _recipe_of_step.value
