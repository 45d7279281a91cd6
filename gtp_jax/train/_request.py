"""Describes what a step computes, and checks the arguments that say so."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .._words import REDUCE_OVER_DP, ReduceOverDp
from ..recipes import Recipe, check_recipe
from ..weights import ModulePath
from ._loss import Loss, check_loss

View = Literal["global", "local"]
_VIEWS: tuple[View, ...] = ("global", "local")


class Request(NamedTuple):
    """A description of what a step computes.

    The first eight fields are arguments of `train_step`.

    Attributes:
        program: the number of this program, if programs on separate meshes compute parts of one step; otherwise 0.
            Their random keys differ.
        rounded: the paths of the modules whose weights already hold values of the dtype in which they are sent.
    """

    loss: Loss
    view: View
    has_aux: bool
    microbatches: int
    recipe: Recipe | None
    pregathered_layers: int | Literal["all"] = 0
    seed: int = 0
    reduce_over_dp: ReduceOverDp = "each"
    program: int = 0
    rounded: frozenset[ModulePath] = frozenset()

    def checked(self) -> Request:
        """Returns the request, whose arguments of `train_step` have been checked.

        Raises:
            TypeError: if `loss` is not callable, or `recipe` is not a recipe.
            ValueError: if another argument has a value that is not allowed; the message says what is.
        """
        check_loss(self.loss)
        check_recipe(self.recipe)
        _check_view(self.view, has_aux=self.has_aux)
        _check_microbatches(self.microbatches)
        _check_pregathered_layers(self.pregathered_layers)
        _check_reduce_over_dp(self.reduce_over_dp, self.view, self.microbatches)
        return self


def _check_view(view: Any, *, has_aux: bool) -> None:
    """Raises `ValueError` if `view` is neither 'global' nor 'local', or if `has_aux` is true in local view."""
    if view not in _VIEWS:
        raise ValueError(f"`view` is {view!r}; it must be one of {', '.join(map(repr, _VIEWS))}.")
    if has_aux and view == "local":
        raise ValueError(
            "`has_aux` is for `view='global'`: in local view each rank would return the `aux` of its own part. Use "
            "`view='global'`, or return only the loss."
        )


def _check_microbatches(microbatches: Any) -> None:
    """Raises `ValueError` unless `microbatches` is an `int` of at least 1."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"`microbatches` is {microbatches!r}; it must be a whole number of at least 1.")


def _check_pregathered_layers(pregathered_layers: Any) -> None:
    if pregathered_layers != "all" and (
        not isinstance(pregathered_layers, int) or isinstance(pregathered_layers, bool) or pregathered_layers < 0
    ):
        raise ValueError(
            f"`pregathered_layers` is {pregathered_layers!r}; it must be a number of layers, at least 0, or 'all'."
        )


def _check_reduce_over_dp(name: Any, view: str, microbatches: int) -> None:
    """Refuses an unknown `reduce_over_dp`, and `"last"` in global view with several microbatches.

    Raises:
        ValueError: if the value is refused; the message says what to use instead.
    """
    if name not in REDUCE_OVER_DP:
        raise ValueError(
            f"`reduce_over_dp` is {name!r}; it must be one of {', '.join(map(repr, REDUCE_OVER_DP))}. Use 'each' for "
            "the least memory for gradients, or 'last' for the fewest bytes between nodes."
        )
    if name == "last" and view == "global" and microbatches > 1:
        raise ValueError(
            "`reduce_over_dp` is 'last', which is for `view='local'`: in global view gradients are summed over dp in "
            "each microbatch. Use 'each', or `view='local'` if every operation of model and loss is written for it."
        )
