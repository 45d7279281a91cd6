"""Defines the training step that all contenders of `gtp-jax bench step` run, and how they report. Needs only Python.

Each contender is a script that takes these flags, so that anyone can run it on its own.
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
WEIGHT_DECAY = 1e-4  # AdamW with b1 0.9, b2 0.999 and eps 1e-8, the defaults of optax

# The dtype in which every contender sums weight gradients over the ranks, unless a flag says otherwise: the compute
# dtype, which is the default of FSDP2's mixed precision. The default of gtp_jax is float32.
REDUCE_DTYPE = "bfloat16"

# What XLA records into command buffers (CUDA graphs): what it chooses by default, nothing, or every kind of command.
_EVERY_COMMAND = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
COMMAND_BUFFERS = {
    "default": {},
    "off": {"xla_gpu_enable_command_buffer": ""},
    "on": {"xla_gpu_enable_command_buffer": _EVERY_COMMAND},
}

# The values that a step of gtp_jax checks before its update, and the `skip_nonfinite` for each.
SKIPS: dict[str, Any] = {"gradients": True, "loss": "loss", "nothing": False}

# The XLA options of a step of gtp_jax: those of `train_step`, or the defaults, as with a plain `jax.jit`.
XLA_OPTIONS = ("gtp_jax", "default")

NOT_OVER_TP = "supports experts, and norms of queries and keys, only at tp 1"
NOT_OVER_CP = "does not divide sequences over cp"

MARK = "RESULT "  # the beginning of the line with the results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a Llama with AdamW: float32 master weights and moments, and bfloat16 compute.

    Attributes:
        vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, intermediate_size, num_experts, top_k,
            aux_loss_coeff, shared_hidden, qk_norm, rope_theta, epsilon: the model, as in `LlamaConfig`.
        seq: the number of tokens per sequence.
        sequences: the number of sequences per step, over all devices.
        microbatches: the number of parts into which the sequences of a step are divided, to run one after another.
        gtp: the degree of the axis that shards weights. Each rank of gtp has its own sequences.
        cp: the number of ranks that divide each sequence.
        ep: the number of ranks that divide the experts. Each has its own sequences.
        tp: the tensor-parallel degree, with sequence parallelism.
        warmup: the number of steps before those that are timed.
        steps: the number of steps that are timed.
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
    cp: int = 1
    ep: int = 1
    tp: int = 1
    warmup: int = 3
    steps: int = 12

    def __post_init__(self) -> None:
        if self.sequences % (self.gtp * self.ep * self.microbatches):
            ranks = f"gtp {self.gtp}" if self.ep == 1 else f"gtp {self.gtp} x ep {self.ep}"
            raise ValueError(
                f"{self.sequences} sequences per step cannot be divided evenly by {ranks} x {self.microbatches} "
                "microbatches. Change --tokens, --seq or --microbatches."
            )

    @property
    def model(self) -> dict[str, Any]:
        """The fields that `LlamaConfig` also has."""
        return {name: getattr(self, name) for name in _OF_MODEL}

    @property
    def devices(self) -> int:
        """The number of devices that run the step."""
        return self.gtp * self.cp * self.ep * self.tp

    @property
    def has_experts(self) -> bool:
        """Whether layers have experts."""
        return self.num_experts > 0

    @property
    def matmul_parameters(self) -> int:
        """The number of parameters by which a token is multiplied, counting only the experts that it uses."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        of_tokens = self.top_k if self.num_experts else 1  # the number of MLPs that a token passes through
        mlp = 3 * self.hidden_size * (of_tokens * self.intermediate_size + self.shared_hidden)
        layer = attention + mlp + self.hidden_size * self.num_experts
        return self.num_layers * layer + self.vocab_size * self.hidden_size

    @property
    def divides_experts(self) -> bool:
        """Whether ranks divide the experts."""
        return self.ep > 1 and self.has_experts

    @property
    def ours_alone(self) -> str:
        """The reason why the scripts of FSDP2 and the partitioner cannot run the workload; an empty string if they
        can."""
        if self.cp > 1:
            return NOT_OVER_CP
        return NOT_OVER_TP if self.tp > 1 and (self.has_experts or self.qk_norm) else ""

    @property
    def tokens(self) -> int:
        """The number of tokens per step, over all devices."""
        return self.seq * self.sequences

    @property
    def flags(self) -> list[str]:
        """The flags of a contender for this workload."""
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
    """Returns the workload that the flags describe. Ends the program if its values are invalid.

    Args:
        args: the parsed flags.
        all_over_tp: whether the contender supports experts, and norms of queries and keys, at tp above 1, and cp. If
            not, such a workload ends the program.
    """
    try:
        work = Workload(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)})
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not all_over_tp and work.ours_alone:
        sys.exit(f"error: {work.ours_alone}")
    return work


def _truth(text: str) -> bool:
    if text not in ("True", "False"):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be True or False")
    return text == "True"


def report(seconds: Sequence[float], **facts: Any) -> None:
    """Prints results as a line for people and a line of JSON.

    Args:
        seconds: the duration of each timed step; empty if the step was only compiled.
        facts: other results: `compile_s`, `peak_bytes` per device, `loss` of the first step, `parameters`,
            `reduce_dtype` (in which weight gradients are sent and summed over the ranks), `versions` and others.
    """
    if seconds:
        median, low, high = (1e3 * f(seconds) for f in (statistics.median, min, max))
        print(f"{median:.2f} ms per step ({low:.2f} to {high:.2f}, {len(seconds)} steps)")
    else:
        print(f"compiled in {facts['compile_s']:.1f} s")
    print(MARK + json.dumps({"seconds": list(seconds), **facts}), flush=True)
