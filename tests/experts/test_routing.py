"""Routers: their choices and shares against numpy; terms that enter the gradient alone; biases that a step moves."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.nn import Routing

from ..hlo.programs import needs_target


def chosen_by_numpy(scores, bias, top_k, groups, top_groups, best):
    """Each token's experts, as a set: groups by the sum of their best, then experts."""
    found = []
    for own in scores + bias:
        by_group = own.reshape(groups, -1)
        of_group = np.sort(by_group, axis=1)[:, -best:].sum(1)
        taken = np.argsort(-of_group)[:top_groups]
        allowed = np.full_like(by_group, -np.inf)
        allowed[taken] = by_group[taken]
        found.append(set(np.argsort(-allowed.ravel())[:top_k].tolist()))
    return found


@pytest.mark.parametrize(("score", "normalize"), [("softmax", False), ("sigmoid", True)])
def test_choices_and_shares_are_those_of_the_papers(score, normalize, x64):
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(2, 16, 12)), rng.normal(size=12) * 0.2
    routing = Routing(score=score, normalize=normalize, scale=2.5, num_groups=4, top_groups=2)
    scores = jax.jit(routing.scores)(logits)
    exponentials = np.exp(logits)
    softmax = exponentials / exponentials.sum(-1, keepdims=True)
    wanted = softmax if score == "softmax" else exponentials / (1 + exponentials)
    np.testing.assert_allclose(scores, wanted, rtol=1e-12)
    chosen = np.asarray(jax.jit(routing.choose, static_argnums=2)(scores, bias, 3))
    best = 1 if score == "softmax" else 2
    assert [set(row) for row in chosen.reshape(-1, 3).tolist()] == chosen_by_numpy(
        wanted.reshape(-1, 12), bias, 3, 4, 2, best
    )
    own = np.take_along_axis(wanted, chosen, -1)  # of scores without the bias
    own = own / own.sum(-1, keepdims=True) if normalize else own
    np.testing.assert_allclose(jax.jit(routing.shares)(scores, chosen), 2.5 * own, rtol=1e-12)


def mixture(x64=True, **options):
    dtypes = dict(dtype="float64", param_dtype="float64") if x64 else {}
    return lambda rngs: gtp.nn.MoE(8, 12, num_experts=4, rngs=rngs, **dtypes, **options)


@pytest.mark.full
@pytest.mark.parametrize("degrees", [None, dict(ep=2, gtp=2), dict(ep=2, tp=2)], ids=str)
def test_terms_are_means_over_the_microbatch_and_enter_the_gradient_alone(degrees, x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)))
    routing = Routing(aux_loss="microbatch", z_loss_coeff=0.3)

    def gradient(model):
        graph, state = nnx.split(model)
        loss = lambda state: jnp.mean(jnp.sin(nnx.merge(graph, state)(x)))  # noqa: E731
        value, found = jax.jit(jax.value_and_grad(loss))(state)
        return value, found["router"].get_value()

    def terms(router):
        h = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        logits = h @ router
        probs = jax.nn.softmax(logits, -1)
        taken = jax.nn.one_hot(jax.lax.top_k(probs, 2)[1], 4).sum(-2)
        balance = 4 / 2 * jnp.sum(taken.mean((0, 1)) * probs.mean((0, 1)))
        return 0.2 * balance + 0.3 * jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2)

    mesh = gtp.make_mesh(**(degrees or dict(dp=1)), devices=jax.devices()[: 4 if degrees else 1])
    with jax.set_mesh(mesh):
        model = gtp.init(mixture(aux_loss_coeff=0.2, loss_reduction="mean", routing=routing), nnx.Rngs(0))
        plain = gtp.init(mixture(aux_loss_coeff=0.0), nnx.Rngs(0))
        (value, found), (wanted, without) = gradient(model), gradient(plain)
        assert value == wanted, "terms are no part of the loss that is reported"
        of_terms = jax.jit(jax.grad(terms))(plain.router.get_value())
        np.testing.assert_allclose(found - without, of_terms, rtol=1e-9, atol=1e-12)


class Model(nnx.Module):
    def __init__(self, rngs):
        routing = Routing(score="sigmoid", bias_rate=0.125)
        self.experts = gtp.nn.MoE(8, 12, num_experts=4, routing=routing, aux_loss_coeff=0, shared_hidden=16, rngs=rngs)

    def __call__(self, x):
        return x + self.experts(x)


