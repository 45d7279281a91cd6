"""The oracle: every token through every expert, unsharded, in plain jnp; what was not chosen counts nothing."""

import jax
import jax.numpy as jnp


def plain_experts(params, x, top_k, eps):
    """A mixture on parameters named as gtp_jax names them.

    Returns `(batch, sequence, features)`, and the balance term: the sum over tokens of load times probability.
    """
    h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * params["scale"]
    probs = jax.nn.softmax(h @ params["router"], -1)
    likelier = jnp.sum(probs[..., None, :] > probs[..., :, None], -1)
    taken = (likelier < top_k).astype(x.dtype)
    combine_weights = probs * taken / jnp.sum(probs * taken, -1, keepdims=True)
    gate = jnp.einsum("bsi,ehi->bseh", h, params["up"]["kernel"]["gate"])
    up = jnp.einsum("bsi,ehi->bseh", h, params["up"]["kernel"]["up"])
    each = jnp.einsum("bseh,eoh->bseo", jax.nn.silu(gate) * up, params["down"]["kernel"])
    load = jax.lax.stop_gradient(jnp.mean(taken, 1, keepdims=True)) * probs.shape[-1] / top_k
    return jnp.einsum("bse,bseo->bso", combine_weights, each), jnp.sum(load * probs)
