"""`per_layer`, and a line search, over replicas of unequal degree."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp

from .unequal import FEATURES, HIDDEN, VOCAB, batches, loss

SHARED = dict(dtype="float64", param_dtype="float64")


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.embed = gtp.Embed(VOCAB, FEATURES, rngs=rngs, **SHARED)
        self.blocks = gtp.Stack(lambda rngs: gtp.MLP(FEATURES, HIDDEN, rngs=rngs, **SHARED), 2, rngs=rngs)
        self.head = gtp.nn.TiedHead(self.embed, param_dtype="float64", rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def trained(mesh, optimizer, replicas=None):
    with jax.set_mesh(mesh):
        state = gtp.TrainState.create(gtp.init(Stacked, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(loss, optimizer, view="local", replicas=replicas)
        for batch in list(batches(9))[:2]:
            state, _ = step(state, batch)
    return jax.tree.map(np.asarray, state.params)


@pytest.mark.slow
def test_over_replicas_layers_are_updated_as_on_one_device_and_a_line_search_is_refused(x64):
    replicas = gtp.nonuniform.Replicas(
        Stacked, gtp.nonuniform.plan_faults(dp=2, tp=2, failed=(3,), batch=9), jax.devices()[:4]
    )
    optimizer = gtp.train.per_layer(optax.lamb(0.1))
    found = trained(replicas.core, optimizer, replicas)
    wanted = trained(gtp.make_mesh(devices=jax.devices()[:1]), optimizer)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match=naming("other parameters `replicas`")):
        trained(replicas.core, optax.lbfgs(), replicas)
