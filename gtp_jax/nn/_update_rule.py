"""Parameters that a step moves by a rule of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
from flax import nnx


class UpdateRule(Protocol):
    """How a step moves a parameter that no optimizer moves. Rules are static: they compare by value.

    What arrives as the gradient of such a parameter is its owner's business. It is summed and averaged as gradients
    are, counts in no norm and is not clipped.
    """

    def moved(self, value: jax.Array, gradient: jax.Array) -> jax.Array:
        """Returns the parameter after a step."""
        ...

    def metrics(self, gradients: Sequence[jax.Array]) -> dict[str, jax.Array]:
        """Returns what a step reports, of the gradients of all parameters with rules of this class."""
        ...


def set_update_rule(variable: nnx.Variable, rule: UpdateRule) -> None:
    """Leaves a parameter to a rule."""
    variable.set_metadata(update_rule=rule)


def update_rule_of(variable: nnx.Variable) -> UpdateRule | None:
    """Returns the rule that moves a parameter; `None` if the optimizer does."""
    return variable.get_metadata().get("update_rule")
