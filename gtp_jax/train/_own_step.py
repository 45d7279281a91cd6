"""Replicas that bring a step of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import optax

from ._gradients import Request
from ._state import TrainState


class BringsStep(Protocol):
    """Devices on which a step is another program than on one mesh, such as `gtp_jax.Replicas`."""

    def own_step(
        self,
        request: Request,
        optimizer: optax.GradientTransformation,
        *,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
        options: Callable[[], dict[str, Any]],
    ) -> Callable[..., tuple[TrainState, dict[str, Any]]] | None:
        """Returns the step; `None` if it is that of one mesh. Arguments as in `train_step`.

        Args:
            request: what is computed.
            optimizer: any optax optimizer.
            max_grad_norm: scales gradients down to this norm.
            skip_nonfinite: whether to leave out an update that is not finite.
            options: returns XLA options for the mesh and the recipe in scope.

        Raises:
            ValueError: if these devices cannot compute what is requested.
        """
        ...
