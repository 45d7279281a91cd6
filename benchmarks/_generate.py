"""Times the generation of a token, and compares it with the time to read the weights and the cache from memory."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time

import jax
from flax import nnx

import gtp_jax as gtp
from gtp_jax.generation import STEPS
from gtp_jax.hlo import CHIPS, fact
from gtp_jax.models import ModelConfig, build

# The goal: the time per token is at most this multiple of the time to read its weights and cache.
GENERATE_GOAL = 2.0

_ITEM = 2  # bytes of a weight, a key or a value in bfloat16


@dataclasses.dataclass(frozen=True)
class Decode:
    """The time per token of one row, after the first token, and the bytes that a token must read.

    Attributes:
        seconds: the seconds per token: the median over calls of the decoding program, each of which generates `STEPS`
            tokens.
        low_s: the seconds per token in the fastest call.
        high_s: the seconds per token in the slowest call.
        calls: the number of timed calls.
        weight_bytes: the size of the weights that a token is multiplied with, in bytes.
        cache_bytes: the size of the keys and values that the token in the middle of the timed tokens attends to, in
            bytes.
    """

    seconds: float
    low_s: float
    high_s: float
    calls: int
    weight_bytes: int
    cache_bytes: int

    def over_reading(self, bytes_per_s: float) -> float:
        """Returns the time per token divided by the time to read its weights and cache at this memory bandwidth."""
        return self.seconds * bytes_per_s / (self.weight_bytes + self.cache_bytes)


def measure_generate(config: ModelConfig, *, prompt: int, tokens: int) -> Decode:
    """Generates twice from one prompt, with random weights and bfloat16 matmuls, and times the second generation.

    Args:
        config: the model's configuration.
        prompt: the number of tokens in the prompt.
        tokens: the number of new tokens. The prompt's program generates the first one. Of the calls after it, only
            those that generate a full `STEPS` tokens are timed.

    Raises:
        ValueError: if there are too few new tokens for one full call.
    """
    if tokens <= STEPS:
        raise ValueError(
            f"`tokens` is {tokens}, but the prompt's program generates the first token, and at least {STEPS} more are "
            f"needed to time decoding. Use {STEPS + 1} or more."
        )
    model = gtp.init(lambda rngs: build(config, rngs=rngs), nnx.Rngs(0))
    row = jax.random.randint(jax.random.key(1), (1, prompt), 0, config.vocab_size)
    seconds = []
    for _ in range(2):  # the first iteration compiles
        stream = gtp.generation.generate_stream(model, row, max_new_tokens=tokens)
        next(stream)
        seconds, begin = [], time.perf_counter()
        for made in stream:
            now = time.perf_counter()
            if made.shape[1] == STEPS:
                seconds.append((now - begin) / STEPS)
            begin = now
    seen = prompt + 1 + STEPS * len(seconds) // 2
    heads = getattr(config, "num_kv_heads", config.num_heads)
    return Decode(
        seconds=statistics.median(seconds),
        low_s=min(seconds),
        high_s=max(seconds),
        calls=len(seconds),
        weight_bytes=_ITEM * config.matmul_params(),
        cache_bytes=2 * _ITEM * config.num_layers * heads * config.head_dim * seen,
    )


def memory_rate(device_kind: str) -> float | None:
    """Returns the memory bandwidth of a kind of device in bytes per second; `None` if `gtp_jax.hlo` does not know it.

    The known bandwidths are those of SXM modules.
    """
    words = set(re.findall(r"\w+", device_kind.lower()))
    chip = next((chip for chip in CHIPS if chip in words and not words & {"pcie", "nvl"}), None)
    return None if chip is None else fact(chip, "memory_rate").value
