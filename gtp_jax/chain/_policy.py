"""Rematerialization policies: what a layer saves in its forward pass for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax

from ..ops import ACTIVATION, ROUTING, SAVED

Remat = Literal["nothing", "matmuls", "activations", "everything", "offload", "offload-matmuls"]
REMAT: tuple[Remat, ...] = get_args(Remat)


def _saves_matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    # A product with batch dimensions is unfused attention: sequence x sequence, which is never worth saving.
    if primitive.name == "dot_general":
        return not any(params["dimension_numbers"][1])
    # For a row-parallel product, saves the sum over tp instead of the partial product. Products computed part by part
    # (`collectives.gather_linear`) are opaque here, so their named results are saved.
    if primitive.name == "name":
        return params["name"] in (SAVED, ROUTING)
    return primitive.name in ("reduce_scatter", "psum") or "dot_product_attention_fwd" in primitive.name


def _saves_activations(primitive: Any, *avals: Any, **params: Any) -> bool:
    if primitive.name == "name" and params["name"] == ACTIVATION:
        return True
    return _saves_matmuls(primitive, *avals, **params)


_POLICIES: dict[str, Callable[..., Any] | None] = {
    "nothing": jax.checkpoint_policies.save_only_these_names(ROUTING),
    "matmuls": _saves_matmuls,
    "activations": _saves_activations,
    "everything": None,
}

# Policies whose saved values a chain keeps in the host's memory between the passes, each with the policy that saves the
# same values on the device.
OFFLOADED: Mapping[Remat, Remat] = {"offload": "nothing", "offload-matmuls": "matmuls"}


def with_remat(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Returns `function`, changed to save for backward only what the policy names.

    - `nothing`: saves only the input; the forward pass is run again. Uses the least memory. As with every policy, the
      choices of experts are saved (`ops.save_routing`).
    - `matmuls`: saves the outputs of matmuls, summed over tp where they are partial, and of fused attention, or the
      values that replace them before norms and attention (`ops.save_for_backward`). Norms, activation functions and the
      tp axis's gathers of activations are run again. The default.
    - `activations`: also saves those inputs of matmuls that an activation function computed (`ops.save_activation`), so
      that they are not recomputed. This costs one number per hidden feature and row.
    - `everything`: saves all that backward needs; only the tp axis's gathers of activations are run again.
    - `offload`, `offload-matmuls`: save what `nothing` and `matmuls` save. In a chain, it is kept in pinned memory of
      the host between the passes (`OFFLOADED`).

    Raises:
        ValueError: if there is no such policy.
    """
    if remat not in REMAT:
        raise ValueError(f"`remat` is {remat!r}; it must be one of {sorted(REMAT)}.")
    if remat == "everything":
        return function
    # The chain itself separates forward from backward ([Note: ties]); a second barrier would only prevent fusion.
    return jax.checkpoint(function, policy=_POLICIES[OFFLOADED.get(remat, remat)], prevent_cse=False)
