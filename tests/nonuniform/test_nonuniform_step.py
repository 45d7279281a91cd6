"""Replicas of unequal degree train as one device does, whatever the degrees divide."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.hlo import collectives

from .unequal import FEATURES, OPTIMIZER, STEPS, Everything, Tiny, batches, loss

# Leaves by name, which stand for the kinds of them; upstream has errors in those marked so.
KINDS = {
    "column-parallel": "mlp.up.kernel.up",
    "row-parallel (upstream adds unrelated elements)": "mlp.down.kernel",
    "row-parallel, of attention": "attention.out.kernel",
    "fused gate and up (upstream takes rows of one)": "mlp.up.kernel.gate",
    "fused query, key and value (upstream: no whole units)": "attention.qkv.kernel.key",
    "queries of groups": "attention.qkv.kernel.query",
    "values of groups": "attention.qkv.kernel.value",
    "scale of a norm (upstream leaves extra ranks out)": "mlp.up.scale",
    "shift of a norm": "attention.qkv.shift",
    "norm of queries": "attention.core.query_scale",
    "sinks of heads": "attention.core.sinks",
    "bias of columns": "mlp.up.bias.gate",
    "bias of rows (upstream leaves extra ranks out)": "mlp.down.bias",
    "router (upstream leaves extra ranks out)": "moe.router",
    "experts, first layer": "moe.up.kernel.gate",
    "experts, second layer": "moe.down.kernel",
    "vocabulary, tied": "embed.table",
    "divided evenly": "even.up.kernel.up",
    "a scalar": "temperature",
}


def named(tree):
    return {
        ".".join(str(key.key) for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def cut(tree, like):
    """Arrays without padding, in the shapes of those of `like`."""
    return jax.tree.map(lambda a, b: np.asarray(a)[tuple(map(slice, b.shape))], tree, like)


def train(factory, loss, data, *, plan=None, degrees=None, devices=None, optimizer=OPTIMIZER, roles=None, **options):
    """First gradient, losses, norms, parameters at the end; and replicas' weights after each step.

    Over the replicas of a plan, or on a mesh of these degrees; on one device if neither is given.
    """
    options = {"max_grad_norm": 0.5, "view": "local"} | options
    with gtp.mesh.use_roles(roles or gtp.mesh.Roles()):
        if plan is not None:
            replicas = gtp.nonuniform.Replicas(factory, plan, devices)
            mesh, options["replicas"] = replicas.core, replicas
        else:
            count = int(np.prod(list((degrees or {}).values())))
            mesh = gtp.make_mesh(**degrees or {}, devices=jax.devices()[:count])
        with jax.set_mesh(mesh):
            state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(3)), optimizer)
            step = gtp.train_step(loss, optimizer, **options)
            found = {"losses": [], "norms": [], "weights": [], "start": named(state.logical().params)}
            for batch in data:
                state, metrics = step(state, batch)
                found["losses"].append(float(metrics["loss"]))
                found["norms"].append(float(metrics["grad_norm"]))
                logical = state.logical()
                found.setdefault("gradient", named(logical.opt_state[0]))
                if plan is not None and not plan.uniform:
                    found["weights"].append([named(cut(weights, logical.params)) for weights in step.weights(state)])
            return found | {
                "end": named(logical.params),
                "state": state,
                "step": step,
                "mesh": mesh,
                "tokens": float(metrics["tokens"]),
            }


@functools.cache
def one_device(rows, experts="features", microbatches=1, seq=12):
    data = list(batches(rows, seq))
    return train(functools.partial(Everything, experts=experts), loss, data, microbatches=microbatches)


def assert_close(found, wanted, tolerance=1e-12):
    assert found["gradient"].keys() == wanted["gradient"].keys()
    for part, allowed in (("gradient", tolerance), ("end", 30 * tolerance)):  # Adam amplifies where a gradient is small
        for name, leaf in wanted[part].items():
            error = np.linalg.norm(found[part][name] - leaf) / max(np.linalg.norm(leaf), 1e-30)
            assert error <= allowed, f"{part} of {name}: {error:.2e}"
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=tolerance)
    np.testing.assert_allclose(found["norms"], wanted["norms"], rtol=10 * tolerance)
    assert found["tokens"] == wanted["tokens"]


def assert_replicas_agree(found, steps=STEPS):
    assert len(found["weights"]) == steps
    for after in found["weights"]:
        for weights in after[1:]:
            for name, leaf in after[0].items():
                np.testing.assert_array_equal(weights[name], leaf, err_msg=name)
    for name, leaf in found["end"].items():
        np.testing.assert_array_equal(found["weights"][-1][0][name], leaf, err_msg=name)


@pytest.fixture(scope="module")
def four_and_three():
    with jax.enable_x64(True):
        plan = gtp.nonuniform.plan_faults(dp=2, tp=4, failed=(5,), batch=14, microbatches=2)
        assert [replica.tp for replica in plan.replicas] == [4, 3]
        # 3 does not divide sequences of 16, so that the replica of that degree is not sequence parallel
        found = train(Everything, loss, list(batches(14, 16)), plan=plan, microbatches=2)
        yield found, one_device(14, microbatches=2, seq=16)


def test_the_gradient_of_every_kind_of_leaf_is_that_of_one_device(four_and_three):
    for kind, leaf in KINDS.items():
        found, wanted = (some["gradient"][leaf] for some in four_and_three)
        assert np.linalg.norm(wanted) > 0, kind
        assert np.linalg.norm(found - wanted) <= 1e-12 * np.linalg.norm(wanted), kind


def test_five_steps_at_four_and_three_are_those_of_one_device(four_and_three):
    assert_close(*four_and_three)


def test_replicas_have_the_same_bits_after_every_step(four_and_three):
    assert_replicas_agree(four_and_three[0])


TWO_AND_ONE = dict(dp=2, tp=2, failed=(3,), batch=9)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def place(degrees):
    return gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])


def begin(factory=Tiny, optimizer=OPTIMIZER, seed=3):
    return gtp.TrainState.create(gtp.init(factory, nnx.Rngs(seed)), optimizer)


class WithLoadOfAll(Tiny):
    def __init__(self, rngs):
        super().__init__(rngs)
        shared = dict(dtype="float64", param_dtype="float64", rngs=rngs)
        routing = gtp.nn.Routing(aux_loss="microbatch")
        self.moe = gtp.nn.MoE(FEATURES, 8, num_experts=4, top_k=2, aux_loss_coeff=0.1, routing=routing, **shared)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(x))


def test_equal_replicas_of_fewer_devices_are_an_ordinary_mesh(x64):
    plan = gtp.nonuniform.plan_faults(dp=2, tp=4, failed=(1, 6), batch=8)
    assert plan.uniform
    replicas = gtp.nonuniform.Replicas(Tiny, plan)
    assert dict(replicas.core.shape) == {"dp": 2, "gtp": 1, "tp": 3}
    assert [device.id for device in replicas.core.devices.flat] == [0, 2, 3, 4, 5, 7]
    steps = [gtp.train_step(loss, OPTIMIZER, view="local", replicas=some) for some in (replicas, None)]
    assert type(steps[0]) is type(steps[1])


@pytest.mark.slow
def test_checkpoints_move_between_unequal_replicas_and_meshes_bit_for_bit(x64, tmp_path):
    plan = gtp.nonuniform.plan_faults(**TWO_AND_ONE)
    replicas = gtp.nonuniform.Replicas(Tiny, plan, jax.devices()[:4])
    data = list(batches(9))
    with jax.set_mesh(replicas.core), Checkpoints(tmp_path / "unequal") as checkpoints:
        step = gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas)
        state, _ = step(begin(), data[0])
        checkpoints.save(1, state)
        checkpoints.wait()
        saved = bits(state)
        on, _ = step(state, data[1])
    for degrees in (dict(dp=2, tp=2), dict(gtp=1)):
        with jax.set_mesh(place(degrees)), Checkpoints(tmp_path / "unequal", read_only=True) as checkpoints:
            like = begin(seed=4)
            state, _ = checkpoints.restore(like)
            assert bits(state) == saved
            assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(like)]
            with Checkpoints(tmp_path / str(degrees)) as others:
                others.save(1, state)
        with jax.set_mesh(replicas.core), Checkpoints(tmp_path / str(degrees), read_only=True) as others:
            back, _ = others.restore(begin(seed=5))
            assert bits(back) == saved
            again, _ = step(back, data[1])
            assert bits(again) == bits(on)


@pytest.mark.slow
def test_devices_lost_and_back_in_mid_run_change_nothing(x64, tmp_path):
    """Healthy, one lost, two lost, one back, all back; the same batches as on one device, which trains on."""
    data = [batch for _ in range(2) for batch in batches(12)]
    wanted = train(Tiny, loss, data)
    losses, done = [], 0
    for failed in ((), (3,), (3, 4), (4,), ()):
        replicas = gtp.nonuniform.Replicas(
            Tiny, gtp.nonuniform.plan_faults(dp=3, tp=2, failed=failed, batch=12), jax.devices()[:6]
        )
        with jax.set_mesh(replicas.core), Checkpoints(tmp_path) as checkpoints:
            state = begin()
            if done:
                state, _ = checkpoints.restore(state)
            step = gtp.train_step(loss, OPTIMIZER, view="local", max_grad_norm=0.5, replicas=replicas)
            for batch in data[done : done + 2]:
                state, metrics = step(state, batch)
                losses.append(float(metrics["loss"]))
            done += 2
            checkpoints.save(done, state)
    np.testing.assert_allclose(losses, wanted["losses"], rtol=1e-12)
    for name, leaf in named(state.params).items():
        np.testing.assert_allclose(leaf, wanted["end"][name], atol=1e-11)


@pytest.mark.parametrize(
    "roles",
    [
        pytest.param(gtp.mesh.Roles(), id="divided", marks=pytest.mark.full),
        pytest.param(gtp.mesh.Roles(optimizer=()), id="whole", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_folded_by_permutes_and_summed_once(roles, x64):
    """However many microbatches; and what was compiled ahead is what runs."""
    with gtp.mesh.use_roles(roles):
        replicas = gtp.nonuniform.Replicas(
            Tiny, gtp.nonuniform.plan_faults(dp=2, tp=4, failed=(5,), batch=14, microbatches=2)
        )
        with jax.set_mesh(replicas.core):
            state = begin()
            step = gtp.train_step(loss, OPTIMIZER, view="local", replicas=replicas, microbatches=2)
            programs = step.compile(state, next(batches(14)))
            found = {name: collectives(program.as_text() or "") for name, program in programs.items()}
            kinds = {name: {c.kind for c in some} for name, some in found.items()}
            assert kinds["fold 0"] == kinds["unfold 0"] == {"collective-permute"}
            for name, transfer in step.transfers(state)[0].items():
                assert sum(c.operand_bytes for c in found[f"{name} 0"]) == transfer.moves.bytes_in_turn > 0
            assert "fold 1" not in kinds and "unfold 1" not in kinds  # a replica of 3 stores as the core does
            assert "all-gather" not in kinds["update"] and ("gather" in kinds) == (roles == gtp.mesh.Roles())
            step(state, next(batches(14)))


# 131 hidden features: no rank of 3 or 4 has whole blocks of them; experts divided over tp have an amax each.
WIDE = functools.partial(Tiny, features=128, hidden=131)
RECIPES = {
    "FP8, experts divided by features": (gtp.FP8(exclude=()), Everything),
    "FP8, experts divided over tp": (gtp.FP8(exclude=()), functools.partial(Everything, experts="expert")),
    "MXFP8": (gtp.MXFP8(exclude=()), WIDE),
    "NVFP4 in blocks of 1 x 16": (gtp.NVFP4(block=(1, 16), exclude=()), WIDE),
    "NVFP4 in blocks of 16 x 16": (gtp.NVFP4(exclude=()), WIDE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_quantize_weights_as_on_one_device(name, x64):
    (recipe, factory), data = RECIPES[name], list(batches(14))
    wanted = train(factory, loss, data, recipe=recipe)
    plan = gtp.nonuniform.plan_faults(dp=2, tp=4, failed=(5,), batch=14)
    assert_close(train(factory, loss, data, plan=plan, recipe=recipe), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [gtp.FP8(matmuls=True, exclude=()), gtp.NVFP4(matmuls=True, exclude=())], ids=str)
def test_matmuls_in_formats_train_alike_where_each_rank_quantizes_its_activations(recipe):
    factory, data = functools.partial(WIDE, dtype="float32"), list(batches(10, 32))
    options = dict(recipe=recipe, pregathered_layers=0)
    wanted = train(factory, loss, data, **options)
    plan = gtp.nonuniform.plan_faults(dp=2, tp=2, failed=(3,), batch=10, batches=(8, 2))
    found = train(factory, loss, data, plan=plan, devices=jax.devices()[:4], **options)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=2e-2)
    assert_replicas_agree(found)


def mean_loss(model, batch):
    total, tokens = loss(model, batch)
    return total / tokens


class WithState(Tiny):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros(()))


class WithDropout(Tiny):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"view": "global"}, ValueError, "`view='global'`"),
        ({"loss": mean_loss}, TypeError, "`view='local'` one scalar `gtp_jax.cross_entropy(logits, targets)`"),
        ({"factory": WithState}, ValueError, "(calls) replica"),
        ({"factory": WithDropout}, ValueError, "(dropout.rngs.count, dropout.rngs.key) replica"),
        ({"factory": WithLoadOfAll}, ValueError, "moe `aux_loss` 'microbatch'"),
        ({"rows": 8}, ValueError, "`batch`['targets'] (8, 12) 9 rows"),
        ({"state_factory": WithLoadOfAll}, ValueError, "parameters of the state `replicas`"),
        ({"state_factory": WIDE}, ValueError, "parameter embed.table shape `replicas` `factory`"),
        ({"elsewhere": True}, ValueError, "other devices core `replicas`"),
        ({"roles": gtp.mesh.Roles(weights=("dp", "gtp"))}, ValueError, "roles `weights`"),
        ({"jitted": True}, TypeError, "outside `jax.jit`"),
        ({"devices": 2}, ValueError, "2 devices 4 1 failed 3 active"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_would_not_be_exact_is_refused_by_message(changes, error, message, x64):
    factory = changes.get("factory", Tiny)
    with pytest.raises(error, match=naming(message)), gtp.mesh.use_roles(changes.get("roles", gtp.mesh.Roles())):
        devices = jax.devices()[: changes.get("devices", 4)]
        replicas = gtp.nonuniform.Replicas(factory, gtp.nonuniform.plan_faults(**TWO_AND_ONE), devices)
        options = dict(view=changes.get("view", "local"), replicas=replicas)
        step = gtp.train_step(changes.get("loss", loss), OPTIMIZER, **options)
        with jax.set_mesh(place(dict(dp=2, tp=2)) if "elsewhere" in changes else replicas.core):
            state = begin(changes.get("state_factory", factory))
            (jax.jit(step) if "jitted" in changes else step)(state, next(batches(changes.get("rows", 9))))


CASES = {
    "3, 2 and 2": (dict(dp=3, tp=3, failed=(3, 8), batch=14), {}),
    "4 and 3, whole state": (dict(dp=2, tp=4, failed=(5,), batch=14), dict(roles=gtp.mesh.Roles(optimizer=()))),
    "4, 3 and 1": (dict(dp=2, gtp=1, tp=4, failed=(1, 4, 5, 7), batch=12), {}),
    "gtp 2, 2 and 1, two microbatches": (dict(dp=2, gtp=2, tp=2, failed=(4, 6), batch=12, microbatches=2), {}),
    "both hurt, rows as given": (dict(dp=2, tp=4, failed=(0, 7), batch=12, batches=(8, 4)), {}),
    "core of a lower degree than any replica": (dict(dp=2, tp=4, failed=(5,), batch=14, core_tp=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "experts"), list(zip(CASES, itertools.cycle(["features", "expert"]))))
def test_gradients_and_steps_are_those_of_one_device(name, experts, x64):
    degrees, options = CASES[name]
    plan = gtp.nonuniform.plan_faults(**degrees)
    count = plan.slots if plan.slots <= len(jax.devices()) else len(plan.active)
    options = options | {"devices": jax.devices()[:count]}
    factory = functools.partial(Everything, experts=experts)
    microbatches = plan.microbatches
    found = train(factory, loss, list(batches(plan.batch)), plan=plan, microbatches=microbatches, **options)
    assert_close(found, one_device(plan.batch, experts, microbatches))
    assert_replicas_agree(found)
