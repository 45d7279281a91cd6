"""What people do with Flax models and JAX works with gtp_jax modules in them, on a mesh."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from placed import placed

import gtp_jax as gtp

BATCH, LENGTH, WIDTH, VOCAB = 8, 8, 16, 32
FLOAT = dict(dtype="float32")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = gtp.Attention(WIDTH, num_heads=4, num_kv_heads=2, rngs=rngs, **FLOAT)
        self.mlp = gtp.MLP(WIDTH, 32, rngs=rngs, **FLOAT)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = gtp.Embed(VOCAB, WIDTH, rngs=rngs, **FLOAT)
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), 2, rngs=rngs)
        self.head = gtp.nn.LayerNormDense(WIDTH, VOCAB, rngs=rngs, **FLOAT)

    def __call__(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


def batch_of(seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


@pytest.fixture
def mesh():
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        yield


def test_shapes_are_evaluated_without_computing(mesh):
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    assert model.embed.table.get_value().shape == (VOCAB, WIDTH)
    out = nnx.eval_shape(lambda m, t: m(t), model, jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32))
    assert out.shape == (BATCH, LENGTH, VOCAB)


@pytest.mark.full
def test_an_ensemble_is_a_vmap_over_parameters(mesh):
    graph, state = nnx.split(placed(Model))
    states = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), state)
    call, tokens = lambda state, tokens: nnx.merge(graph, state)(tokens), batch_of()["tokens"]
    together = jax.jit(jax.vmap(call, in_axes=(0, None)))(states, tokens)
    for number in range(2):
        alone = jax.jit(call)(jax.tree.map(lambda a, n=number: a[n], states), tokens)
        np.testing.assert_allclose(together[number], alone, atol=1e-4)


@pytest.mark.slow
def test_steps_in_a_scan_are_steps_in_a_loop(mesh):
    optimizer = optax.adamw(1e-2)
    step = gtp.train_step(loss, optimizer)
    state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optimizer)
    batches = [batch_of(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *batches)
    scanned, metrics = jax.jit(lambda s, b: lax.scan(step, s, b))(jax.tree.map(jnp.copy, state), stacked)
    losses = []
    for batch in batches:
        state, one = step(state, batch)
        losses.append(float(one["loss"]))
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(scanned.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.full
def test_a_teacher_that_averages_its_student_is_trained_beside_by_the_tools_of_nnx():
    @nnx.jit
    def step(model, teacher, optimizer, tokens):
        def distilled(model):
            return -(jax.nn.softmax(teacher(tokens)) * jax.nn.log_softmax(model(tokens))).sum(-1).mean()

        loss, gradients = nnx.value_and_grad(distilled)(model)
        optimizer.update(model, gradients)
        own, average = (nnx.state(one, nnx.Param) for one in (model, teacher))
        nnx.update(teacher, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, own))
        return loss

    found = []
    for scope in (contextlib.nullcontext(), jax.set_mesh(gtp.make_mesh(gtp=4, tp=2))):
        with scope:
            model, teacher = placed(Model), placed(Model, 1)
            optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
            losses = [step(model, teacher, optimizer, batch_of(seed)["tokens"]) for seed in range(3)]
            found.append(jax.tree.map(np.asarray, (losses, nnx.as_pure(nnx.state(teacher, nnx.Param)))))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
