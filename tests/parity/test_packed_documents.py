"""Documents packed into rows have the losses and gradients that they have alone, on every mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from placed import placed

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

VOCAB, ROW, ROWS = 60, 12, 8
F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)
SCALING = gtp.nn.RopeScaling(kind="llama3", factor=8.0, original_length=16)


class Block(nnx.Module):
    """Attention with all that documents must not see of each other."""

    def __init__(self, sequence_parallel, rngs):
        options = dict(sequence_parallel=sequence_parallel, rngs=rngs, **F64)
        heads = dict(num_heads=4, num_kv_heads=2, window=4, soft_cap=2.0, qk_norm=True, sinks=True, rope_theta=50.0)
        self.attention = gtp.Attention(16, **heads, **options)
        self.mlp = gtp.MLP(16, 24, **options)

    def __call__(self, x, **packed):
        x = x + self.attention(x, **packed)
        return x + self.mlp(x)


class Windowed(nnx.Module):
    def __init__(self, sequence_parallel, rngs):
        options = dict(sequence_parallel=sequence_parallel, rngs=rngs)
        self.embed = gtp.Embed(VOCAB, 16, **options, **F64)
        make = lambda rngs: Block(sequence_parallel, rngs)  # noqa: E731
        self.blocks = gtp.Stack(make, 2, **options)
        self.head = gtp.nn.LayerNormDense(16, VOCAB, **options, **F64)

    def __call__(self, tokens, positions=None, segment_ids=None):
        packed = {} if segment_ids is None else {"segment_ids": segment_ids}
        return gtp.nn.run_chain(tokens, self.embed, self.blocks, self.head, shared=packed)


def llama(sequence_parallel, rngs):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24,
        dtype="float64", rope_scaling=SCALING, rope_theta=50.0, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    return Llama(config, rngs=rngs)


def by_parts(rngs):
    return llama(True, rngs)


MODELS = {"llama": llama, "windows, caps and sinks": Windowed}
MESHES = {
    "no mesh": (None, True),
    "gtp 8": (dict(gtp=8), True),
    "gtp 4 x tp 2": (dict(gtp=4, tp=2), True),
    "dp 2 x gtp 2 x tp 2, whole sequence": (dict(dp=2, gtp=2, tp=2), False),
}


def documents():
    """Three lengths that fill a row, in another order in each."""
    rng = np.random.default_rng(0)
    return [[rng.integers(0, VOCAB, n) for n in rng.permutation([2, 4, 6])] for _ in range(ROWS)]


def packed(rows):
    tokens = np.stack([np.concatenate(row) for row in rows])
    targets = np.stack([np.concatenate([np.append(d[1:], -1) for d in row]) for row in rows])
    ids = np.stack([np.concatenate([np.full(len(d), 7 - i) for i, d in enumerate(row)]) for row in rows])
    return {"tokens": tokens, "targets": targets, "segment_ids": ids}


def alone(rows):
    """Each document in a row of its own, those of one place in a batch; what is behind it cannot be seen from it."""
    batches = []
    for documents in zip(*rows, strict=True):
        tokens, targets = np.zeros((ROWS, ROW), int), np.full((ROWS, ROW), -1)
        for row, document in enumerate(documents):
            tokens[row, : len(document)], targets[row, : len(document) - 1] = document, document[1:]
        batches.append({"tokens": tokens, "targets": targets})
    return batches


def measured(name, mesh, batches):
    """Sums of losses and of gradients of each batch, by `loss_and_gradients`."""
    degrees, sequence_parallel = MESHES[mesh]
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
        model = gtp.init(lambda rngs: MODELS[name](sequence_parallel, rngs), nnx.Rngs(3))
        state = gtp.TrainState.create(model, optax.sgd(1.0))
        run = jax.jit(lambda state, batch: gtp.train.loss_and_gradients(next_token_loss, state, batch))
        sums = []
        for batch in batches:
            loss, gradient = run(state, batch)
            tokens = (batch["targets"] >= 0).sum()
            flat = np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(gradient)])
            sums.append((float(loss) * tokens, flat * tokens))
        return sums


@functools.cache
def together(name, mesh):
    return measured(name, mesh, [packed(documents())])[0]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_losses_and_gradients_that_they_have_alone(name, x64):
    rows = documents()
    # of one shape, which is compiled once
    without_segments = {name: leaf for name, leaf in packed(rows).items() if name != "segment_ids"}
    *parts, (mixed, _) = measured(name, "no mesh", [*alone(rows), without_segments])
    total, gradients = (sum(sums) for sums in zip(*parts, strict=True))
    for mesh in MESHES:
        found, own = together(name, mesh)
        assert found == pytest.approx(total, rel=1e-13), mesh
        np.testing.assert_allclose(own, gradients, rtol=0, atol=1e-12 * np.abs(gradients).max(), err_msg=mesh)
    assert abs(mixed - total) > 1e-3 * total  # so that the test would see documents that see each other


@pytest.mark.full
def test_packed_documents_under_plain_jit_have_the_loss_of_a_step(x64):
    """In global view, where every module opens a `shard_map` of its own for its part of the segments."""
    batch = jax.tree.map(jnp.asarray, packed(documents()))
    wanted, _ = together("llama", "no mesh")
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        graph, params = nnx.split(placed(by_parts, 3))
        found = jax.jit(lambda params, batch: next_token_loss(nnx.merge(graph, params), batch)[0])(params, batch)
    assert float(found) == pytest.approx(wanted, rel=1e-13)


def test_given_positions_take_the_place_of_those_of_the_segments(x64):
    batch = packed(documents())
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        state = gtp.TrainState.create(placed(by_parts, 3), optax.sgd(1.0))
        evaluate = gtp.eval_step(next_token_loss)
        loss = lambda **more: float(evaluate(state, {**batch, **more})["loss"])  # noqa: E731
        own = np.asarray(gtp.ops.positions_of(jnp.asarray(batch["segment_ids"])))
        assert loss(positions=own) == loss()
        # a rotary embedding knows differences of positions only
        assert loss(positions=own + 5) == pytest.approx(loss(), rel=1e-13)
        assert abs(loss(positions=2 * own) - loss()) > 1e-6
