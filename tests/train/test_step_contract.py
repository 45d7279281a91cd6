"""What a step promises beside its numbers: donation, one compilation, a mesh, batches without tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from placed import placed
from selection import every

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn._init import _birth

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    dtype="float32",
)


# several tests share their programs
MESH, ADAMW, SGD = dict(dp=2, gtp=2, tp=2), optax.adamw(1e-2), optax.sgd(1.0)
STEP, EVALUATE = gtp.train_step(next_token_loss, SGD), gtp.eval_step(next_token_loss)


@functools.cache
def created(mesh, optimizer):
    """Returns the first state on a mesh, which is in scope: its values, and where they are."""
    model = placed(lambda rngs: Llama(CONFIG, rngs=rngs), 1)
    state = gtp.TrainState.create(model, optimizer)
    return jax.tree.map(np.asarray, state), jax.tree.map(lambda a: a.sharding, state)


def make_state(optimizer=ADAMW):
    """Returns a state of its own arrays, which may be donated."""
    return jax.device_put(*created(jax.sharding.get_mesh(), optimizer))


def make_batch(key, size=8, length=8, **weights):
    tokens = jax.random.randint(key, (size, length + 1), 0, CONFIG.vocab_size)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **weights}


def host(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_the_state_is_donated_and_a_step_is_compiled_once(key):
    compiled = []

    def listen(event: str, seconds: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        state, batch = make_state(), make_batch(key)
        step = gtp.train_step(next_token_loss, ADAMW, microbatches=2)
        state, _ = step(state, batch)
        before = jax.tree.leaves((state.params, state.opt_state))
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            state, _ = step(state, batch)
            state, _ = step(state, batch)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert all(array.is_deleted() for array in before)
    assert not compiled


def test_a_batch_without_tokens_is_no_loss_and_moves_nothing(key):
    with jax.set_mesh(gtp.make_mesh(**MESH)):
        state = make_state(SGD)
        before = host(state.params)
        batch = make_batch(key, weights=jnp.zeros((8, 8)))
        assert float(EVALUATE(state, batch)["loss"]) == 0
        state, metrics = STEP(state, batch)
    assert {name: float(value) for name, value in metrics.items()} == {
        "loss": 0,
        "tokens": 0,
        "grad_norm": 0,
        "skipped": 0,
    }
    for a, b in zip(host(state.params), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_arguments_by_name_are_those_by_place(key):
    state, batch = make_state(), make_batch(key)
    step, evaluate = gtp.train_step(next_token_loss, ADAMW), gtp.eval_step(next_token_loss)
    assert float(evaluate(state=state, batch=batch)["loss"]) == float(evaluate(state, batch)["loss"])
    assert step.eval_shape(batch=batch, state=state)[0].step.shape == ()
    after, metrics = step(skip=True, batch=batch, state=state)
    assert bool(metrics["skipped"]) and all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    with pytest.raises(TypeError, match="'skipp'"):
        step(after, batch, skipp=True)


def test_weight_decay_moves_weights_in_a_batch_without_tokens_unless_it_is_skipped(key):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        optimizer = optax.adamw(0.1, weight_decay=0.5)
        batch = make_batch(key, weights=jnp.zeros((8, 8)))
        step, state = gtp.train_step(next_token_loss, optimizer), make_state(optimizer)
        before = host(state.params)
        state, metrics = step(state, batch, skip=True)
        assert bool(metrics["skipped"])
        for a, b in zip(host(state.params), before, strict=True):
            np.testing.assert_array_equal(a, b)
        state, metrics = step(state, batch, skip=False)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0 and not bool(metrics["skipped"])
    for a, b in zip(host(state.params), before, strict=True):
        np.testing.assert_allclose(a, (1 - 0.1 * 0.5) * b, rtol=1e-5)


def test_a_batch_of_nothing_is_refused(key):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        state = make_state(SGD)
        for view in ("global", "local"):
            step = gtp.train_step(next_token_loss, SGD, view=view)
            for size, length in ((0, 8), (8, 0)):
                message = rf"`batch`\['targets'\] has shape \({size}, {length}\), so it has no elements. Leave out"
                for run in (step, gtp.eval_step(next_token_loss, view=view)):
                    with pytest.raises(ValueError, match=message):
                        run(state, make_batch(key, size, length))


def test_a_negative_target_is_left_out_like_a_weight_of_zero(key):
    with jax.set_mesh(gtp.make_mesh(**MESH)):
        state, batch = make_state(SGD), make_batch(key)
        out = jax.random.bernoulli(key, 0.3, (8, 8))
        marked = EVALUATE(state, {**batch, "targets": jnp.where(out, -100, batch["targets"])})
        weighed = EVALUATE(state, {**batch, "weights": jnp.asarray(~out, jnp.float32)})
    assert float(marked["tokens"]) == float(weighed["tokens"]) == float(jnp.sum(~out))
    assert float(marked["loss"]) == float(weighed["loss"])


def test_evaluation_is_the_loss_that_the_next_step_reports(key):
    with jax.set_mesh(gtp.make_mesh(**MESH)):
        state, batch = make_state(SGD), make_batch(key, weights=jnp.ones((8, 8)))
        found = EVALUATE(state, batch)
        _, metrics = STEP(state, batch)
    assert float(found["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(found["tokens"]) == float(metrics["tokens"]) == 64


def test_gradients_outside_of_jit_are_those_within(key):
    x = jax.random.normal(key, (4, 2, 8))  # on no mesh

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        state = gtp.TrainState.create(placed(lambda rngs: gtp.MLP(8, 16, rngs=rngs), 1), optax.sgd(0.1))
        for count in (1, 2):
            call = lambda state, x, count=count: gtp.loss_and_gradients(loss, state, x, microbatches=count)  # noqa: E731
            for found, wanted in zip(host(call(state, x)), host(jax.jit(call)(state, x)), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-5)


def test_a_state_made_for_another_mesh_is_refused(key):
    state = make_state()
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        message = (
            "was built for a mesh with gtp 1 x tp 1; the mesh in scope has gtp 8 x tp 1. Build the model under that"
        )
        with pytest.raises(ValueError, match=message):
            gtp.train_step(next_token_loss, ADAMW)(state, make_batch(key))
        with pytest.raises(ValueError, match=message):
            gtp.eval_step(next_token_loss)(state, make_batch(key))


@pytest.mark.parametrize("degrees", [dict(gtp=8), dict(gtp=4, tp=2)], ids=str)
def test_no_device_holds_a_whole_model_at_birth(degrees):
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=64, intermediate_size=768
    )
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        _, make, keys = _birth(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0))
        memory = make.lower(keys).compile().memory_analysis()
    whole = 4 * config.param_count()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < whole / 2


def _sum(model, batch):
    return next_token_loss(model, batch)[0]


def _pair(second):
    return lambda model, batch: (_sum(model, batch), second(model, batch))


@pytest.mark.parametrize("view, degrees", every(2, [("local", dict(gtp=2, dp=2)), ("global", dict(gtp=4, tp=2))]))
def test_a_forgotten_has_aux_is_refused_where_the_number_has_a_gradient(view, degrees, key):
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])):
        state, batch = make_state(), make_batch(key)

        def traced(loss):
            jax.eval_shape(lambda s, b: gtp.loss_and_gradients(loss, s, b, view=view), state, batch)

        with pytest.raises(TypeError, match=r"uses the second, float32, as the number of tokens.*`has_aux=True`.*stop"):
            traced(_pair(lambda model, batch: _sum(model, batch) / 7))
        with pytest.raises(TypeError, match="uses the second, float32, as the number of tokens"):
            evaluate = gtp.eval_step(_pair(lambda model, batch: _sum(model, batch) / 7), view=view)
            jax.eval_shape(evaluate, state, batch)
        jax.eval_shape(gtp.eval_step(next_token_loss, view=view), state, batch)
        traced(_pair(lambda model, batch: lax.stop_gradient(_sum(model, batch)) / 7))
        traced(_pair(lambda model, batch: jnp.sum(model(batch["tokens"]) > 0)))  # integers have none
        traced(_pair(lambda model, batch: jnp.sum(batch["targets"] >= 0, dtype=jnp.float32)))
        traced(next_token_loss)
        if view == "local":  # summed together
            traced(lambda model, batch: lax.psum(next_token_loss(model, batch), "gtp"))


def test_a_parameter_of_integers_is_named():
    class Shifted(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.shift = nnx.Linear(4, 4, rngs=rngs), nnx.Param(jnp.arange(4))

        def __call__(self, x):
            return self.linear(x) + self.shift[...]

    def loss(model, x):
        return (model(x) ** 2).mean()

    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state = gtp.TrainState.create(placed(Shifted), optax.sgd(0.1))
        with pytest.raises(
            TypeError, match="the parameter shift is int32, which has no gradient. Hold it in a subclass"
        ):
            gtp.train_step(loss, optax.sgd(0.1))(state, jnp.ones((8, 4)))
        assert gtp.eval_step(loss)(state, jnp.ones((8, 4)))["loss"] > 0  # which needs none
