"""Provides TransformerEngine's FP8 matmuls for the partitioner contender. Needs only Python until `matmuls` is called.

Every linear layer of the blocks multiplies in FP8, forward and backward: inputs and weights in E4M3, gradients in E5M2,
each with one scale per tensor. As in gtp_jax's recipe `fp8-matmuls`, embedding and head stay in high precision. Weights
are gathered in bfloat16 and quantized afterwards.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

# `current`: the scale of a tensor comes from its own largest magnitude.
SCALINGS = ("current",)

PACKAGE = "transformer_engine"

# Names of the codes of inputs and of weights, by which rematerialization saves them.
_INPUTS, _KERNELS = "input codes", "weight codes"


def check(scaling: str | None, *, tp: int, experts: bool = False, cuda: bool = True) -> None:
    """Ends the program with a reason if `--te` cannot run here; does nothing without the flag.

    Args:
        scaling: one of `SCALINGS`, or `None`.
        tp: the tensor-parallel degree.
        experts: whether the model has experts.
        cuda: whether there are NVIDIA GPUs.
    """
    if scaling is None:
        return
    if tp > 1:
        sys.exit(f"error: --te shards only over gtp, but tp is {tp}; remove --te or --tp")
    if experts:
        sys.exit("error: --te supports only dense layers; remove --te or the experts")
    if importlib.util.find_spec(PACKAGE) is None:
        sys.exit(
            "error: --te needs TransformerEngine, which this Python cannot import; run `pip install "
            "--no-build-isolation 'transformer_engine[jax,core_cu13]'`"
        )
    if not cuda:
        sys.exit("error: --te needs NVIDIA GPUs, for TransformerEngine's matmuls; remove --te")


def version() -> str:
    """Returns the version of TransformerEngine."""
    return importlib.metadata.version(PACKAGE)


@dataclasses.dataclass(frozen=True)
class Matmuls:
    """How the linear layers of blocks multiply.

    Attributes:
        multiply: returns the product of `(sequence, token, input features)` and a weight `(input features, ...)`.
        saves: a policy for `jax.checkpoint`: returns whether backward uses what forward computed with a primitive.
        context: the context in which the step is traced.
    """

    multiply: Callable[[Any, Any], Any]
    saves: Callable[..., bool]
    context: AbstractContextManager[Any]


def matmuls(scaling: str, *, keep_weights: bool) -> Matmuls:
    """Returns TransformerEngine's FP8 matmuls.

    Backward uses the products and the codes of the inputs that forward computed.

    Args:
        scaling: one of `SCALINGS`.
        keep_weights: whether backward also uses the codes of the weights, instead of quantizing the weights again.
    """
    import jax.numpy as jnp
    from transformer_engine.jax.checkpoint_policies import te_gemms_saveable
    from transformer_engine.jax.dense import dense
    from transformer_engine.jax.quantize import QuantizerFactory, ScalingMode
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    mode = {"current": ScalingMode.CURRENT_TENSOR_SCALING}[scaling]
    quantizers = QuantizerFactory.create_set(
        scaling_mode=mode, fwd_dtype=jnp.float8_e4m3fn, bwd_dtype=jnp.float8_e5m2, checkpoint_name=_INPUTS
    )
    kernel = dataclasses.replace(quantizers.kernel, checkpoint_name=_KERNELS)
    quantizers = dataclasses.replace(quantizers, kernel=kernel)
    kept = (_INPUTS, _KERNELS) if keep_weights else (_INPUTS,)

    def saves(primitive: Any, *_: Any, **known: Any) -> bool:
        return te_gemms_saveable(primitive) or (primitive.name == "name" and known["name"] in kept)

    return Matmuls(
        multiply=lambda x, w: dense(x, w, contracting_dims=((x.ndim - 1,), (0,)), quantizer_set=quantizers),
        saves=saves,
        context=global_shard_guard(MeshResource(fsdp_resource="gtp")),
    )
