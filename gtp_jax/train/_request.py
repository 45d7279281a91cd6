"""Describes what a step computes, and checks the arguments that say so."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from .._words import ReduceOverDp
from ..recipes import Recipe
from ..weights import ModulePath
from ._loss import Loss

View = Literal["global", "local"]
_VIEWS: tuple[View, ...] = ("global", "local")


def check_view(view: Any, *, has_aux: bool) -> None:
    """Raises `ValueError` if `view` is neither 'global' nor 'local', or if `has_aux` is true in local view."""
    if view not in _VIEWS:
        raise ValueError(f"`view` is {view!r}; it must be one of {', '.join(map(repr, _VIEWS))}.")
    if has_aux and view == "local":
        raise ValueError(
            "`has_aux` is for `view='global'`: in local view each rank would return the `aux` of its own part. Use "
            "`view='global'`, or return only the loss."
        )


def check_microbatches(microbatches: Any) -> None:
    """Raises `ValueError` unless `microbatches` is an `int` of at least 1."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"`microbatches` is {microbatches!r}; it must be a whole number of at least 1.")


class Request(NamedTuple):
    """A description of what a step computes.

    The first eight fields are arguments of `train_step`.

    Attributes:
        replica: the number of this replica, if replicas have meshes of their own (`gtp_jax.nonuniform.Replicas`);
            otherwise 0.
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
    replica: int = 0
    rounded: frozenset[ModulePath] = frozenset()
