"""Roles of mesh axes are values: two models in one program use different ones, and each is the model without a mesh."""

import contextlib

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from messages import naming

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

SIZES = dict(
    vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
CONFIG = LlamaConfig(**SIZES, dtype="float64")


def mesh_of(**degrees: int) -> Mesh:
    array = np.asarray(jax.devices()[: int(np.prod(list(degrees.values())))]).reshape(tuple(degrees.values()))
    return Mesh(array, tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))


# Axes that nothing in the library names.
PODS = mesh_of(pod=2, data=2, shard=2), gtp.mesh.Roles(batch=("pod", "data", "shard"), weights=("shard",), tensor=None)
NODES = (
    mesh_of(node=2, local=2, model=2),
    gtp.mesh.Roles(batch=("node", "local"), weights=("node", "local"), tensor="model"),
)
REPLICAS = mesh_of(copy=2, gtp=2, tp=2), gtp.mesh.Roles(batch=("gtp",))  # an axis without a role: copies of everything


def begin(mesh, roles):
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), gtp.mesh.use_roles(roles):
        model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(3))
        return gtp.TrainState.create(model, optax.adamw(1e-2))


def batch(seed: int):
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (8, 9)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def close(found, expected, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, float(np.abs(b).max())))


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [(None, None), (gtp.FP8(), gtp.NVFP4())], ids=["bf16", "quantized"])
def test_two_models_of_different_roles_train_side_by_side_each_as_without_a_mesh(recipes, x64):
    """A made-up second batch axis in one, a made-up second weight axis in the other; their steps take turns."""
    places = (PODS, NODES)
    steps = [gtp.train_step(next_token_loss, optax.adamw(1e-2), recipe=r, max_grad_norm=0.5) for r in recipes]
    states = [begin(*place) for place in places]
    plain = [begin(None, gtp.mesh.Roles()) for _ in recipes]
    for seed in range(3):
        for i, (mesh, _) in enumerate(places):
            with jax.set_mesh(mesh):
                states[i], metrics = steps[i](states[i], batch(seed))
            plain[i], expected = steps[i](plain[i], batch(seed))
            close(metrics, expected)
    for state, expected in zip(states, plain, strict=True):
        close(state.params, expected.params, 1e-10)
    specs = [state.params["blocks"]["layers"]["mlp"]["up"]["kernel"]["gate"].sharding.spec for state in states]
    found = [{a for entry in spec if entry for a in np.ravel(entry)} for spec in specs]
    assert found == [{"shard", "pod", "data"}, {"node", "local", "model"}]


@pytest.mark.slow
def test_an_axis_without_a_role_replicates(x64):
    mesh, roles = REPLICAS
    state, plain = begin(mesh, roles), begin(None, gtp.mesh.Roles())
    step = gtp.train_step(next_token_loss, optax.adamw(1e-2))
    with jax.set_mesh(mesh):
        state, metrics = step(state, batch(0))
    plain, expected = step(plain, batch(0))
    close(metrics, expected)
    close(state.params, plain.params, 1e-10)


def test_roles_in_scope_are_part_of_the_key_of_jit():
    traced = []

    @jax.jit
    def read(x):
        traced.append(gtp.mesh.current_roles())
        return x

    other = gtp.mesh.Roles(batch=("data",))
    for roles in (gtp.mesh.Roles(), other, gtp.mesh.Roles()):
        with gtp.mesh.use_roles(roles):
            read(1.0)
    assert traced == [gtp.mesh.Roles(), other]


def test_modules_in_global_view_keep_their_roles(x64):
    """Called outside `use_roles`, under plain `jax.jit`."""
    mesh, roles = NODES
    x = np.random.default_rng(0).normal(size=(4, 6, 64))
    make = lambda rngs: gtp.MLP(64, 96, dtype="float64", param_dtype="float64", rngs=rngs)  # noqa: E731
    with jax.set_mesh(mesh):
        with gtp.mesh.use_roles(roles):
            graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
        found = jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x)
    expected = gtp.init(make, nnx.Rngs(0))(x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_a_model_of_mixed_roles_is_refused():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.a = gtp.Dense(8, 8, rngs=rngs)
            with gtp.mesh.use_roles(gtp.mesh.Roles(batch=("data",), weights=("data",), tensor=None)):
                self.b = gtp.Dense(8, 8, rngs=rngs)

    with pytest.raises(ValueError, match=naming("different roles: Build")):
        gtp.TrainState.create(Mixed(nnx.Rngs(0)), optax.sgd(1.0))


def test_roles_of_another_kind_are_refused():
    with pytest.raises(TypeError, match=naming("`roles` `gtp_jax.mesh.Roles`")):
        gtp.mesh.use_roles({"batch": "data"})


def test_a_number_for_each_example_is_refused_where_ranks_divide_sequences():
    with jax.set_mesh(gtp.make_mesh(cp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(gtp.init(lambda rngs: gtp.Embed(8, 4, rngs=rngs), nnx.Rngs(0)), optax.sgd(0.1))

        def loss(model, batch):
            return model(batch["tokens"]).sum(), 1.0

        loss.context_parallel = True
        step = gtp.train_step(loss, optax.sgd(0.1), view="local")
        with pytest.raises(ValueError, match=r"targets.* has shape \(4,\).*cp = 2.*view='global'"):
            step(state, {"tokens": np.zeros((4, 8), int), "targets": np.zeros(4, int)})
