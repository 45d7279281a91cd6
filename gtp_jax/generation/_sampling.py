"""Chooses the next token from logits."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._foreign import brief
from .._numbers import whole

# How a token is chosen; programs are compiled for each. "greedy" takes the most likely token; "all" samples from all
# tokens; "likeliest" samples from the most likely tokens (top-k, top-p).
Choice = Literal["greedy", "all", "likeliest"]


# A number that no vocabulary exceeds.
_ALL = 2**31 - 1

# Temperatures are clamped to [1 / _HOTTEST, _HOTTEST], where they and their inverses are normal float32 numbers. At the
# lower end, the most likely token is taken; at the upper end, all tokens are equally likely.
_HOTTEST = 2.0**126


class Sampling(NamedTuple):
    """The parameters of sampling. They are arrays, so that other values need no recompilation.

    Attributes:
        temperature: the divisor of the logits.
        top_k: the number of most likely tokens that are kept.
        top_p: the minimum total probability of the tokens that are kept.
        key: the words of the random key: 0 and the seed.
        vocab_size: the exclusive upper bound of the tokens that may be chosen.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    key: Any
    vocab_size: Any


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def sampling_of(
    *, temperature: float, top_k: int | None, top_p: float | None, seed: int, vocab_size: int | None = None
) -> tuple[Choice, Sampling]:
    """Checks the options of sampling, and returns them in the form that the programs take.

    Raises:
        ValueError: if an option is out of range; the message names the argument, its value and what is allowed.
    """
    if not _is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(
            f"`temperature` is {brief(temperature)}; it must be a finite number of at least 0; 0 takes the most likely "
            "token."
        )
    most = _ALL if top_k is None else whole(top_k)
    if most is None or most < 1:
        raise ValueError(f"`top_k` is {brief(top_k)}; it must be a number of tokens, at least 1, or None for all.")
    if top_p is not None and not (_is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(
            f"`top_p` is {brief(top_p)}; it must be a probability, above 0 and at most 1, or None for all."
        )
    word = whole(seed)
    if word is None or not 0 <= word < 2**32:
        raise ValueError(f"`seed` is {brief(seed)}; it must be a whole number from 0 to 2**32 - 1.")
    vocabulary = _ALL if vocab_size is None else whole(vocab_size)
    if vocabulary is None or not 1 <= vocabulary < 2**31:
        raise ValueError(
            f"`vocab_size` is {brief(vocab_size)}; it must be a number of tokens, at least 1 and below 2**31, or None "
            "for all."
        )
    choice: Choice = "greedy" if temperature == 0 else "all" if top_k is None and top_p is None else "likeliest"
    arrays = Sampling(
        np.float32(min(max(temperature, 1 / _HOTTEST), _HOTTEST)),
        np.int32(min(most, _ALL)),
        np.float32(1.0 if top_p is None else top_p),
        np.array([0, word], np.uint32),
        np.int32(vocabulary),
    )
    return choice, arrays


def choose(logits: jax.Array, choice: Choice, sampling: Sampling, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Returns the next token of each row, `(batch,)` int32.

    The random numbers of a row depend only on the seed, the row's index and the new token's position.

    Args:
        logits: the logits, `(batch, vocab)`.
        choice: the way in which tokens are chosen.
        sampling: the parameters of sampling.
        rows: the indices of the rows, `(batch,)`.
        places: the positions of the new tokens in their rows, `(batch,)`.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) < sampling.vocab_size, logits, -jnp.inf)
    if choice == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # The most likely tokens get a score of exactly 0, even if the quotients of the others are infinite.
    best = jnp.max(logits, axis=-1, keepdims=True)
    scores = jnp.where(logits == best, 0, (logits - best) / sampling.temperature)
    scores = jnp.where(jnp.arange(logits.shape[-1]) < sampling.vocab_size, scores, -jnp.inf)
    key = jax.random.wrap_key_data(jnp.asarray(sampling.key), impl="threefry2x32")
    keys = jax.vmap(lambda row, place: jax.random.fold_in(jax.random.fold_in(key, row), place))(rows, places)
    if choice == "all":
        return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)
    order = jnp.argsort(-logits, axis=-1, stable=True)  # of logits, because different ones may have equal scores
    ordered = jnp.take_along_axis(scores, order, axis=-1)
    rank = jnp.arange(scores.shape[-1])
    kept = jnp.where(rank < sampling.top_k, ordered, -jnp.inf)
    probs = jax.nn.softmax(kept, axis=-1)
    ahead = jnp.cumsum(probs, axis=-1) - probs  # total probability of more likely tokens; the first is always kept
    kept = jnp.where((ahead < sampling.top_p) | (rank == 0), kept, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, kept)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
