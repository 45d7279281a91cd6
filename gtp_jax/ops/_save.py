"""Names the values that are saved for backward, and fixes their memory layout."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Shaped

_saved = jax.make_user_context(default_value=True)

SAVED = "gtp_saved"
ACTIVATION = "gtp_activation"
ATTENTION = "gtp_attention"
ROUTING = "gtp_routing"


def save_for_backward(x: Any) -> Any:
    """Saves this value for backward under policies that save matmuls, instead of the inputs it was computed from.

    A matmul output that backward needs only to compute this value is then not saved. This avoids recomputing the value,
    and takes no more memory.
    """
    return checkpoint_name(x, SAVED)


def named_values_saved(saved: bool) -> contextlib.AbstractContextManager[None]:
    """Puts in scope whether the remat policy in force saves on the device what `save_for_backward` names. Without a
    policy, it is saved. Within another policy, it is saved if both save it."""
    return _saved(saved and _saved.value)


def saves_codes(keep_codes: bool | None) -> bool:
    """Returns whether to make the codes of an input for backward in forward: as asked for, or, for `None`, if the remat
    policy in force saves them."""
    return _saved.value if keep_codes is None else keep_codes


def save_activation(x: Any) -> Any:
    """Saves a matmul's input, computed by an activation function, for backward under the policy `activations`.

    Backward needs it only for the weight's gradient. The policy `matmuls` recomputes it from the matmuls' outputs.
    """
    return checkpoint_name(x, ACTIVATION)


def save_attention(x: Any) -> Any:
    """Saves a result of fused attention for backward under the policy `attention`, and under those that save matmuls.

    Backward of a kernel reads the output and the log-sum-exp of the scores. With both saved, queries, keys and values
    may be recomputed without running the kernel again.
    """
    return checkpoint_name(x, ATTENTION)


def save_routing(x: Any) -> Any:
    """Saves choices of experts, and the orders derived from them, for backward under every policy.

    They are a few integers per token. If they were recomputed in a program that XLA fuses differently, two nearly equal
    choices could be swapped, and the gradients would be those of other experts than the loss.
    """
    return checkpoint_name(x, ROUTING)


def row_major(x: Shaped[jax.Array, "*shape"]) -> Shaped[jax.Array, "*shape"]:
    """Returns the same array, with its dimensions in row-major order in memory.

    Without this constraint, XLA may transpose an array for a matmul that can read either order. Other operations that
    read it, especially reductions and the optimizer, then run at a fraction of the memory bandwidth.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


@jax.custom_jvp
def row_major_in_training(x: jax.Array) -> jax.Array:
    """Applies `row_major` to the array and to its tangent when differentiated. Otherwise returns the array unchanged,
    because layout constraints cannot be exported (`jax.export`), and inference gains nothing."""
    return x


@row_major_in_training.defjvp
def _row_major_in_training(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return row_major(primals[0]), row_major(tangents[0])
