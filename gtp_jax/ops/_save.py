"""What a layer keeps for its backward pass, and how it lies in memory."""

from __future__ import annotations

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

SAVED = "gtp_saved"
ACTIVATION = "gtp_activation"


def save_for_backward(x: Any) -> Any:
    """Marks what the policy `matmuls` keeps beside the outputs of matmuls.

    A matmul's output that backward needs for nothing but this is then not kept: this takes its place. So what is
    computed from it is not computed again, for no more memory.
    """
    return checkpoint_name(x, SAVED)


def save_activation(x: Any) -> Any:
    """Marks what the policy `activations` keeps: what a matmul reads that an activation function made.

    Backward needs it for the weight's gradient alone, and otherwise makes it again from the matmuls' outputs.
    """
    return checkpoint_name(x, ACTIVATION)


def row_major(x: jax.Array) -> jax.Array:
    """Returns the same array, whose last dimension lies in memory without gaps.

    Where XLA may choose, it turns arrays over for a matmul that reads them anyhow, and what else reads them, reductions
    and the optimizer above all, runs at a fraction of the memory bandwidth.
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
