"""Defines the interface of devices that bring their own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import optax

from ._gradients import Request
from ._state import TrainState


class BringsStep(Protocol):
    """Devices on which a step is a different program than on one mesh, such as `gtp_jax.Replicas`."""

    def own_step(
        self,
        request: Request,
        optimizer: optax.GradientTransformation,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
        options: Callable[[], dict[str, Any]],
    ) -> Callable[..., tuple[TrainState, dict[str, Any]]] | None:
        """Returns the step, or `None` if the step of one mesh is the right one. Arguments are as in `train_step`.

        Args:
            request: what to compute.
            optimizer: any optax optimizer.
            max_grad_norm: scales gradients down to this norm.
            skip_nonfinite: whether to leave out an update that is not finite.
            options: returns the XLA options for the mesh and the recipe in scope.

        Raises:
            ValueError: if these devices cannot compute what is requested.
        """
        ...
