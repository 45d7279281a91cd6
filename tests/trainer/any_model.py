"""A small stock Flax model, its loss and its batches, which tests name or pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

import gtp_jax as gtp


class Net(nnx.Module):
    """Two layers of 128 features around an embedding of bytes, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, 64, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.Linear(64, 256, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + self.dropout(layer(x)[..., :64])
        return self.embed.attend(x)


def loss(model: Net, batch: dict[str, jax.Array]) -> Any:
    """The cross entropy of the next byte."""
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


def batches() -> Iterator[dict[str, np.ndarray]]:
    """One pass: three batches of 8 rows."""
    random = np.random.default_rng(0)
    for _ in range(3):
        rows = np.cumsum(random.integers(0, 3, (8, 9)), axis=1) % 256
        yield {"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)}


class Stateful:
    """An iterable whose iterators have a state, as grain's have."""

    def __init__(self) -> None:
        self.opened = 0
        self.made = 0

    def __iter__(self) -> StatefulIterator:
        self.opened += 1
        return StatefulIterator(self)


class StatefulIterator:
    """Counts the batches that it makes."""

    def __init__(self, of: Stateful) -> None:
        self._of, self._next = of, 0

    def __iter__(self) -> StatefulIterator:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        every = list(batches())
        if self._next == len(every):
            raise StopIteration
        self._next += 1
        self._of.made += 1
        return every[self._next - 1]

    def get_state(self) -> bytes:
        return str(self._next).encode()

    def set_state(self, state: bytes) -> None:
        self._next = int(state)
