"""Names the values that are saved for backward, and fixes their order in memory."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Shaped

SAVED = "gtp_saved"
ACTIVATION = "gtp_activation"
ROUTING = "gtp_routing"


def save_for_backward(x: Any) -> Any:
    """Saves this value for backward under the policy `matmuls`, in place of the inputs it was computed from.

    A matmul's output that backward needs only to compute this value is then not saved itself. This avoids recomputing
    the value and takes no more memory.
    """
    return checkpoint_name(x, SAVED)


def save_activation(x: Any) -> Any:
    """Saves a matmul's input, computed by an activation function, for backward under the policy `activations`.

    Backward needs it only for the weight's gradient. Other policies recompute it from the matmuls' outputs.
    """
    return checkpoint_name(x, ACTIVATION)


def save_routing(x: Any) -> Any:
    """Saves choices of experts, and orders that follow from them, for backward under every policy.

    They are integers, a few a token. Computed again, in a program that XLA fuses otherwise, two nearly equal choices
    could come out in the other order, and gradients would be of other experts than the loss.
    """
    return checkpoint_name(x, ROUTING)


def row_major(x: Shaped[jax.Array, "*shape"]) -> Shaped[jax.Array, "*shape"]:
    """Returns the same array, whose last dimension lies in memory without gaps.

    Left to itself, XLA may transpose an array for a matmul that can read either order. Its other readers, above all
    reductions and the optimizer, then run at a fraction of the memory bandwidth.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@jax.custom_jvp
def row_major_in_training(x: jax.Array) -> jax.Array:
    """Returns `row_major` where it is differentiated, and its gradient likewise. Elsewhere the array as it is, as what
    constrains a layout cannot be exported (`jax.export`), and inference gains nothing."""
    return x


@row_major_in_training.defjvp
def _row_major_in_training(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return row_major(primals[0]), row_major(tangents[0])
