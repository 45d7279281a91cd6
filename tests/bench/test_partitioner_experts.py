"""The partitioner's mixture of experts: gtp_jax's model, whose experts are gathered as often as its policy says."""

import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

import benchmarks
import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from ..parity.plain_llama import loss_and_gradient

SIZES = dict(
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    num_experts=4,
    top_k=2,
    aux_loss_coeff=0.5,
)
OTHERS = dict(qk_norm=True, shared_hidden=32)


@pytest.fixture
def partitioner(monkeypatch):
    """The script, imported as if from its own folder."""
    monkeypatch.syspath_prepend(str(Path(benchmarks.__file__).with_name("contenders")))
    yield importlib.import_module("partitioner")
    for name in ("partitioner", "partitioned_experts", "deviceless", "workload"):
        sys.modules.pop(name, None)


def mesh_of(ranks: int):
    return jax.make_mesh((ranks, 1), ("gtp", "tp"), devices=jax.devices()[:ranks], axis_types=(AxisType.Auto,) * 2)


def as_theirs(config: LlamaConfig, params):
    """The parameters of a Llama of gtp_jax as the partitioner's script has them."""
    layers, head = params["blocks"]["layers"], params["head"]
    attention, mlp = layers["attention"], layers["mlp"]
    per_head = (config.num_layers, config.hidden_size, config.num_kv_heads, -1)
    parts = [jnp.reshape(attention["qkv"]["kernel"][name], per_head) for name in ("query", "key", "value")]
    both = jnp.concatenate([mlp["up"]["kernel"]["gate"], mlp["up"]["kernel"]["up"]], axis=-2)
    theirs = {
        "qkv": jnp.concatenate(parts, axis=-1),
        "out": attention["out"]["kernel"],
        "norm1": attention["qkv"]["scale"],
        "norm2": mlp["scale"],
        "router": mlp["router"],
        "up": both,
        "down": mlp["down"]["kernel"],
    }
    if config.qk_norm:
        theirs |= {"norm_q": attention["core"]["query_scale"], "norm_k": attention["core"]["key_scale"]}
    if config.shared_hidden:
        kernel = mlp["shared"]["up"]["kernel"]
        theirs["shared_up"] = jnp.stack([kernel["gate"], kernel["up"]], axis=2)
        theirs["shared_down"] = mlp["shared"]["down"]["kernel"]
    return {"layers": theirs, "embed": params["embed"]["table"], "norm": head["scale"], "head": head["kernel"]}


def case(key, **others):
    config = LlamaConfig(**SIZES, **others, dtype="float32")
    params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(int(jax.random.bits(key) % 1000)))))
    tokens = jax.random.randint(key, (4, 32), 0, config.vocab_size)
    return config, params, tokens, jnp.roll(tokens, -1, axis=1)


def loss_and_gradients(partitioner, work, params, tokens, targets):
    def loss(p):
        return partitioner.loss(
            work, p, tokens, targets, unroll=0, keep_gathered=False, dtype=jnp.float32, attention="xla"
        )

    with jax.set_mesh(mesh_of(work.devices)):
        return jax.jit(jax.value_and_grad(loss))(params)


def test_loss_and_gradients_are_those_of_every_token_through_every_expert(partitioner, key):
    config, params, tokens, targets = case(key)
    work = benchmarks.Workload(**SIZES, seq=32, sequences=4, gtp=2)
    loss, gradients = loss_and_gradients(partitioner, work, as_theirs(config, params), tokens, targets)
    batch = {"tokens": tokens, "targets": targets, "weights": jnp.ones(tokens.shape)}
    wanted, true = loss_and_gradient(config)(params, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    compare = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())  # noqa: E731
    jax.tree.map(compare, gradients, as_theirs(config, true))


@pytest.mark.slow
def test_with_norms_of_queries_and_a_shared_expert_the_loss_is_ours(partitioner, key):
    config, params, tokens, targets = case(key, **OTHERS)
    work = benchmarks.Workload(**SIZES, **OTHERS, seq=32, sequences=4, gtp=1, ep=2)
    loss, _ = loss_and_gradients(partitioner, work, as_theirs(config, params), tokens, targets)
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        model = Llama(config, rngs=nnx.Rngs(0))
        nnx.update(model, params)
        total, count = next_token_loss(model, {"tokens": tokens, "targets": targets})
    np.testing.assert_allclose(loss, total / count, rtol=1e-5)
    shapes = partitioner.shapes(work)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    assert sum(np.prod(s) for s in jax.tree.leaves(shapes, is_leaf=is_shape)) == config.param_count()


@pytest.mark.parametrize("policy, times", [("regather", 2), pytest.param("keep", 1, marks=pytest.mark.slow)])
def test_experts_are_gathered_as_often_as_the_policy_says(partitioner, policy, times):
    work = benchmarks.Workload(**SIZES, seq=32, sequences=4, gtp=4)
    mesh = mesh_of(4)
    step, make_state, shardings = partitioner.make_step(work, mesh, unroll=0, keep_gathered=policy == "keep")
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    tokens = jax.ShapeDtypeStruct((1, 4, 32), jnp.int32, sharding=NamedSharding(mesh, partitioner.BATCH))
    with jax.set_mesh(mesh):
        found = hlo.collectives(step.lower(state, tokens, tokens).compile().as_text())
    of_experts = 3 * work.num_experts * work.hidden_size * work.intermediate_size
    kernels = {of_experts // 3, 2 * of_experts // 3}
    gathered = sum(
        c.times * s.elements for c in found if c.kind == "all-gather" for s in c.results if s.elements in kernels
    )
    assert gathered == times * work.num_layers * of_experts
    # and their gradients are scattered, not summed whole on every rank
    whole = [s for c in found if c.kind == "all-reduce" for s in c.results if s.elements in kernels]
    assert not whole
