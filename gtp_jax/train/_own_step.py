"""Defines the protocol of the `replicas` argument of `train_step`, through which replicas provide their own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import optax

from ._request import Request
from ._state import TrainState


class BringsStep(Protocol):
    """Devices whose step may differ from the program that runs on a single mesh, such as
    `gtp_jax.nonuniform.Replicas`."""

    def own_step(
        self,
        request: Request,
        optimizer: optax.GradientTransformation,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
        options: Callable[[], dict[str, Any]],
    ) -> Callable[..., tuple[TrainState, dict[str, Any]]] | None:
        """Returns the step over these devices, or `None` if the usual step can run on them as a single mesh.

        Args:
            request: the arguments of `train_step` that decide what is computed, already checked.
            optimizer: any optax optimizer.
            max_grad_norm: the global L2 norm to which larger gradients are scaled down; `None` for no limit.
            skip_nonfinite: whether to skip an update if the loss or the norm of the gradients is not finite.
            options: a function that returns the XLA options for the mesh in scope and the recipe of the call.

        Raises:
            ValueError: if these devices cannot compute what is requested.
        """
        ...
