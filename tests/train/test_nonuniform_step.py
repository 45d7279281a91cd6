"""Replicas of unequal degree train as one device does, whatever the degrees divide."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

STEPS, SEQ = 5, 12
VOCAB, FEATURES, HIDDEN = 37, 24, 19


class Everything(nnx.Module):
    """Each kind of leaf: what is sharded by columns, by rows, by heads, by experts, by the vocabulary, and what is not.

    Five groups of heads, 19 hidden features and 37 tokens: neither 4, 3 nor 2 divides them. The 24 features are divided
    in storage.
    """

    def __init__(self, rngs, experts="features"):
        shared = dict(dtype="float64", param_dtype="float64", rngs=rngs)
        self.embed = gtp.Embed(VOCAB, FEATURES, **shared)
        self.attention = gtp.Attention(
            FEATURES, heads=10, kv_heads=5, head_dim=4, norm="layer", qk_norm=True, sinks=True, use_bias=True, **shared
        )
        self.mlp = gtp.MLP(FEATURES, HIDDEN, use_bias=True, **shared)
        self.moe = gtp.MoE(FEATURES, HIDDEN, num_experts=5, top_k=2, aux_loss_coeff=0.1, parallel=experts, **shared)
        self.even = gtp.MLP(FEATURES, FEATURES, gated=False, **shared)
        self.head = gtp.TiedHead(self.embed, param_dtype="float64", rngs=rngs)
        self.temperature = nnx.Param(jnp.ones((), "float64"))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in (self.attention, self.mlp, self.moe, self.even):
            x = x + layer(x)
        return self.head(x + self.temperature * x**2)


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"], batch["weights"], vocab_size=VOCAB)


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


def batches(rows, vocab=VOCAB, seq=SEQ):
    """Random tokens; ever more of them are masked along the batch, so that replicas have unequal shares of tokens."""
    rng = np.random.default_rng(rows)
    for _ in range(STEPS):
        tokens = rng.integers(0, vocab, (rows, seq + 1)).astype(np.int32)
        weights = (rng.random((rows, seq)) > np.linspace(0, 0.8, rows)[:, None]).astype(np.float32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def keeps_gradient(optimizer):
    """The optimizer, and ahead of it one that keeps the gradient it is given."""
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, state, params: (grads, grads)
    )
    return optax.chain(keep, optimizer)


OPTIMIZER = keeps_gradient(optax.adamw(1e-2))


def named(tree):
    return {
        ".".join(str(key.key) for key in path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def train(factory, loss, data, *, plan=None, degrees=None, devices=None, optimizer=OPTIMIZER, roles=None, **options):
    """First gradient, losses, norms, parameters at the end; and replicas' weights after each step.

    Over the replicas of a plan, or on a mesh of these degrees; on one device if neither is given.
    """
    options = {"max_grad_norm": 0.5, "view": "local"} | options
    with gtp.use_roles(roles or gtp.Roles()):
        if plan is not None:
            replicas = gtp.Replicas(factory, plan, devices)
            mesh, options["replicas"] = replicas.core, replicas
        else:
            count = int(np.prod(list((degrees or {}).values())))
            mesh = gtp.make_mesh(**degrees or {}, devices=jax.devices()[:count])
        with jax.set_mesh(mesh):
            state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(3)), optimizer)
            step = gtp.train_step(loss, optimizer, **options)
            found = {"losses": [], "norms": [], "weights": [], "start": named(state.params)}
            for batch in data:
                state, metrics = step(state, batch)
                found["losses"].append(float(metrics["loss"]))
                found["norms"].append(float(metrics["grad_norm"]))
                found.setdefault("gradient", named(state.opt_state[0]))
                if plan is not None and not plan.uniform:
                    found["weights"].append([named(weights) for weights in step.weights(state)])
            return found | {
                "end": named(state.params),
                "state": state,
                "step": step,
                "tokens": float(metrics["tokens"]),
            }


@functools.cache
def one_device(rows, experts="features", microbatches=1):
    data = list(batches(rows))
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


def assert_replicas_agree(found):
    assert len(found["weights"]) == STEPS
    for after in found["weights"]:
        for weights in after[1:]:
            for name, leaf in after[0].items():
                np.testing.assert_array_equal(weights[name], leaf, err_msg=name)
    for name, leaf in found["end"].items():
        np.testing.assert_array_equal(found["weights"][-1][0][name], leaf, err_msg=name)


@pytest.fixture(scope="module")
def four_and_three():
    with jax.enable_x64(True):
        plan = gtp.plan_faults(dp=2, tp=4, failed=(5,), batch=14, microbatches=2)
        assert [replica.tp for replica in plan.replicas] == [4, 3]
        found = train(Everything, loss, list(batches(14)), plan=plan, microbatches=2)
        yield found, one_device(14, microbatches=2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_every_kind_of_leaf_is_that_of_one_device(kind, four_and_three):
    found, wanted = (some["gradient"][KINDS[kind]] for some in four_and_three)
    assert np.linalg.norm(wanted) > 0
    assert np.linalg.norm(found - wanted) <= 1e-12 * np.linalg.norm(wanted)


def test_five_steps_at_four_and_three_are_those_of_one_device(four_and_three):
    assert_close(*four_and_three)


def test_replicas_have_the_same_bits_after_every_step(four_and_three):
    assert_replicas_agree(four_and_three[0])


CASES = {
    "4 and 2": (dict(dp=2, tp=4, failed=(4, 6), batch=12), {}),
    "3, 2 and 2": (dict(dp=3, tp=3, failed=(3, 8), batch=14), {}),
    "2 and 1": (dict(dp=2, tp=2, failed=(3,), batch=9), {}),
    "4 and 3, optimizer state on every replica": (
        dict(dp=2, tp=4, failed=(5,), batch=14),
        dict(roles=gtp.Roles(optimizer=())),
    ),
    "4 and 3, three failures that are not adjacent, rows as given": (
        dict(dp=2, tp=4, failed=(4,), batch=14, batches=(12, 2)),
        {},
    ),
    "4, 3 and 1": (dict(dp=2, gtp=1, tp=4, failed=(1, 4, 5, 7), batch=12), {}),
    "gtp 2, 2 and 1": (dict(dp=2, gtp=2, tp=2, failed=(1,), batch=12), {}),
    "gtp 2, 2 and 1, two microbatches": (dict(dp=2, gtp=2, tp=2, failed=(4, 6), batch=12, microbatches=2), {}),
    "both hurt": (dict(dp=2, tp=4, failed=(0, 7), batch=12), {}),
    "core of a lower degree than any replica": (dict(dp=2, tp=4, failed=(5,), batch=14, core_tp=2), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["features", "expert"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_steps_are_those_of_one_device(name, experts, x64):
    degrees, options = CASES[name]
    if degrees["dp"] * degrees.get("gtp", 1) * degrees["tp"] > len(jax.devices()):
        options = options | {"devices": jax.devices()[: 9 - len(degrees["failed"])]}
    plan = gtp.plan_faults(**degrees)
    factory = functools.partial(Everything, experts=experts)
    microbatches = plan.microbatches
    found = train(factory, loss, list(batches(plan.batch)), plan=plan, microbatches=microbatches, **options)
    assert_close(found, one_device(plan.batch, experts, microbatches))
    assert_replicas_agree(found)
