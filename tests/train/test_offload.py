"""A state that is kept partly in the memory of the host trains like one that is not."""

import re
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import is_on_host
from gtp_jax.nn import Dense, abstract_model
from gtp_jax.optimizers import low_precision
from gtp_jax.train import compile_options, loss_and_gradients

from ..hlo.programs import needs_target

ROWS, COLUMNS = 257, 512  # a number of rows that the blocks do not divide
WHERE = (None, "optimizer", "masters")


class Model(nnx.Module):
    """One weight of ours, one of Flax, and vectors."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.up = Dense(ROWS, COLUMNS, rngs=rngs)
        self.down = nnx.Linear(COLUMNS, 256, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(seed: int, scale: float = 1.0):
    x, y = np.split(np.random.default_rng(seed).normal(size=(16, ROWS + 256)).astype(np.float32), [ROWS], axis=1)
    return {"x": x * scale, "y": y}


def model_of() -> Model:
    return gtp.init(lambda rngs: Model(rngs=rngs), nnx.Rngs(0))


def state_of(optimizer, offload=None):
    model = abstract_model(lambda rngs: Model(rngs=rngs))
    return gtp.TrainState.create(model, optimizer, offload=offload)


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim > 1}


def assert_same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def by_height():
    """Multiplies updates by a factor that is 1 for whole weights of this model, but not for some of their blocks."""
    factor = lambda u: max(1.0, u.shape[0] / u.shape[-1] / 2)  # noqa: E731
    return optax.stateless_with_tree_map(lambda u, _: u * factor(u) if jnp.ndim(u) > 1 else u)


def two_moments(params):
    return OrderedDict(first=optax.tree.zeros_like(params), second=optax.tree.zeros_like(params))


def turned(updates, state, params=None):
    """Returns both moments as they were, in the other order."""
    return updates, OrderedDict(reversed(state.items()))


@pytest.fixture(scope="module")
def trained():
    """Returns, for each place of the state, the states after each of three steps. The gradient of the second batch is
    not finite, so its step is skipped."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.lion(optax.linear_schedule(1e-2, 1e-3, 5)))
    found = {}
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        step = gtp.train_step(loss, optimizer, max_grad_norm=1.0)
        for where in WHERE:
            state = gtp.TrainState.create(model_of(), optimizer, offload=where)
            found[where] = []
            for seed, scale in ((0, 1.0), (1, np.inf), (2, 1.0)):
                state, metrics = step(state, batch_of(seed, scale))
                assert bool(metrics["skipped"]) == (scale != 1.0)
                found[where].append((jax.tree.map(np.asarray, state), kinds(state.params), kinds(state.opt_state)))
            found[where].append(state)
    return optimizer, found


@pytest.mark.parametrize("where", WHERE[1:])
def test_steps_with_the_state_on_the_host_equal_steps_without_bit_for_bit(trained, where):
    for (own, *_), (plain, *_) in zip(trained[1][where][:3], trained[1][None][:3], strict=True):
        assert_same(own, plain)
    assert_same(trained[1][where][0][0].params, trained[1][where][1][0].params)  # the second step was skipped


@pytest.mark.parametrize(
    ("where", "params", "moments"),
    [(None, "device", "device"), ("optimizer", "device", "pinned_host"), ("masters", "pinned_host", "pinned_host")],
)
def test_a_step_keeps_every_array_in_the_memory_that_was_chosen(trained, where, params, moments):
    for _, of_params, of_moments in trained[1][where][:3]:
        assert (of_params, of_moments) == ({params}, {moments})


def test_a_checkpoint_moves_between_host_and_device_bit_for_bit(trained, tmp_path):
    optimizer, found = trained
    with Checkpoints(tmp_path) as checkpoints:
        with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
            checkpoints.save(3, found["masters"][-1])
        with jax.set_mesh(gtp.make_mesh(gtp=8)):
            for where in WHERE:
                like = state_of(optimizer, where)
                restored, _ = checkpoints.restore(like)
                assert_same(restored, found[None][2][0])
                assert kinds(restored.opt_state) == {"device" if where is None else "pinned_host"}


