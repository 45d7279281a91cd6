"""Lets a step update a parameter by a rule of its own instead of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
from flax import nnx


class UpdateRule(Protocol):
    """How a step updates a parameter that the optimizer does not update. Rules are static data, and are compared by
    value.

    The module that owns such a parameter decides what its gradient contains. The step sums and averages this gradient
    like others, but neither includes it in a norm nor clips it.
    """

    def moved(self, value: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the value of the parameter after a step."""
        ...

    def metrics(self, gradients: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Returns the metrics that a step reports, given the gradients of all parameters with rules of this class."""
        ...


def set_update_rule(variable: nnx.Variable, rule: UpdateRule) -> None:
    """Makes a step update a parameter by a rule."""
    variable.set_metadata(update_rule=rule)


def update_rule_of(variable: nnx.Variable) -> UpdateRule | None:
    """Returns the rule that updates a parameter; `None` if the optimizer updates it."""
    return variable.get_metadata().get("update_rule")
