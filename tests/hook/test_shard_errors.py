"""Errors and warnings of `gtp.shard` and of sharded models, each with a remedy."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import naming

import gtp_jax as gtp

from .models import GPT2, Block
from .steps import MESHES, scope


@nnx.jit
def make():
    return GPT2(nnx.Rngs(0, dropout=1), depth=2)


def bare():
    return nnx.List([nnx.Param(jnp.ones((32, 32)))])


def with_own():
    model = make()
    model.own = gtp.Param(jnp.ones((32, 32)))
    return model


def at(pattern, *axes):
    """Returns options that partition the weights that a pattern matches."""
    return dict(min_size=64, specs={pattern: P(*(axes or ("gtp",)))})


# a model, options of `shard`, and what the message names
CASES = {
    "no pattern": (make, dict(blocks="layers.*", min_size=64), "`blocks` 'layers.*' blocks.0, blocks.1 'blocks.*'"),
    "no class": (make, dict(blocks=nnx.Conv, min_size=64), "Conv no module"),
    "no list": (nnx.jit(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0))), dict(min_size=8), "list blocks"),
    "all small": (make, {}, "`nnx.Param` 16384 `min_size`"),
    "unknown axis": (make, at("embed.embedding", "fsdp"), "embed.embedding (32, 16) 'fsdp' ('dp', 'gtp', 'tp')"),
    "does not divide": (make, at("positions"), "8 ranks gtp dimension 0"),
    "a pattern matches nothing": (make, at("embed.kernel"), "'embed.kernel' embed.embedding"),
    "a small weight": (make, at("norm.scale"), "'norm.scale' 16 `min_size` 64"),
    "a `gtp_jax.Param`": (with_own, at("own"), "own `gtp_jax.Param` Leave"),
    "no parameter": (make, at("blocks.*.dropout.rngs.count"), "blocks.0.dropout.rngs.count `nnx.Param`"),
    "an unknown method": (make, dict(min_size=64, methods=("__call__", "atend")), "`methods` 'atend' attend"),
    "no methods at all": (bare, dict(min_size=64, methods=("f",)), "`methods` 'f' nearest"),
    "methods as a string": (make, dict(min_size=64, methods="attend"), "`methods` 'attend' tuple"),
    "a partition for XLA to choose": (make, at("embed.embedding", P.UNCONSTRAINED), "(UNCONSTRAINED,) `specs` axis"),
    "remat": (make, dict(remat="all"), "`remat` 'all' 'nothing'"),
    "remat as a list": (make, dict(remat=["matmuls"]), "`remat` ['matmuls']"),
    "a loop body of a stack": (
        make,
        dict(schedule=gtp.nn.Schedule(unroll=2)),
        "`schedule` unroll=2 `gtp_jax.Stack` leave",
    ),
    "another schedule": (make, dict(schedule="auto"), "`schedule` 'auto' `gtp_jax.nn.Schedule`"),
    "min_size": (make, dict(min_size=0), "`min_size` 0"),
    "min_size as a truth value": (make, dict(min_size=True), "`min_size` True"),
    "the sum of gradients": (make, dict(grad_reduce="bf16"), "`grad_reduce` 'bf16' 'float32' `None`"),
    "a model of another type": (dict, {}, "`model` dict `nnx.Module`"),
    "blocks of another type": (make, dict(blocks=3, min_size=64), "`blocks` 3 pattern"),
    "one of several blocks": (make, dict(blocks=("blocks.*", 3), min_size=64), "`blocks` ('blocks.*', 3) 3 allowed"),
    "a typo in several": (make, dict(blocks=("blocks.*", "blokcs.*"), min_size=64), "`blocks` 'blokcs.*' no module"),
    "no blocks": (make, dict(blocks=(), min_size=64), "`blocks` () tuple"),
}


@pytest.mark.parametrize("case", CASES)
def test_arguments_are_refused_by_name(case, x64):
    factory, options, message = CASES[case]
    with scope(MESHES["gtp 8"]), pytest.raises((ValueError, TypeError), match=naming(message)):
        gtp.shard(factory(), **options)


class Few(nnx.Module):
    """Two blocks, and an array that the model owns itself."""

    def __init__(self):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)])
        self.tables = nnx.List([nnx.Param(jnp.arange(128.0).reshape(8, 16))])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x + self.tables[0])))


X = np.ones((8, 16), np.float32)
plain_few = nnx.jit(Few)


def few():
    return gtp.shard(plain_few(), "layers.*", min_size=64)


def test_without_its_mesh_a_model_is_refused_when_sharded_and_when_called():
    with pytest.raises(ValueError, match=naming("no mesh in scope jax.set_mesh")):
        few()
    with scope(MESHES["gtp 8"]):
        model = few()
        with pytest.raises(ValueError, match=naming("already")):
            gtp.shard(model)
    with pytest.raises(ValueError, match=naming("tables.0 Few `gtp_jax.shard` gtp 8 no mesh jax.set_mesh")):
        model(X)
    with scope(MESHES["dp 2, gtp 4"]), pytest.raises(ValueError, match=naming("gtp 8 dp 2 x gtp 4")):
        model(X)


def test_under_a_recipe_a_model_sharded_on_one_device_is_refused_without_its_mesh():
    mesh = jax.make_mesh((1,), ("gtp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = few()
    with gtp.use_recipe(gtp.FP8(matmuls=False)):
        with pytest.raises(ValueError, match=naming("weight `gtp_jax.shard` no mesh jax.set_mesh")):
            model(X)
        with jax.set_mesh(mesh):
            assert np.isfinite(nnx.jit(lambda model: model(X))(model)).all()


def test_arrays_from_elsewhere_are_refused_until_they_are_put_back():
    with scope(MESHES["gtp 8"]):
        model = few()
        wanted, kernel = model(X), model.layers[0].kernel
        kernel.set_raw_value(jax.device_put(jax.device_get(kernel.get_raw_value()), jax.devices()[0]))
        with pytest.raises(ValueError, match=naming("layers.0.kernel gtp 8 `gtp_jax.shard` again")):
            model(X)
        assert jnp.array_equal(gtp.shard(model)(X), wanted)
    with jax.set_mesh(jax.make_mesh((8, 1), ("gtp", "other"), axis_types=(AxisType.Auto,) * 2)):
        with pytest.raises(ValueError, match=naming("gtp 8 x other 1 `gtp_jax.shard`")):
            model(X)
        assert jnp.array_equal(gtp.shard(model)(X), wanted)


UPDATES = [("the model", False), ("the model", True), ("an unsharded model", False), ("its tables alone", False)]


@pytest.mark.parametrize("of, committed", UPDATES)
def test_after_nnx_update_with_arrays_on_one_device_the_next_call_refuses_them(of, committed):
    wanted, device = plain_few()(X), jax.devices()[0] if committed else None

    def call(model, x):  # `nnx.jit` would put arrays back itself
        graph, state = nnx.split(model)
        return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)

    with scope(MESHES["gtp 8"]):
        model = few()
        own = [(array.sharding, array.ndim) for array in jax.tree.leaves(nnx.state(model))]
        state = nnx.state(model if of == "the model" else plain_few())
        state = jax.tree.map(lambda array: jax.device_put(np.asarray(array), device), state)
        if of == "its tables alone":
            state = nnx.filter_state(state, nnx.PathContains("tables"))
        nnx.update(model, state)
        with pytest.raises(ValueError, match=naming("`nnx.update` `gtp_jax.shard` again")):
            model(X)
        if of == "the model" and not committed:  # a trace does not know where arrays are
            np.testing.assert_allclose(call(model, X), wanted, atol=1e-5)
        elif not committed:
            with pytest.raises(ValueError, match=naming("array metadata another weight")):
                call(model, X)
        assert gtp.shard(model) is model
        np.testing.assert_allclose(call(model, X), wanted, atol=1e-5)
        placed = zip(jax.tree.leaves(nnx.state(model, nnx.Param)), own, strict=True)
        assert all(array.sharding.is_equivalent_to(*place) for array, place in placed)
        with pytest.raises(ValueError, match=naming("already")):
            gtp.shard(model)


# an option of a second call, how the message says it, and how what the first call had
OTHER_OPTIONS = [
    ({"remat": "nothing"}, "`remat` 'nothing' 'matmuls'"),
    ({"grad_reduce": "float32"}, "`grad_reduce` 'float32' None"),
    ({"min_size": 128}, "`min_size` 128 64"),
    ({"schedule": gtp.nn.Schedule(keep_gathered=0)}, "`schedule` keep_gathered=0 keep_gathered='auto'"),
    ({"methods": ("attend",)}, "`methods` ('attend',) ('__call__', 'attend')"),
    ({"specs": {"*.bias": None}}, "`specs` {'*.bias': None} {}"),
    ({"roles": gtp.mesh.Roles(tensor=None)}, "`roles` tensor=None tensor='tp'"),
    ({"blocks": nnx.Linear}, "`blocks` Linear blocks.0.up blocks.0, blocks.1"),
    ({"blocks": "none"}, "`blocks` 'none' blocks.0, blocks.1"),
]


def test_a_second_call_refuses_options_that_differ_from_those_of_the_first(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), Block, min_size=64)
        for other, message in OTHER_OPTIONS:
            with pytest.raises(ValueError, match=naming(message, "already Leave again")):
                gtp.shard(model, **other)


def only_linear(path, module):
    return type(module) is nnx.Linear


@pytest.mark.parametrize("blocks", [nnx.Linear, only_linear, "layers.*"])
def test_a_second_call_with_the_options_of_the_first_puts_arrays_back(blocks):
    options = dict(min_size=64, specs={"tables.0": None}, remat="nothing", methods=("__call__",))
    options |= dict(schedule=gtp.nn.Schedule(keep_gathered=0), grad_reduce="float32", roles=gtp.mesh.Roles(tensor=None))
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(plain_few(), only_linear, **options)
        classes, wanted = [type(module) for _, module in nnx.iter_modules(model)], model(X)
        nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), jax.devices()[0]))
        assert gtp.shard(model, blocks, **options) is model
        assert [type(module) for _, module in nnx.iter_modules(model)] == classes
        assert jnp.array_equal(model(X), wanted)


def odd(rows, columns, **metadata):
    zeros = lambda _, shape, dtype: jnp.zeros(shape, dtype)  # noqa: E731
    layer = lambda: nnx.Linear(rows, columns, kernel_init=zeros, rngs=nnx.Rngs(0))  # noqa: E731
    model = nnx.jit(lambda: nnx.Sequential(layer(), layer()))()
    for layer, (name, value) in itertools.product(model.layers, metadata.items()):
        layer.kernel.set_metadata(name, value)
    return model


@pytest.mark.filterwarnings("default")
def test_large_weights_that_stay_whole_or_that_only_dp_divides_are_worth_a_warning():
    with scope(MESHES["gtp 8"]):
        with gtp.layout.even_shares(False):
            with pytest.warns(UserWarning, match=naming("(1031, 1033) layers.0.kernel even_shares(False)")):
                gtp.shard(odd(1031, 1033))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a `TrainState` pads it
            model = gtp.shard(odd(1031, 1033))
        with pytest.warns(UserWarning, match=naming("`nnx.Optimizer` (1031, 1033) `gtp_jax.TrainState`")):
            nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        with pytest.warns(UserWarning) as found:  # weights with a hook are never padded
            gtp.shard(odd(1031, 1033, on_get_value=lambda _, value: value))
    said = [str(one.message) for one in found if "(1031, 1033)" in str(one.message)]
    assert said and not any("even_shares" in one for one in said)
    named = naming("(1029, 1031) dp 3 layers.0.kernel 6 dp x gtp")
    with jax.set_mesh(gtp.make_mesh(dp=3, gtp=2, devices=jax.devices()[:6])):
        with gtp.layout.even_shares(False), pytest.warns(UserWarning, match=named):
            model = gtp.shard(odd(1029, 1031))
    assert model.layers[0].kernel.get_raw_value().sharding.spec == P("dp", None)


class Constrained(nnx.Module):
    """Layers whose author constrains their output over the mesh, as `nnx` models for the partitioner do."""

    def __init__(self, *layers):
        self.layers = nnx.List(layers)

    def __call__(self, x):
        return jax.lax.with_sharding_constraint(self.layers[0](x), P("gtp"))


@pytest.mark.parametrize("blocks", ["layers.*", Constrained], ids=["around a block", "in a block"])
def test_a_constraint_over_an_axis_is_refused_in_local_view_and_works_in_global_view(blocks):
    def loss(model, batch):
        return jnp.sum(model(batch) ** 2), jnp.float32(batch.shape[0])

    with scope(MESHES["gtp 8"]):
        model, optimizer = Constrained(nnx.Linear(16, 16, rngs=nnx.Rngs(0))), optax.sgd(0.1)
        model = nnx.Sequential(model) if blocks is Constrained else model
        state = gtp.TrainState.create(gtp.shard(model, blocks, min_size=64), optimizer)
        with pytest.raises(ValueError, match=naming("Constrained constrains local view='global'")) as refused:
            gtp.train_step(loss, optimizer, view="local")(state, X)
        assert str(refused.value).count("Constrained") == 1
        assert jnp.isfinite(gtp.train_step(loss, optimizer)(state, X)[1]["loss"])
