"""Stages made by hand, without modules: plain functions, with weights that are gathered over one axis."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gtp_jax.chain import Outputs, Stage, with_remat

FEATURES = 8
AXIS = "gtp"


@jax.custom_vjp
def recorded(x, history):
    """`x`, whose gradient's largest magnitude is what `history` gets for a gradient, ahead of its older entries."""
    return x


recorded.defvjp(
    lambda x, history: (x, history),
    lambda history, g: (g, jnp.concatenate([jnp.max(jnp.abs(g))[None].astype(history.dtype), history[:-1]])),
)


def layer(weight, params, x, shared, constants) -> tuple[jax.Array, Outputs]:
    """One layer with every kind of input and output; `weight` is whole."""
    h = recorded(jnp.tanh(x @ weight) * params["scale"], params["history"])
    keep = jax.random.bernoulli(constants["key"], 0.7, h.shape)
    h = jnp.where(keep & shared["mask"][:, None], h, 0) + shared["bias"] * x
    mean = jnp.mean(h, axis=0)
    state = {"mean": 0.9 * constants["mean"] + 0.1 * mean}
    scalars = {"balance": jnp.mean(jnp.square(h))}
    return x + h - mean, Outputs(state, scalars, {"largest": jnp.max(jnp.abs(h))})


def arrays(length: int, seed: int = 0):
    """Weights, params and constants of layers, stacked."""
    rng = np.random.default_rng(seed)
    weights = jnp.asarray(rng.normal(size=(length, FEATURES, FEATURES)) / 3)
    params = {
        "scale": jnp.asarray(rng.normal(size=(length, FEATURES))),
        "history": jnp.asarray(rng.random((length, 3))),
    }
    keys = jax.random.split(jax.random.key(seed), length)
    return weights, params, {"key": keys, "mean": jnp.zeros((length, FEATURES))}


def shared_inputs(batch: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return {"mask": jnp.asarray(rng.random(batch) > 0.2), "bias": jnp.asarray(rng.normal(size=FEATURES))}


def stage(shards, params, constants, remat="nothing") -> Stage:
    """Layers whose weights are sharded along rows over `AXIS`; called in a `shard_map`."""

    def apply(weights, slots, params, x, shared, constants, turn):
        return layer(weights["w"], params, x, shared, constants)

    return Stage(
        {"w": shards},
        {"w": shards},
        params,
        gather=lambda _, one, prepared: {"w": lax.all_gather(one["w"], AXIS, axis=0, tiled=True)},
        reduce=lambda found: {"w": lax.psum_scatter(found[0]["w"], AXIS, scatter_dimension=0, tiled=True)},
        apply=with_remat(apply, remat),
        length=len(shards),
        stacked=True,
        constants=constants,
        takes_shared=True,
    )


def plain(weights, params, x, shared, constants):
    """The same layers in a Python loop: the output, and the outputs stacked."""
    found = []
    for k in range(len(weights)):
        pick = lambda a, k=k: a[k]  # noqa: E731
        x, outputs = layer(weights[k], jax.tree.map(pick, params), x, shared, jax.tree.map(pick, constants))
        found.append(outputs)
    return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)
