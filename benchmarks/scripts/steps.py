"""Steps of transfer_times.py and hurt_times.py: a random batch, and what each step takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import gtp_jax as gtp


def random_batch(vocab_size: int, rows: int, seq: int, replicas: gtp.nonuniform.Replicas | None = None) -> Any:
    """Returns tokens and targets, placed on replicas if there are any."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, (rows, seq), dtype=np.int32)
    batch: Any = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    return batch if replicas is None else replicas.place(batch)


def seconds_of_steps(step: Callable[[Any, Any], Any], state: Any, batch: Any, steps: int) -> list[float]:
    """Returns the seconds of each step, of which three more went before."""
    seconds = []
    for _ in range(3 + steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - start)
    return seconds[3:]
