"""Compiled steps of abstract models: nothing is allocated."""

from collections import Counter

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model


def lowered_step(config: LlamaConfig, mesh, *, batch: int, seq: int, microbatches: int = 1, gradients=False, **options):
    """The lowered train step, or its loss and gradients alone, on `batch` sequences.

    Of few tokens, the embedding sends rows instead of its table; see `Embed.group_for`.
    """
    with jax.set_mesh(mesh):
        optimizer = optax.sgd(0.1)
        model, recipe = abstract_model(lambda rngs: Llama(config, rngs=rngs)), options.get("recipe")
        state = gtp.TrainState.create(model, optimizer, recipe=recipe)
        axes = tuple(axis for axis in ("dp", "gtp", "ep") if axis in mesh.shape)
        tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=NamedSharding(mesh, P(axes)))
        data = {"tokens": tokens, "targets": tokens}
        if gradients:
            return jax.jit(lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, view="local")).lower(
                state, data
            )
        step = gtp.train_step(next_token_loss, optimizer, microbatches=microbatches, view="local", **options)
        return step.lower(state, data)


def counted(found: list[hlo.Collective]) -> Counter:
    """Times that each (pass, whole shape) moves, also if XLA has combined several into one collective."""
    count: Counter = Counter()
    for c in found:
        for whole in c.results if c.kind == "all-gather" else c.operands:
            count[c.direction, whole.dims] += c.times
    return count


def moves(jaxpr, times: int = 1):
    """The shapes and dtypes that a traced program moves to the host, and back, as often as they are."""
    found = {jax.memory.Space.Host: [], jax.memory.Space.Device: []}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "device_put":
            for space, one in zip(eqn.params["devices"], eqn.invars, strict=True):
                if space in found:
                    found[space] += [(one.aval.shape, one.aval.dtype)] * times
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            sub = getattr(value, "jaxpr", value)
            if hasattr(sub, "eqns"):
                for kept, more in zip(found.values(), moves(sub, inner), strict=True):
                    kept += more
    return list(found.values())
