"""Checks that a model can be continued token by token."""

from __future__ import annotations

import inspect

from flax import nnx

from ..nn import Attention, AttentionCore, Conv, CrossAttention

# Modules that mix the tokens of a row, and for which `generate` makes no cache.
_MIXERS = (Conv, CrossAttention, nnx.MultiHeadAttention, nnx.Conv, nnx.ConvTranspose, nnx.RNN)


def check_model(model: nnx.Module) -> None:
    """Refuses a model that cannot be continued token by token, as far as its call and the types of its modules show.

    Raises:
        TypeError: if `model` is not an `nnx.Module` with a `__call__`.
        ValueError: if the model does not take `positions`, has no `Attention`, or has a module other than causal
            `Attention` that mixes the tokens of a row; the message names the module and the remedy.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` is a {type(model).__name__}; it must be an `nnx.Module` that returns logits.")
    kind = type(model).__name__
    if not callable(model):
        raise TypeError(
            f"`model` is a {kind}, which has no `__call__`. Write `def __call__(self, tokens, *, positions=None)`, "
            "which returns logits, or give the module in it that has one."
        )
    parameters = inspect.signature(type(model).__call__).parameters
    if "positions" not in parameters and not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        raise ValueError(
            f"{kind} does not take `positions`, which give a token's position when earlier tokens are cached. Write "
            "`def __call__(self, tokens, *, positions=None)`, and pass them to every `gtp_jax.Attention`, through a "
            "`Stack` as `shared={'positions': positions}`."
        )
    named = [(".".join(map(str, path)) or "the model", module) for path, module in nnx.iter_modules(model)]
    for where, module in named:
        if isinstance(module, _MIXERS):
            raise ValueError(
                f"{where} is a {type(module).__name__}, which mixes the tokens of a row but has no cache. Replace "
                "it by `gtp_jax.Attention`, the only module for which `generate` makes caches."
            )
    for where, module in named:
        if isinstance(module, AttentionCore) and not module.causal:
            raise ValueError(
                f"{where} attends to later tokens, so every new token would change the results of earlier ones. Build "
                "its `gtp_jax.Attention` with `causal=True`."
            )
    if not any(isinstance(module, Attention) for _, module in named):
        raise ValueError(
            f"{kind} has no `gtp_jax.Attention`, whose keys and values `generate` caches. Build it with one, or call "
            "the model on the whole sequence for every token."
        )
