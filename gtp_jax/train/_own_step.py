"""Defines the interface of devices that bring their own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import optax

from ._gradients import Request
from ._state import TrainState


class BringsStep(Protocol):
    """Devices whose step is a different program from that of a single mesh, such as `gtp_jax.Replicas`."""

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
            request: the arguments of the step, already checked.
            optimizer: any optax optimizer.
            max_grad_norm: the global norm to which larger gradients are scaled down; `None` for no limit.
            skip_nonfinite: whether to skip an update whose loss or gradients are not finite.
            options: a function that returns the XLA options for the mesh and the recipe in scope.

        Raises:
            ValueError: if these devices cannot compute what is requested.
        """
        ...
