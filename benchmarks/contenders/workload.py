"""The step that every contender of `gtp-jax bench step` runs, and how it reports. Needs only Python.

Each contender is a script of its own that takes these flags, so that anyone can run it by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

LEARNING_RATE = 1e-4
WEIGHT_DECAY = 1e-4  # AdamW with b1 0.9, b2 0.999, eps 1e-8: what optax takes by default

# In which every contender sums a weight's gradient over the ranks, unless a flag says otherwise. It is the default of
# FSDP2's mixed precision, the compute dtype, and not that of gtp_jax, which sums in float32.
REDUCE_DTYPE = "bfloat16"

# What XLA records into command buffers (CUDA graphs): what it does by default, nothing, or every kind of command.
_EVERY_COMMAND = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
COMMAND_BUFFERS = {
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "on": {"xla_gpu_enable_command_buffer": _EVERY_COMMAND},
}

# The XLA options of a step of gtp_jax: those of `train_step`, or the defaults of a `jax.jit` of one's own.
XLA_OPTIONS = ("gtp_jax", "default")

NOT_OVER_TP = "supports experts, and norms of queries and keys, only at tp 1"

MARK = "RESULT "  # what the line with the figures begins with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a Llama: float32 masters and moments, bfloat16 compute and gradient reduction, AdamW.

    Attributes:
        vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, num_experts, top_k,
            aux_loss_coeff, shared_hidden, qk_norm, rope_theta, epsilon: the model, as in `LlamaConfig`.
        seq: tokens of a sequence.
        sequences: of a step, over all devices.
        microbatches: parts that a step's sequences are divided into, one after the other.
        gtp: shards of a weight, whose ranks have sequences of their own.
        ep: ranks that divide the experts, likewise with sequences of their own.
        tp: tensor-parallel degree, with sequence parallelism.
        warmup: steps ahead of the clock.
        steps: steps timed.
    """

    vocab_size: int = 32768
    hidden_size: int = 4096
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 14336
    num_experts: int = 0
    top_k: int = 2
    aux_loss_coeff: float = 0.01
    shared_hidden: int = 0
    qk_norm: bool = False
    rope_theta: float = 10_000.0
    epsilon: float = 1e-5
    seq: int = 8192
    sequences: int = 1
    microbatches: int = 1
    gtp: int = 1
    ep: int = 1
    tp: int = 1
    warmup: int = 3
    steps: int = 12

    def __post_init__(self) -> None:
        if self.sequences % (self.gtp * self.ep * self.microbatches):
            ranks = f"gtp {self.gtp}" if self.ep == 1 else f"gtp {self.gtp} x ep {self.ep}"
            raise ValueError(
                f"{self.sequences} sequences per step cannot be divided by {ranks} x {self.microbatches} "
                "microbatches. Change --tokens, --seq or --microbatches."
            )

    @property
    def model(self) -> dict[str, Any]:
        """The fields that are a `LlamaConfig`'s too."""
        return {name: getattr(self, name) for name in _OF_MODEL}

    @property
    def devices(self) -> int:
        """Returns how many it runs on."""
        return self.gtp * self.ep * self.tp

    @property
    def has_experts(self) -> bool:
        """Says whether layers have experts."""
        return self.num_experts > 0

    @property
    def matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with: of its experts those that it uses."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        of_tokens = self.top_k if self.num_experts else 1  # MLPs that a token is multiplied with
        mlp = 3 * self.hidden_size * (of_tokens * self.intermediate_size + self.shared_hidden)
        layer = attention + mlp + self.hidden_size * self.num_experts
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def divides_experts(self) -> bool:
        """Says whether ranks divide experts."""
        return self.ep > 1 and self.has_experts

    @property
    def is_ours_alone(self) -> bool:
        """Says whether FSDP2's script and the partitioner's do not run it."""
        return self.tp > 1 and (self.has_experts or self.qk_norm)

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all devices."""
        return self.seq * self.sequences

    @property
    def flags(self) -> list[str]:
        """The command line of a contender."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(self).items()]


_OF_MODEL = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "top_k",
    "aux_loss_coeff",
    "shared_hidden",
    "qk_norm",
    "rope_theta",
    "epsilon",
)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with a flag for each field of a workload."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in dataclasses.fields(Workload):
        kind: Any = _truth if isinstance(field.default, bool) else type(field.default)
        flags.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, help=" ")
    return flags


def workload(args: argparse.Namespace, *, all_over_tp: bool = False) -> Workload:
    """Returns the workload of parsed flags.

    Args:
        args: parsed.
        all_over_tp: whether the contender computes experts, and norms of queries and keys, at tp above 1 too; those
            that do not end here if there are any.
    """
    try:
        work = Workload(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)})
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not all_over_tp and work.is_ours_alone:
        sys.exit(f"error: {NOT_OVER_TP}")
    return work


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be True or False")
    return text == "True"


def report(seconds: Sequence[float], **facts: Any) -> None:
    """Prints a line for people and a line of JSON.

    Args:
        seconds: of each timed step; none of a step that was only compiled.
        facts: `compile_s`, `peak_bytes` a device, `loss` of the first step, `parameters`, `reduce_dtype` (in which
            weight gradients are sent and summed over the ranks), `versions` and the like.
    """
    if seconds:
        median, low, high = (1e3 * f(seconds) for f in (statistics.median, min, max))
        print(f"{median:.2f} ms a step ({low:.2f} to {high:.2f}, {len(seconds)} steps)")
    else:
        print(f"compiled in {facts['compile_s']:.1f} s")
    print(MARK + json.dumps({"seconds": list(seconds), **facts}), flush=True)
