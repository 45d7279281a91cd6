"""The partitioner's Llama, dense and of experts: gtp_jax's model, whose weights are gathered as its policy says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

import benchmarks
import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import PRESETS, Llama, LlamaConfig, next_token_loss

from ..parity.plain_llama import Oracle, loss_and_gradient

SIZES = dict(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
EXPERTS = SIZES | dict(num_experts=4, top_k=2, aux_loss_coeff=0.5)
OTHERS = dict(qk_norm=True, shared_hidden=32)
CHAIN = {"regather": 2, "keep": 1}  # gathers of a block's weight in a step


def mesh_of(gtp_degree: int, tp: int = 1):
    devices = jax.devices()[: gtp_degree * tp]
    return jax.make_mesh((gtp_degree, tp), ("gtp", "tp"), devices=devices, axis_types=(AxisType.Auto,) * 2)


def case(**sizes):
    """A configuration, its parameters as gtp_jax has them, tokens and targets."""
    config, rng = LlamaConfig(**sizes, dtype="float32"), np.random.default_rng(0)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))))

    def drawn(path, like):
        is_norm = "scale" in jax.tree_util.keystr(path)
        return jnp.asarray(is_norm + rng.normal(size=like.shape) * (0.1 if is_norm else 0.125), jnp.float32)

    tokens = rng.integers(0, config.vocab_size, (4, 32)).astype(np.int32)
    return config, jax.tree_util.tree_map_with_path(drawn, shapes), tokens, np.roll(tokens, -1, 1)


def as_theirs(config: LlamaConfig, params):
    """The parameters of a Llama of gtp_jax as the partitioner's script has them."""
    layers, head = params["blocks"]["layers"], params["head"]
    attention, mlp = layers["attention"], layers["mlp"]
    per_head = (config.num_layers, config.hidden_size, config.num_kv_heads, -1)
    parts = [jnp.reshape(attention["qkv"]["kernel"][name], per_head) for name in ("query", "key", "value")]
    up = mlp["up"]["kernel"]
    theirs = {
        "qkv": jnp.concatenate(parts, axis=-1),
        "out": attention["out"]["kernel"],
        "norm1": attention["qkv"]["scale"],
        "down": mlp["down"]["kernel"],
    }
    if config.num_experts:
        both = jnp.concatenate([up["gate"], up["up"]], axis=-2)
        theirs |= {"norm2": mlp["scale"], "router": mlp["router"], "up": both}
    else:
        theirs |= {"norm2": mlp["up"]["scale"], "up": jnp.stack([up["gate"], up["up"]], axis=2)}
    if config.qk_norm:
        theirs |= {"norm_q": attention["core"]["query_scale"], "norm_k": attention["core"]["key_scale"]}
    if config.shared_hidden:
        kernel = mlp["shared"]["up"]["kernel"]
        theirs["shared_up"] = jnp.stack([kernel["gate"], kernel["up"]], axis=2)
        theirs["shared_down"] = mlp["shared"]["down"]["kernel"]
    return {"layers": theirs, "embed": params["embed"]["table"], "norm": head["scale"], "head": head["kernel"]}


def loss_of(partitioner, work, tokens, targets, **options):
    """The loss as a function of parameters; call it on the mesh."""
    fixed = {"unroll": 0, "keep_gathered": False, "dtype": jnp.float32, "attention": "xla"} | options
    return functools.partial(partitioner.loss, work, tokens=tokens, targets=targets, **fixed)


@pytest.mark.parametrize("tp, unroll", [(1, 0), pytest.param(2, 1, marks=pytest.mark.full)])
def test_the_loss_is_that_of_the_oracle(partitioner, tp, unroll):
    config, params, tokens, targets = case(**SIZES)
    work = benchmarks.Workload(**SIZES, seq=32, sequences=4, gtp=2, tp=tp)
    with jax.set_mesh(mesh_of(2, tp)):
        loss = jax.jit(loss_of(partitioner, work, tokens, targets, unroll=unroll))(as_theirs(config, params))
    batch = {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}
    np.testing.assert_allclose(loss, jax.jit(Oracle(config).loss)(params, batch), rtol=1e-5)


@pytest.mark.full
def test_loss_and_gradients_are_those_of_every_token_through_every_expert(partitioner):
    config, params, tokens, targets = case(**EXPERTS)
    work = benchmarks.Workload(**EXPERTS, seq=32, sequences=4, gtp=2)
    with jax.set_mesh(mesh_of(2)):
        step = jax.jit(jax.value_and_grad(loss_of(partitioner, work, tokens, targets)))
        loss, gradients = step(as_theirs(config, params))
    batch = {"tokens": tokens, "targets": targets, "weights": jnp.ones(tokens.shape)}
    wanted, true = loss_and_gradient(config)(params, batch)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    compare = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())  # noqa: E731
    jax.tree.map(compare, gradients, as_theirs(config, true))


