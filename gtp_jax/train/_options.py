"""Chooses the XLA options with which a training step is compiled for GPUs. Each option has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ._nccl import COLLECTIVE_KERNELS, OLDEST_NCCL, decides_collective_kernels, flags_in_environment, nccl_is_too_old


class Option(NamedTuple):
    """The value of a compile option, and the reason for it."""

    value: Any
    reason: str


_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
_ESTIMATOR = "xla_gpu_enable_analytical_sol_latency_estimator"
_RATES = "xla_gpu_experimental_collective_perf_table_path"
_SCATTERS = "xla_gpu_reduce_scatter_combine_threshold_bytes"

# On 4 x H200, the first four options together shortened the reference step from 403 ms, with XLA's defaults, to 391 ms.
GPU_OPTIONS: Mapping[str, Option] = {
    _SCHEDULER: Option(
        True, "collectives start early and end late; XLA enables this by default only with the estimator below"
    ),
    _ESTIMATOR: Option(
        False, "it overestimates the speed of NVLink collectives, so that they start too late to be hidden"
    ),
    "xla_gpu_all_gather_combine_threshold_bytes": Option(
        1 << 31, "launches all gathers of a layer as one; the chain's ties keep layers apart"
    ),
    _SCATTERS: Option(1 << 31, "launches all reduce-scatters of a layer as one"),
    # This shortened a step on an H100 from 59.7 to 54.8 ms for 100 M parameters, and from 139 to 132 ms for 1 B
    # (docs/experiments.md).
    "xla_gpu_enable_triton_gemm": Option(
        False,
        "cuBLAS computes every matmul: Triton's matmuls, which also compute their operands, are slower in a step, and "
        "convert FP8 operands back to 16 bits",
    ),
}

# Options that replace or extend `GPU_OPTIONS` if tp shards activations, because collectives over two axes are then in
# flight at once.
GPU_OPTIONS_WITH_TP: Mapping[str, Option] = {
    _ESTIMATOR: Option(
        True, "without it, all collectives count as equally long, and no weight's gather outlasts a tp collective"
    ),
    "xla_gpu_experimental_parallel_collective_overlap_limit": Option(
        2, "a weight's gather or reduce-scatter stays in flight while activations are sent over tp"
    ),
}

# Options that replace or extend `GPU_OPTIONS` if matmuls run in FP8 with one scale per tensor, at tp 1. On 2 x H200 the
# reference step took 279.2 ms without the latency estimator, and 276.2 ms with it; later 272.0 ms with XLA's rates of
# collectives, and 269.8 ms with these. If the file is missing, XLA uses its own.
GPU_OPTIONS_WITH_FP8: Mapping[str, Option] = {
    _ESTIMATOR: Option(True, "without it, no matmul overlaps the reduce-scatters of backward"),
    _RATES: Option(
        str(Path(__file__).with_name("nvlink_rates.txtpb")),
        "by XLA's own rates, a gather starts just before the matmul that should hide it, and gets no multiprocessor "
        "until that has ended",
    ),
}

# Options that extend `GPU_OPTIONS` if NCCL is too old for XLA's own all-reduce kernels, which would fail (see
# `_nccl.py`).
GPU_OPTIONS_WITH_OLD_NCCL: Mapping[str, Option] = {
    COLLECTIVE_KERNELS: Option(
        "", f"NCCL computes all-reduces: XLA's kernels fail with jaxlib 0.12 and an NCCL before {OLDEST_NCCL}"
    ),
}

# Options that extend `GPU_OPTIONS` if a part of the state is on the host.
GPU_OPTIONS_WITH_COPIES: Mapping[str, Option] = {
    "xla_gpu_enable_command_buffer": Option(
        "", "a command buffer runs the copies to the host and those from it one after another"
    ),
}

_EXCESS_PRECISION = "xla_allow_excess_precision"  # lets XLA remove a cast to a narrower dtype and back


def compile_options(
    platform: str,
    own: Mapping[str, Any] | None = None,
    *,
    tp: int = 1,
    fp8: bool = False,
    largest_unit: int = 0,
    copies: bool = False,
) -> dict[str, Any]:
    """Returns options for `jax.jit(compiler_options=...)`: those of `GPU_OPTIONS` and its variants on `gpu`, and only
    `own` on other platforms.

    If XLA_FLAGS in the environment sets one of these options, leaves it out, because a compile option would silently
    override the user's choice.

    Args:
        platform: the platform to compile for, such as `gpu`.
        own: options to add. They take precedence over the options that are chosen here, and over XLA_FLAGS.
        tp: the degree of the tp axis.
        fp8: whether matmuls run in FP8 with one scale per tensor.
        largest_unit: the size in bytes of one rank's part of the reduced gradients of the largest unit, for a model
            that runs in global view and that `gtp_jax.shard` has sharded; 0 for other models. A unit is a module whose
            weights are gathered together.
        copies: whether a part of the state is in the memory of the host.
    """
    variants = (GPU_OPTIONS_WITH_TP, tp > 1), (GPU_OPTIONS_WITH_FP8, fp8 and tp == 1), (GPU_OPTIONS_WITH_COPIES, copies)
    parts = (GPU_OPTIONS, *(options for options, applies in variants if applies))
    chosen = {name: option for part in parts for name, option in part.items()} if platform == "gpu" else {}
    if platform == "gpu" and largest_unit:
        # In global view, XLA itself inserts the reduction of a gradient where the gradient is computed, so gtp_jax
        # cannot order the reductions of two units. Without a limit, XLA combines them into one that starts late and
        # does not overlap with computation (docs/experiments.md).
        chosen[_SCATTERS] = Option(largest_unit * 17 // 16, "launches the gradients of one unit, and no more, as one")
    theirs = flags_in_environment()
    if platform == "gpu" and not decides_collective_kernels(theirs) and nccl_is_too_old():
        chosen |= GPU_OPTIONS_WITH_OLD_NCCL
    return {**{name: option.value for name, option in chosen.items() if name not in theirs}, **(own or {})}


def check_excess_precision(own: Mapping[str, Any]) -> None:
    """Checks that XLA does not round the scales of `FP8Delayed`, which products on GPUs cast to the model's dtype and
    back.

    Args:
        own: options for `jax.jit(compiler_options=...)`.

    Raises:
        ValueError: if they, or otherwise XLA_FLAGS, make XLA perform these casts.
    """
    where = "`compiler_options`" if _EXCESS_PRECISION in own else "XLA_FLAGS"
    value = {**flags_in_environment(), **own}.get(_EXCESS_PRECISION, True)
    if str(value).lower() in ("false", "0"):
        raise ValueError(
            f"{where} sets `{_EXCESS_PRECISION}` to {value}, with which XLA would round the float32 scales of "
            "`FP8Delayed` to the dtype of the model. Leave the option out, or pass `gtp_jax.FP8(matmuls=True)`, whose "
            "scales are powers of two."
        )


def accepts(name: str, value: Any) -> bool:
    """Returns whether the installed XLA accepts a compile option with this value."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
