"""What a link keeps of its forward pass for its backward pass, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

from ..ops import ACTIVATION, ROUTING, SAVED

Remat = Literal["nothing", "matmuls", "activations", "everything"]
REMAT: tuple[Remat, ...] = get_args(Remat)


def _saves_matmuls(primitive: Any, *_: Any, **params: Any) -> bool:
    # A product with batch dimensions is attention written out: sequence x sequence, never worth keeping.
    if primitive.name == "dot_general":
        return not any(params["dimension_numbers"][1])
    # Of a row-parallel product the sum over tp is kept, in place of the partial product; of products made part by part
    # (`collectives.gather_linear`), which this does not see into, the name.
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


def with_remat(function: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Returns `function`, keeping for backward only what the policy names.

    - `nothing`: the input alone; the forward pass is run again. Least memory. As under every policy, choices of experts
      are kept (`ops.save_routing`).
    - `matmuls`: outputs of matmuls, summed over tp where they are partial, and of fused attention, or what takes their
      place ahead of norms and attention (`ops.save_for_backward`); norms, activations and the tp axis' gathers of
      activations are run again. The default.
    - `activations`: those, and the inputs of matmuls that an activation function made (`ops.save_activation`), which
      are then not made again, for one number a hidden feature and row.
    - `everything`: all that backward needs; nothing is run again but the tp axis' gathers of activations.

    Raises:
        ValueError: on another name.
    """
    if remat not in _POLICIES:
        raise ValueError(f"`remat` is {remat!r}; it must be one of {sorted(_POLICIES)}.")
    if remat == "everything":
        return function
    # The chain keeps forward and backward apart itself ([Note: ties]); a second barrier would only hinder fusion.
    return jax.checkpoint(function, policy=_POLICIES[remat], prevent_cse=False)
