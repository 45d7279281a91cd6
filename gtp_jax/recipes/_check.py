"""Checks that an argument is a recipe."""

from __future__ import annotations

from typing import Any

from ._phases import Phases
from ._recipe import BF16, FP8, MXFP8, NVFP4, FP8Blocks, FP8Delayed, Recipe


def check_recipe(recipe: Any) -> None:
    """Raises TypeError unless `recipe` is a recipe or `None`."""
    if recipe is not None and not isinstance(recipe, Recipe):
        hint = " Write it with parentheses." if isinstance(recipe, type) and issubclass(recipe, Recipe) else ""
        if isinstance(recipe, Phases):
            hint = " `Phases` is for `train_step`, `eval_step`, `TrainState.create` and `Trainer`; elsewhere, pass the "
            hint += "recipe of one step, `phases.at(step)`."
        known = ", ".join(
            f"gtp_jax.recipes.{kind.__name__}()" for kind in (BF16, FP8, FP8Delayed, FP8Blocks, MXFP8, NVFP4)
        )
        raise TypeError(f"`recipe` is {recipe!r}; it must be one of {known}, or `None`.{hint}")
