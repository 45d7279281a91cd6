"""The choice of the next token from logits."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# How a token is chosen, which programs are specialised to: the likeliest; by its probability; by that among the
# likeliest tokens.
Choice = Literal["greedy", "all", "likeliest"]


# More tokens than there are.
_ALL = 2**31 - 1


class Sampling(NamedTuple):
    """How tokens are sampled, as arrays of the host, so that other values need no other program.

    Attributes:
        temperature: divides the logits.
        top_k: how many of the likeliest tokens are left.
        top_p: the probability that the tokens that are left have together, at least.
        key: words of the random key: 0, and the seed.
        vocab_size: how many tokens may be chosen.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    key: Any
    vocab_size: Any


def sampling_of(
    *, temperature: float, top_k: int | None, top_p: float | None, seed: int, vocab_size: int | None = None
) -> tuple[Choice, Sampling]:
    """Checks what a user asks for.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(
            f"`temperature` is {temperature!r}; it must be a number of at least 0, where 0 takes the likeliest token."
        )
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise ValueError(f"`top_k` is {top_k!r}; it must be a number of tokens, at least 1, or None for all.")
    if top_p is not None and not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise ValueError(f"`top_p` is {top_p!r}; it must be a probability, above 0 and at most 1, or None for all.")
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise ValueError(f"`seed` is {seed!r}; it must be a whole number from 0 to 2**32 - 1.")
    if vocab_size is not None and (not isinstance(vocab_size, int) or not 1 <= vocab_size < 2**31):
        raise ValueError(f"`vocab_size` is {vocab_size!r}; it must be a number of tokens, at least 1, or None for all.")
    choice: Choice = "greedy" if temperature == 0 else "all" if top_k is None and top_p is None else "likeliest"
    arrays = Sampling(
        np.float32(temperature or 1.0),
        np.int32(min(top_k or _ALL, _ALL)),
        np.float32(1.0 if top_p is None else top_p),
        np.array([0, seed], np.uint32),
        np.int32(_ALL if vocab_size is None else vocab_size),
    )
    return choice, arrays


def choose(logits: jax.Array, choice: Choice, sampling: Sampling, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the next token of each row.

    What is drawn depends on the seed, the number of the row and the place of the new token, on nothing else.

    Args:
        logits: `(batch, vocab)`.
        choice: how.
        sampling: the numbers.
        rows: `(batch,)`, the numbers of the rows.
        places: `(batch,)`, of the new tokens in their rows.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) < sampling.vocab_size, logits, -jnp.inf)
    if choice == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / sampling.temperature
    key = jax.random.wrap_key_data(jnp.asarray(sampling.key), impl="threefry2x32")
    keys = jax.vmap(lambda row, place: jax.random.fold_in(jax.random.fold_in(key, row), place))(rows, places)
    if choice == "all":
        return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)
    order = jnp.argsort(-scores, axis=-1, stable=True)
    ordered = jnp.take_along_axis(scores, order, axis=-1)
    rank = jnp.arange(scores.shape[-1])
    kept = jnp.where(rank < sampling.top_k, ordered, -jnp.inf)
    probs = jax.nn.softmax(kept, axis=-1)
    ahead = jnp.cumsum(probs, axis=-1) - probs  # of the tokens that are likelier: the first token always stays
    kept = jnp.where((ahead < sampling.top_p) | (rank == 0), kept, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, kept)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
