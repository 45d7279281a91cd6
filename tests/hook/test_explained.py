"""What `explain` reports of models that `gtp.shard` has sharded, and of those that it has not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import naming

import gtp_jax as gtp

ROLES = gtp.mesh.Roles(batch=("fsdp",), weights=("fsdp",), tensor="tp")
METHODS = ("__call__", "encode", "decode")


class Embedder(nnx.Module):
    """An embedding without `__call__`, as Tunix's have."""

    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (32, 16)))

    def encode(self, tokens):
        return self.table[...][tokens]

    def decode(self, x):
        return x @ self.table[...].T


class Block(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones, ("tp",))
        self.norm = nnx.RMSNorm(16, scale_init=init, rngs=rngs)
        self.up = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + self.up(self.norm(x))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedder = Embedder(rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.decode(x)


TOKENS = jnp.zeros((8, 4), jnp.int32)


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def sharded(methods=METHODS):
    return gtp.shard(nnx.jit(Model)(nnx.Rngs(0)), "layers.*", min_size=64, roles=ROLES, methods=methods)


def test_the_even_share_is_over_the_axes_for_which_the_model_was_sharded(mesh):
    assert gtp.explain(sharded()).share.degrees == {"fsdp": 4, "tp": 2}


def test_a_module_whose_methods_do_not_gather_is_reported(mesh):
    for methods, gathered in ((METHODS, "ahead of its call"), (("__call__",), "by XLA")):
        facts = {unit.module: unit.gathered for unit in gtp.explain(sharded(methods)).units}
        assert facts["embedder"].startswith(gathered) and facts["layers.0"].startswith("ahead of its call")


def test_a_call_in_local_view_is_explained_as_in_global_view():
    def in_local_view(model):
        graph, state = nnx.split(model)
        call = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
        return jax.shard_map(call, in_specs=(specs, P()), out_specs=P(), check_vma=False)(state, x)

    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        x = jnp.ones((8, 16))
        layers = nnx.jit(lambda: nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))))
        model = gtp.shard(layers(), "layers.*", min_size=64)
        specs = jax.tree.map(lambda x: x.sharding.spec, nnx.state(model))
        local, whole = (gtp.explain(model, gtp.FP8(), call=call) for call in (in_local_view, lambda model: model(x)))
    assert local.weights == whole.weights and local.units == whole.units
    assert [weight.shape for weight in local.weights if weight.wire] == [(16, 16)] * 2


def test_a_module_that_the_explained_call_does_not_call_is_reported(mesh):
    found = gtp.explain(sharded(), call=lambda model: model.layers[1](model.embedder.encode(TOKENS)))
    assert [unit.module for unit in found.units if unit.gathered.startswith("by XLA")] == ["layers.0", "layers.2"]


@pytest.mark.parametrize("transform", [nnx.jit, nnx.remat])
def test_a_call_that_jax_has_already_traced_is_explained(transform, mesh):
    model, call = sharded(), transform(lambda model: model(TOKENS))
    nnx.eval_shape(call, model)
    for _ in range(2):
        units = [one.module for one in gtp.explain(model, call=call).calls]
        assert units == ["embedder", "layers.0", "layers.1", "layers.2", "embedder"]


def test_a_model_that_was_not_sharded_is_reported_as_such(mesh):
    assert re.search(naming("no weight"), str(gtp.explain(nnx.jit(Model)(nnx.Rngs(0)))))


def test_a_replaced_layer_is_refused_until_the_model_is_sharded_again(mesh):
    model, call = sharded(), nnx.jit(lambda model: model(TOKENS))
    wanted = call(model)
    model.layers[0].up = nnx.Linear(16, 16, rngs=nnx.Rngs(5))
    with pytest.raises(ValueError, match=naming("up.kernel replacing")):
        model(TOKENS)
    assert not np.allclose(call(gtp.shard(model)), wanted)
    assert model.layers[0].up.kernel.get_value().sharding.spec == model.layers[1].up.kernel.get_value().sharding.spec
