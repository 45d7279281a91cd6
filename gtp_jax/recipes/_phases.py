"""Recipes that follow one another in a run."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ._recipe import Recipe

_MOST_STEPS = 2**31 - 1  # of the int32 in a state


@dataclasses.dataclass(frozen=True)
class Phases:
    """Recipes that follow one another: each applies from a step on, until the next begins.

    A run in NVFP4 whose last part is in bfloat16, for example, is
    `Phases({0: gtp_jax.NVFP4(matmuls=True), 9000: gtp_jax.recipes.BF16()})`. The number of a step is the `step` of its
    `TrainState`: the number of updates before it, without skipped ones. So a run that is resumed from a checkpoint
    continues in the same phase.

    Attributes:
        recipes: a mapping, or pairs, from the first step of each phase to its recipe, in order; the first begins at
            step 0.

    Raises:
        ValueError: if there is no phase, the first does not begin at step 0, a number of a step is negative or not
            above the one before, or a recipe has delayed scaling, whose amaxes are those of the steps before it.
        TypeError: if `recipes` is not of this form.
    """

    recipes: Mapping[int, Recipe] | tuple[tuple[int, Recipe], ...]

    def __post_init__(self) -> None:
        pairs = _checked(self.recipes)
        starts = [start for start, _ in pairs]
        ascending = all(before < after <= _MOST_STEPS for before, after in itertools.pairwise(starts))
        if starts[:1] != [0] or not ascending:
            raise ValueError(
                f"the phases of `recipes` begin at the steps {', '.join(map(str, starts)) or '(none)'}; the first must "
                f"begin at step 0, and every other one after the one before it, up to {_MOST_STEPS:,}. "
                "`gtp_jax.recipes.BF16()` quantizes nothing."
            )
        if delayed := next((type(recipe).__name__ for _, recipe in pairs if recipe.delays), None):
            raise ValueError(
                f"`recipes` has a {delayed} with delayed scaling, which needs amaxes of the steps before it, and other "
                "recipes record none. Use `gtp_jax.FP8(matmuls=True)`, which scales each operand by its own amax, or "
                f"train with {delayed} throughout."
            )
        object.__setattr__(self, "recipes", pairs)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first step of each phase."""
        return tuple(start for start, _ in _pairs(self.recipes))

    def number(self, step: int) -> int:
        """Returns the number of the phase of a step, from 0 on."""
        return max(bisect.bisect_right(self.starts, step) - 1, 0)

    def at(self, step: int) -> Recipe:
        """Returns the recipe of a step."""
        return tuple(_pairs(self.recipes))[self.number(step)][1]


def _checked(recipes: Any) -> tuple[tuple[int, Recipe], ...]:
    try:
        pairs: Any = tuple((start, recipe) for start, recipe in _pairs(recipes))
    except (TypeError, ValueError):
        pairs = ((None, None),)
    number = lambda start: isinstance(start, int | np.integer) and not isinstance(start, bool)  # noqa: E731
    if not all(number(start) and isinstance(recipe, Recipe) for start, recipe in pairs):
        raise TypeError(
            f"`recipes` is {recipes!r}; it must map the first step of each phase to a recipe, such as "
            "{0: gtp_jax.NVFP4(), 9000: gtp_jax.recipes.BF16()}."
        )
    return tuple((int(start), recipe) for start, recipe in pairs)


def _pairs(recipes: Mapping[int, Recipe] | tuple[tuple[int, Recipe], ...]) -> Iterable[tuple[int, Recipe]]:
    return recipes.items() if isinstance(recipes, Mapping) else recipes


def recipe_at(recipe: Recipe | Phases | None, step: int) -> Recipe | None:
    """Returns the recipe of a step."""
    return recipe.at(step) if isinstance(recipe, Phases) else recipe


def recipes_of(recipe: Recipe | Phases | None) -> tuple[Recipe | None, ...]:
    """Returns the recipes of all phases, or the only one."""
    return tuple(map(recipe.at, recipe.starts)) if isinstance(recipe, Phases) else (recipe,)
