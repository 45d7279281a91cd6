"""Defines the rematerialization policies: what a layer's forward pass saves for its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from .._words import REMAT, Remat
from ..ops import ACTIVATION, ATTENTION, ROUTING, SAVED, named_values_saved


def _saves_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    # cuDNN's kernel in jax.nn has no named results
    if primitive.name == "name":
        return params["name"] in (ATTENTION, ROUTING)
    return "dot_product_attention_fwd" in primitive.name


def _saves_matmuls(primitive: Any, *avals: Any, **params: Any) -> bool:
    # Products with batch dimensions are not saved. They are mainly those of unfused attention, whose scores have
    # sequence x sequence elements.
    if primitive.name == "dot_general":
        return not any(params["dimension_numbers"][1])
    # For a row-parallel product, the sum over tp is saved, so that backward does not need the partial product. Products
    # computed part by part (`collectives.gather_linear`) are opaque here, so their named results are saved.
    if primitive.name in ("reduce_scatter", "psum") or (primitive.name == "name" and params["name"] == SAVED):
        return True
    return _saves_attention(primitive, *avals, **params)


def _saves_activations(primitive: Any, *avals: Any, **params: Any) -> bool:
    if primitive.name == "name" and params["name"] == ACTIVATION:
        return True
    return _saves_matmuls(primitive, *avals, **params)


_POLICIES: dict[str, Callable[..., Any] | None] = {
    "nothing": jax.checkpoint_policies.save_only_these_names(ROUTING),
    "attention": _saves_attention,
    "matmuls": _saves_matmuls,
    "activations": _saves_activations,
    "everything": None,
}

# Policies whose saved activations a chain keeps in the host's memory between the passes, each with the policy that
# saves the same values on the device.
OFFLOADED: Mapping[Remat, Remat] = {
    "offload": "nothing",
    "offload-attention": "attention",
    "offload-matmuls": "matmuls",
}


# Policies that save on the device what `ops.save_for_backward` names.
_SAVE_NAMED = ("matmuls", "activations", "everything")


def with_remat(function: Callable[..., Any], remat: Remat, *, prevent_cse: bool = False) -> Callable[..., Any]:
    """Returns `function`, changed to save for backward what the policy selects.

    - `nothing`: saves only the input; the forward pass is run again. Without offloading, this policy uses the least
      memory. As with every policy, the choices of experts are saved (`ops.save_routing`).
    - `attention`: saves the input, and the output and log-sum-exp of fused attention (`ops.save_attention`), whose
      forward kernel is then not run again. All else is, including exchanges of heads over cp. Attention with
      an array of scores is run again too: its backward computes the scores in any case.
    - `matmuls`, the default of `Stack` and `shard`: saves the outputs of matmuls without batch dimensions, and of
      fused attention. Partial products are summed over tp first. Where a norm or attention needs only a value computed
      from an output, that value is saved instead (`ops.save_for_backward`). Norms, activation functions and gathers of
      activations over tp are run again.
    - `activations`: saves what `matmuls` saves, and those inputs of matmuls that an activation function computed
      (`ops.save_activation`), so that they are not recomputed. This costs one number per row and hidden feature. An MLP
      that runs as one operation in FP8 (`ops.swiglu_fp8`) stores no such input.
    - `everything`: saves all that backward needs, with these exceptions. Gathers of activations over tp may be run
      again. In a mixture of experts, tokens are always sent to their experts again, and the experts' activation
      function and any rounds after the first are run again.
    - `offload`, `offload-attention` and `offload-matmuls`: save what `nothing`, `attention` and `matmuls` save,
      respectively. Between the passes, a chain keeps the activations among these values in the host's pinned memory,
      except those of its last layer.

    Args:
        function: the function.
        remat: the policy.
        prevent_cse: whether to separate backward from forward with barriers, for callers without barriers of their own
            ([Note: ties]). Where there are such barriers, more would only prevent fusion.

    Raises:
        ValueError: if there is no such policy.
    """
    if remat not in REMAT:
        raise ValueError(f"`remat` is {remat!r}; it must be one of {sorted(REMAT)}.")

    @functools.wraps(function)
    def in_scope(*args: Any, **kwargs: Any) -> Any:
        with named_values_saved(remat in _SAVE_NAMED):
            return function(*args, **kwargs)

    if remat == "everything":
        return in_scope
    return jax.checkpoint(in_scope, policy=_POLICIES[OFFLOADED.get(remat, remat)], prevent_cse=prevent_cse)