def loss(model, x):
    return jnp.sum(model(x) ** 2), jnp.float32(x.shape[0] * x.shape[1])


@pytest.mark.parametrize("degrees", others_full([dict(ep=2, gtp=2), dict(gtp=2, tp=2)], [dict(ep=2, gtp=2)]), ids=str)
def test_a_step_moves_biases_by_the_load_of_all_microbatches_and_ranks_once(degrees):
    x = np.random.default_rng(0).normal(size=(16, 4, 8)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:4])):
        optimizer = optax.adamw(1e-2, weight_decay=0.5)  # neither of which touches a bias
        state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(loss, optimizer, microbatches=2, max_grad_norm=1.0, view="local")
        params = jax.tree.map(np.asarray, state.params)["experts"]
        h = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        chosen = np.argsort(-(h @ params["router"]), axis=-1)[..., :2]
        load = np.bincount(chosen.ravel(), minlength=4)
        before = np.asarray(state.params["experts"]["router_bias"])
        state, metrics = step(state, x)
        moved = np.asarray(state.params["experts"]["router_bias"]) - before
        np.testing.assert_array_equal(moved, -0.125 * np.sign(load - load.mean()))
        np.testing.assert_allclose(metrics["expert_load"], load.max() / load.mean(), rtol=1e-6)
        assert metrics["grad_norm"] < 1e3, "loads are no part of the norm"
        unmoved = np.array(state.params["experts"]["router_bias"])
        state, metrics = step(state, np.full_like(x, np.nan))
        assert metrics["skipped"]
        np.testing.assert_array_equal(state.params["experts"]["router_bias"], unmoved)


@pytest.mark.full
@needs_target
def test_a_router_s_matmuls_have_the_highest_precision_on_gpus():
    """By default they would be of TF32, in which nearly equal experts change places."""
    mesh = gtp.make_mesh(devices=hlo.topology_devices(hlo.parse_target("h200:1")))
    with jax.set_mesh(mesh):
        make = lambda rngs: gtp.nn.MoE(256, 128, num_experts=32, rngs=rngs)  # noqa: E731
        graph, state = nnx.split(gtp.nn.abstract_model(make))
        x = jax.ShapeDtypeStruct((2, 512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        loss = lambda state, x: jnp.sum(nnx.merge(graph, state)(x).astype(jnp.float32) ** 2)  # noqa: E731
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(state, x).compile().as_text()
    found = [line for line in text.splitlines() if re.search(r"%?[\w.\-]+ = \(?f32\[", line) and "cublas" in line]
    found += [line for line in text.splitlines() if re.search(r" = f32\[[^=]* dot\(", line)]
    assert len(found) >= 3, "forward, and backward to the tokens and to the router"
    for line in found:
        assert re.search(r'"operand_precision":\["HIGHEST","HIGHEST"\]|operand_precision={highest,highest}', line), line


@pytest.mark.full
def test_jitter_is_that_of_the_example_on_every_mesh(x64):
    found = []
    for degrees in (None, dict(ep=2, tp=2)):
        mesh = gtp.make_mesh(**(degrees or dict(dp=1)), devices=jax.devices()[: 4 if degrees else 1])
        with jax.set_mesh(mesh):
            options = dict(routing=Routing(jitter=0.5), parallel=None)
            graph, state = nnx.split(gtp.init(mixture(**options), nnx.Rngs(0)))
            x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 8)))
            call = jax.jit(lambda state, x, key: nnx.merge(graph, state)(x, key=key))  # noqa: B023
            found.append(np.asarray(call(state, x, jax.random.key(1))))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-12)


REFUSED = {
    "score": (lambda: Routing(score="tanh"), "`score` 'tanh' 'softmax' 'sigmoid'"),
    "scale": (lambda: Routing(scale=0), "`scale` 0 above"),
    "groups": (lambda: Routing(num_groups=2, top_groups=3), "`top_groups` 3 2 groups"),
    "uneven": (lambda: mixture(False, routing=Routing(num_groups=3))(nnx.Rngs(0)), "`num_groups` 3 4 experts"),
    "few": (
        lambda: mixture(False, routing=Routing(num_groups=4), top_k=2)(nnx.Rngs(0)),
        "`top_groups` 1 `num_groups` 4 `top_k` 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_argument_is_named(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=naming(message)):
        call()