def test_an_evaluation_gradients_and_a_diagnosis_read_parameters_on_the_host(trained):
    optimizer, found = trained
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        evaluate = gtp.eval_step(loss)
        values = [float(evaluate(found[where][-1], batch_of(3))["loss"]) for where in (None, "masters")]
        assert values[0] == values[1]
        assert kinds(found["masters"][-1].model().up.kernel[...]) == {"device"}
        shapes = jax.eval_shape(lambda state: loss_and_gradients(loss, state, batch_of(3)), found["masters"][-1])
        assert not any(map(is_on_host, jax.tree.leaves(shapes)))
        batch = batch_of(3)
        batch["x"][5] = np.inf
        diagnosis = gtp.train.diagnose(loss, found["masters"][-1], batch)
        assert (diagnosis.parameter, diagnosis.sample, diagnosis.layer) == (None, 5, "up")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optax.lamb(1e-3), "the optimizer's update .* it reads '.*' as a whole"),
        (lambda: optax.contrib.muon(1e-3), "cannot be computed in blocks"),
        (lambda: gtp.optimizers.muon(1e-3), "cannot be computed in blocks"),
        (lambda: optax.MultiSteps(optax.adam(1e-3), 2), "cannot be computed in blocks"),
        (lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.adam(1e-3)), "it is not elementwise"),
        (lambda: optax.chain(optax.adam(1e-3), by_height()), "depends on the shape of its array"),
        (lambda: low_precision(optax.adam(1e-3)), "it is not elementwise"),
        (lambda: low_precision(optax.adam(1e-3), moments="float8"), "cannot be computed in blocks"),
        (lambda: optax.GradientTransformation(two_moments, turned), "it changes the structure of its state"),
    ],
    ids=[
        *("lamb", "muon", "shared muon", "multi-steps", "noise"),
        *("factor-of-the-shape", "bfloat16", "fp8", "order-of-the-state"),
    ],
)
def test_updates_that_are_not_elementwise_are_refused(make, message):
    optimizer = make()
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state = state_of(optimizer, "optimizer")
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(gtp.train_step(loss, optimizer), state, batch_of(0))


def test_an_update_with_side_effects_keeps_them():
    def reported(updates, _):
        jax.debug.callback(lambda _: None, optax.tree.norm(updates))
        return updates

    optimizer = optax.chain(optax.stateless(reported), optax.adam(1e-3))
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        step: Any = gtp.train_step(loss, optimizer)
        for where in WHERE:
            text = str(step.trace(state_of(optimizer, where), batch_of(0)).jaxpr)
            assert text.count("debug_callback[") == 1


def test_what_offload_cannot_do_is_refused_when_the_state_is_made(monkeypatch):
    with pytest.raises(ValueError, match="`offload` is set for an abstract model, but no mesh is in scope"):
        state_of(optax.adam(1e-3), "masters")
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        with pytest.raises(ValueError, match="`offload` is 'params'; it must be 'optimizer', 'masters', or `None`"):
            state_of(optax.adam(1e-3), "params")
        with gtp.layout.even_shares():
            model = abstract_model(lambda rngs: Dense(300, 515, rngs=rngs))
        with pytest.raises(ValueError, match="'kernel', which is stored padded"):
            gtp.TrainState.create(model, optax.adam(1e-3), offload="optimizer")
        monkeypatch.setattr("gtp_jax.train._host_memory.available_bytes", lambda: 1 << 20)
        with pytest.raises(ValueError, match=r"keeps .* of the state in the memory of this host, which has 0\.0 GiB"):
            gtp.TrainState.create(model_of(), optax.adam(1e-3), offload="masters")


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("where", WHERE[1:])
def test_compiled_for_8_h200s_the_state_stays_on_the_host_and_changes_in_place(where):
    mesh = gtp.make_mesh(gtp=8, devices=hlo.topology_devices(hlo.parse_target("h200:8")))
    with jax.set_mesh(mesh):
        model = abstract_model(lambda rngs: Dense(2048, 4096, rngs=rngs))
        optimizer = optax.adamw(1e-3)
        state = gtp.TrainState.create(model, optimizer, offload=where)
        like = {"x": jax.ShapeDtypeStruct((8, 2048), jnp.float32), "y": jax.ShapeDtypeStruct((8, 4096), jnp.float32)}
        options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", copies=True)}
        lowered: Any = gtp.train_step(loss, optimizer, max_grad_norm=1.0, compiler_options=options)
        compiled = lowered.lower(state, like).compile()
    memory = compiled.memory_analysis()
    on_host = (2 if where == "optimizer" else 3) * 2048 * 4096 * 4 // 8
    assert memory.host_argument_size_in_bytes == memory.host_alias_size_in_bytes == on_host
    assert memory.host_temp_size_in_bytes == 0
    text = compiled.as_text()
    blocks = re.findall(r"%dynamic-(?:update-)?slice-start\S* = \(\(f32\[2048,512\]\{1,0:S\(5\)\}", text)
    assert len(blocks) == 2 * (2 if where == "optimizer" else 3)  # one from the host and one to it for each array
