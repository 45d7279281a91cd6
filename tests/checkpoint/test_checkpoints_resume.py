"""A run that restores goes on as if it had never stopped."""

import jax
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints

VOCAB, WIDTH = 1002, 64


class Bigram(nnx.Module):
    def __init__(self, rngs):
        self.embed = gtp.Embed(VOCAB, WIDTH, rngs=rngs)
        self.head = gtp.LayerNormDense(WIDTH, VOCAB, rngs=rngs)


def loss(model, tokens):
    return gtp.cross_entropy(model.head(model.embed(tokens[:, :-1])), tokens[:, 1:])


def test_resuming_equals_never_stopping(tmp_path, logical, assert_same_bits):
    optimizer = optax.adamw(1e-2)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (6, 4, 17))
    step = gtp.train_step(loss, optimizer)

    def run(state, first, saving=None):
        losses = []
        for index in range(first, len(tokens)):
            state, metrics = step(state, tokens[index])
            losses.append(float(metrics["loss"]))
            if saving is not None:
                saving.save(index + 1, state, {"next": index + 1})
        return state, losses

    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        state = gtp.TrainState.create(gtp.init(Bigram, nnx.Rngs(0)), optimizer)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        with Checkpoints(tmp_path, keep=None) as checkpoints:
            wanted, losses = run(state, 0, saving=checkpoints)
        assert len(set(losses)) == len(losses)
        for stop in (1, 4):
            state, extra = checkpoints.restore(like, step=stop)
            resumed, later = run(state, extra["next"])
            assert later == losses[stop:]
            assert_same_bits(logical(resumed, optimizer), logical(wanted, optimizer))