@pytest.mark.full
def test_with_norms_of_queries_and_a_shared_expert_the_loss_is_ours(partitioner):
    config, params, tokens, targets = case(**EXPERTS, **OTHERS)
    work = benchmarks.Workload(**EXPERTS, **OTHERS, seq=32, sequences=4, gtp=1, ep=2)
    with jax.set_mesh(mesh_of(2)):
        loss = jax.jit(loss_of(partitioner, work, tokens, targets))(as_theirs(config, params))
    with jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):
        model = Llama(config, rngs=nnx.Rngs(0))
        nnx.update(model, params)
        total, count = nnx.jit(next_token_loss)(model, {"tokens": tokens, "targets": targets})
    np.testing.assert_allclose(loss, total / count, rtol=1e-5)
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    shapes = jax.tree.leaves(partitioner.shapes(work), is_leaf=is_shape)
    assert sum(np.prod(s) for s in shapes) == config.param_count()


def compiled(partitioner, work, policy, unroll=0):
    """The collectives of a step."""
    mesh = mesh_of(work.gtp)
    step, make_state, shardings = partitioner.make_step(work, mesh, unroll=unroll, keep_gathered=policy == "keep")
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    tokens = jax.ShapeDtypeStruct((1, 4, 32), jnp.int32, sharding=NamedSharding(mesh, partitioner.BATCH))
    with jax.set_mesh(mesh):
        return hlo.collectives(step.lower(state, tokens, tokens).compile().as_text())


def gathered(found, is_weight) -> int:
    """How many elements all-gathers give, of arrays of such sizes."""
    return sum(
        c.times * s.elements for c in found if c.kind == "all-gather" for s in c.results if is_weight(s.elements)
    )


@pytest.mark.full
@pytest.mark.parametrize("policy, unroll", [("regather", 0), ("regather", 1), ("keep", 0), ("keep", 1)])
def test_the_partitioner_gathers_as_often_as_its_policy_says(partitioner, policy, unroll):
    found = compiled(partitioner, benchmarks.Workload(**SIZES, seq=32, sequences=4, gtp=4), policy, unroll)
    model = LlamaConfig(**SIZES)
    ends = model.vocab_size * model.hidden_size
    blocks = model.matmul_params() - ends
    assert gathered(found, lambda size: size >= 4096) == CHAIN[policy] * blocks + 2 * ends


@pytest.mark.full
@pytest.mark.parametrize("policy", CHAIN)
def test_experts_are_gathered_as_often_as_the_policy_says(partitioner, policy):
    work = benchmarks.Workload(**EXPERTS, seq=32, sequences=4, gtp=4)
    found = compiled(partitioner, work, policy)
    of_experts = 3 * work.num_experts * work.hidden_size * work.intermediate_size
    kernels = {of_experts // 3, 2 * of_experts // 3}
    assert gathered(found, kernels.__contains__) == CHAIN[policy] * work.num_layers * of_experts
    # and their gradients are scattered, not summed whole on every rank
    assert not [s for c in found if c.kind == "all-reduce" for s in c.results if s.elements in kernels]


needs_target = pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for H200 needs gtp_jax[target]")


def schedule_on_h200(partitioner, policy: str, layers: int, tp: int = 1) -> hlo.LaunchOrder:
    sizes = {name: value for name, value in vars(PRESETS["reference"]).items() if name in SIZES}
    work = benchmarks.Workload(**sizes | {"num_layers": layers}, sequences=8 // tp, gtp=8 // tp, tp=tp)
    devices = hlo.topology_devices(hlo.parse_target("h200:8"))
    mesh = Mesh(np.array(devices).reshape(work.gtp, tp), ("gtp", "tp"), axis_types=(AxisType.Auto,) * 2)
    options = {**hlo.COMPILE_OPTIONS, **partitioner.combined(work)}
    step, _, shardings = partitioner.make_step(work, mesh, unroll=0, keep_gathered=policy == "keep", xla=options)
    params = partitioner.abstract(work)
    shapes = params, jax.eval_shape(optax.adamw(1.0).init, params)
    state = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)
    tokens = jax.ShapeDtypeStruct((1, work.sequences, 8192), jnp.int32, sharding=NamedSharding(mesh, partitioner.BATCH))
    with jax.set_mesh(mesh):
        return hlo.launch_order(step.lower(state, tokens, tokens).compile().as_text())


@pytest.mark.slow
@needs_target
@pytest.mark.parametrize("policy", CHAIN)
def test_the_partitioner_at_its_best_hides_all_but_two_collectives_on_h200(partitioner, policy):
    found = schedule_on_h200(partitioner, policy, layers=4)
    assert len(found.exposed("all-gather", "reduce-scatter", "all-reduce")) <= 2
    gathers = [e.direction for e in found.collectives("all-gather")]
    assert (gathers.count("forward"), gathers.count("backward")) == (6, 4 * (policy == "regather"))
