"""Moments in bfloat16, and bfloat16 parameters without float32 masters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from placed import placed

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.optimizers import low_precision, stochastic_rounding

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64
)
ADAM = low_precision(optax.adamw(1e-2))
TOKENS = np.random.default_rng(0).integers(0, 64, (8, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def begin(optimizer, seed=3):
    return gtp.TrainState.create(placed(lambda rngs: Llama(CONFIG, rngs=rngs), seed), optimizer)


def losses(optimizer, steps=20):
    state, step, found = begin(optimizer), gtp.train_step(next_token_loss, optimizer), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        found.append(float(metrics["loss"]))
    return state, found


def test_losses_follow_float32_and_checkpoints_hold_sharded_moments_exactly(tmp_path):
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        _, wanted = losses(optax.adamw(1e-2))
        state, found = losses(ADAM)
        assert wanted[-1] < wanted[0] / 2
        np.testing.assert_allclose(found, wanted, rtol=0.05)
        moments = state.opt_state.inner_state[0].nu
        for param, moment in zip(jax.tree.leaves(state.params), jax.tree.leaves(moments), strict=True):
            assert moment.dtype == jnp.bfloat16
            assert 2 * moment.addressable_shards[0].data.nbytes == param.addressable_shards[0].data.nbytes
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(20, state)
        checkpoints.wait()
    with jax.set_mesh(gtp.make_mesh(dp=4, gtp=2)):
        restored, _ = Checkpoints(tmp_path).restore(begin(ADAM, 4))
    for found, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("optimizer, dtype", [(ADAM, "float32"), (stochastic_rounding(optax.adamw(1e-2)), "bfloat16")])
def test_an_update_of_shards_has_no_collective_and_the_same_bits_as_on_one_device(optimizer, dtype):
    params = {"w": jnp.linspace(-1, 1, 64 * 8).reshape(64, 8).astype(dtype)}
    update = jax.jit(lambda p, s: optimizer.update(p, s, p))
    wanted = update(params, optimizer.init(params))
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        rows = jax.sharding.NamedSharding(gtp.mesh.mesh_of_devices("test"), jax.sharding.PartitionSpec("gtp"))
        own = jax.tree.map(lambda a: jax.device_put(a, rows) if a.ndim else a, (params, optimizer.init(params)))
        compiled = update.lower(*own).compile()
        assert not hlo.collectives(compiled.as_text())
        found = compiled(*own)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, wanted)


def test_applied_updates_are_bfloat16_neighbors_and_right_on_average():
    rng = np.random.default_rng(0)
    size = 1 << 16
    p, u = (rng.choice([-1, 1], size) * np.exp2(rng.uniform(-60, 60, size)) for _ in range(2))
    p = jnp.asarray(p, jnp.bfloat16)
    u = jnp.where(rng.random(size) < 0.5, jnp.asarray(u, jnp.float32), -p.astype(jnp.float32) * (1 + 2.0**-20))
    optimizer = stochastic_rounding(optax.identity())
    update = jax.jit(optimizer.update)
    moved, _ = update({"w": u}, optimizer.init({"w": p}), {"w": p})
    new = optax.apply_updates({"w": p}, moved)["w"]
    words, exact = (np.asarray(a).view(np.uint32) for a in (new.astype(jnp.float32), p.astype(jnp.float32) + u))
    below = exact & 0xFFFF0000
    assert ((words == below) | ((words == below + 0x10000) & (exact != below))).all()
    one = {"w": jnp.ones(size, jnp.bfloat16)}
    moved, _ = update({"w": jnp.full(size, 2.0**-12)}, optimizer.init(one), one)
    mean = np.mean(np.asarray(optax.apply_updates(one, moved)["w"], np.float64)) - 1
    assert abs(mean * 2**12 - 1) < 0.1  # rounding to nearest gives 0


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ValueError, match="`moments` is 'fp8'"):
        low_precision(optax.sgd(1.0), moments="fp8")
    with pytest.raises(TypeError, match="is float16; `low_precision` rounds only float32"):
        ADAM.init({"w": jnp.zeros(4, jnp.float16)})
    optimizer = stochastic_rounding(optax.sgd(1.0))
    with pytest.raises(TypeError, match="'w' is float32; `stochastic_rounding` takes only bfloat16"):
        optimizer.init({"w": jnp.zeros(4)})
    with pytest.raises(ValueError, match="`params` is None"):
        optimizer.update({"w": jnp.zeros(4)}, optimizer.init({"w": jnp.zeros(4, jnp.bfloat16)}))
