"""Provides torchao's FP8 matmuls for the FSDP2 contender. Only `convert` and FP8 experts need torch and torchao.

Every linear layer except the head multiplies in FP8, forward and backward: inputs and weights in E4M3, gradients in
E5M2 (`tensorwise`) or E4M3 (`rowwise`). gtp_jax's recipe `fp8-matmuls` also leaves embedding and head in high
precision. Experts use torchao's grouped FP8 matmul, which always has one scale per row; their router
is not in FP8.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

# `tensorwise`: one scale per tensor; FSDP2 gathers FP8 codes. `rowwise`: one scale per row; FSDP2 gathers bfloat16.
SCALINGS = ("tensorwise", "rowwise")


_GROUPED, _TO_GROUPED = "torchao.prototype.moe_training", "_to_fp8_rowwise_then_scaled_grouped_mm"


def check(scaling: str | None, *, tp: int, experts: bool = False, cuda: bool = True) -> None:
    """Ends the program with a reason if `--float8` cannot run here; does nothing without the flag.

    Args:
        scaling: one of `SCALINGS`, or `None`.
        tp: the tensor-parallel degree.
        experts: whether the model has experts.
        cuda: whether there are NVIDIA GPUs.
    """
    if scaling is None:
        return
    if tp > 1:
        sys.exit(f"error: --float8 shards only over gtp, but tp is {tp}; remove --float8 or --tp")
    if importlib.util.find_spec("torchao") is None:
        sys.exit("error: --float8 needs torchao, which this Python cannot import; run `pip install torchao`")
    if experts and not cuda:
        sys.exit("error: --float8 with experts needs NVIDIA GPUs; remove --float8 or the experts")
    if experts and not _has_grouped_matmul():
        sys.exit("error: --float8 with experts needs torchao's grouped FP8; run `pip install 'torchao>=0.17'`")


def _has_grouped_matmul() -> bool:
    try:
        return hasattr(importlib.import_module(_GROUPED), _TO_GROUPED)
    except ImportError:
        return False


def grouped_matmul() -> Callable[..., Any]:
    """Returns an FP8 replacement of `torch._grouped_mm`. Each group must have a multiple of 16 rows."""
    multiply = getattr(importlib.import_module(_GROUPED), _TO_GROUPED)

    def rowwise(x: Any, kernels: Any, *, offs: Any) -> Any:
        return multiply(x, kernels, offs, pad_token_groups_for_grouped_mm=False)

    return rowwise


def convert(model: Any, scaling: str, *, emulate: bool) -> Callable[[], None]:
    """Replaces the linear layers of a model, except the head, by torchao's `Float8Linear`.

    Call this before `fully_shard`.

    Args:
        model: the model, on the meta device.
        scaling: one of `SCALINGS`.
        emulate: whether to multiply the dequantized values in float32, for hardware without FP8 matmuls.

    Returns:
        A function to call once the weights are initialized, and after every update. If `tensorwise`, it computes the
        scales of all weights with one all-reduce; otherwise it does nothing.
    """
    from torch import nn
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    tensorwise = scaling == "tensorwise"
    recompute = "force_recompute_fp8_weight_in_bwd"  # newer versions of torchao leave this to the compiler
    known = {recompute: True} if recompute in {f.name for f in dataclasses.fields(Float8LinearConfig)} else {}
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(scaling),
        enable_fsdp_float8_all_gather=tensorwise,
        emulate=emulate,
        **(known if tensorwise else {}),
    )

    def supports_fp8_matmul(module: Any, name: str) -> bool:
        return isinstance(module, nn.Linear) and "head" not in name

    convert_to_float8_training(model, config=config, module_filter_fn=supports_fp8_matmul)
    return (lambda: precompute_float8_dynamic_scale_for_fsdp(model)) if tensorwise else (lambda: None)
