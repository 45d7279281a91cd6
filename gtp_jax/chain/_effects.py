"""Explains JAX's errors for side effects of layers that are differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_EXPLAINED = "has a side effect, such as a callback, and is differentiated"

# Words of JAX's errors, each with what to do instead.
_REMEDIES = {
    "Effects not supported": (
        "JAX would repeat the effect where backward recomputes the layer, which it refuses. Pass "
        '`remat="everything"` to `gtp_jax.shard` or `gtp_jax.Stack`, so that nothing is recomputed; use '
        "`jax.debug.callback`, which may be repeated; or write the value to a `gtp_jax.nn.Metric`, and report it "
        "outside of the layer."
    ),
    "Mutating a reference": (
        'JAX does not recompute writes to a `jax.Ref` for backward. Pass `remat="everything"` to `gtp_jax.shard` or '
        "`gtp_jax.Stack`, which recomputes nothing; or hold the value in an `nnx.Variable`."
    ),
    "callbacks do not support JVP": (
        "An argument of the callback depends on parameters or inputs that are differentiated. Pass "
        "`jax.lax.stop_gradient(argument)`; or, if the result has a derivative, define it with `jax.custom_vjp`."
    ),
}


@contextlib.contextmanager
def effects_explained(name: str) -> Iterator[None]:
    """Returns a context in which JAX's errors for side effects name the layer, and say what to do instead.

    Args:
        name: the layer, as the message names it.
    """
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        remedy = next((remedy for words, remedy in _REMEDIES.items() if words in str(error)), None)
        if remedy is None or _EXPLAINED in str(error):
            raise
        raise type(error)(f"a call of {name} {_EXPLAINED}. {remedy} JAX says: {error}") from error
