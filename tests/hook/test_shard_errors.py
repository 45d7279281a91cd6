"""Errors and warnings of `gtp.shard` and of sharded models, each with a remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp

from .models import GPT2, Block, tokens
from .steps import MESHES, scope


def make():
    return GPT2(nnx.Rngs(0, dropout=1))


def with_own():
    model = make()
    model.own = gtp.Dense(8, 4, rngs=nnx.Rngs(0))
    model.mine = gtp.Param(jnp.ones((32, 32)))
    return model


CASES = {
    "no pattern matches": (
        lambda: gtp.shard(make(), "layers.*", min_size=64),
        r"`blocks` is 'layers\.\*', which matches no module.*blocks are blocks\.0, blocks\.1.*; 'blocks\.\*' matches",
    ),
    "no class matches": (lambda: gtp.shard(make(), nnx.Conv, min_size=64), "matches no module"),
    "no list": (
        lambda: gtp.shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), min_size=8),
        "no list of two or more callable modules.*Name the blocks",
    ),
    "all small": (lambda: gtp.shard(make()), "no floating-point `nnx.Param` of 16384 elements.*smaller `min_size`"),
    "unknown axis": (
        lambda: gtp.shard(make(), min_size=64, specs={"embed.embedding": P("fsdp")}),
        r"embed\.embedding of shape \(32, 16\).*'fsdp'.*axes \('dp', 'gtp', 'tp'\)",
    ),
    "does not divide": (
        lambda: gtp.shard(make(), min_size=64, specs={"positions": P("gtp")}),
        "8 ranks of gtp do not divide dimension 0",
    ),
    "a pattern matches nothing": (
        lambda: gtp.shard(make(), min_size=64, specs={"embed.kernel": P("gtp")}),
        r"'embed\.kernel', which matches none of the model's weights to shard; the nearest are embed\.embedding",
    ),
    "a pattern matches a small weight alone": (
        lambda: gtp.shard(make(), min_size=64, specs={"norm.scale": P("gtp")}),
        r"pattern 'norm\.scale', which matches norm\.scale.* it has 16 elements, fewer than `min_size`, 64\. Pass",
    ),
    "a pattern matches a small weight of gtp_jax's own layers": (
        lambda: gtp.shard(with_own(), min_size=64, specs={"own.kernel": P("gtp")}),
        r"which matches own\.kernel\. That is not a weight to shard: it is a `gtp_jax\.Param`, or belongs.* Leave the",
    ),
    "a pattern matches a large `gtp_jax.Param`": (
        lambda: gtp.shard(with_own(), min_size=64, specs={"mine": P("gtp")}),
        r"which matches mine\. That is not a weight to shard: it is a `gtp_jax\.Param`, or belongs.* Leave the",
    ),
    "a pattern matches no parameter": (
        lambda: gtp.shard(make(), min_size=64, specs={"blocks.*.dropout.rngs.count": P("gtp")}),
        r"which matches blocks\.0\.dropout\.rngs\.count.* not a floating-point `nnx\.Param` of at least",
    ),
    "an unknown method": (
        lambda: gtp.shard(make(), min_size=64, methods=("__call__", "atend")),
        "`methods` has 'atend', which no module of the model defines as a .*; the nearest names are attend",
    ),
    "a method of a model without methods": (
        lambda: gtp.shard(nnx.List([nnx.Param(jnp.ones((32, 32)))]), min_size=64, methods=("f",)),
        "`methods` has 'f', which no module .*; the nearest names are ",
    ),
    "a partition that XLA is to choose": (
        lambda: gtp.shard(make(), min_size=64, specs={"embed.embedding": P(P.UNCONSTRAINED)}),
        r"partitioned as \(UNCONSTRAINED,\) by .* In `specs`, give each dimension an axis",
    ),
    "remat as a list": (lambda: gtp.shard(make(), remat=["matmuls"]), r"`remat` is \['matmuls'\]; it must be one of"),
    "min_size as a truth value": (lambda: gtp.shard(make(), min_size=True), "`min_size` is True"),
    "remat": (lambda: gtp.shard(make(), remat="all"), "`remat` is 'all'; it must be one of 'nothing'"),
    "remat of a stack": (
        lambda: gtp.shard(make(), remat="offload-matmuls"),
        "`remat` is 'offload-matmuls', which moves saved activations to the host. `gtp_jax.Stack` supports that; "
        "`gtp_jax.shard` does not. Use 'matmuls', which saves the same activations on the device.",
    ),
    "min_size": (lambda: gtp.shard(make(), min_size=0), "`min_size` is 0"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_arguments_are_refused_by_name(case, x64):
    call, message = CASES[case]
    with scope(MESHES["gtp 8"]), pytest.raises(ValueError, match=message):
        call()


def test_other_types_are_refused(x64):
    with scope(MESHES["gtp 8"]):
        with pytest.raises(TypeError, match="`model` is a dict; it must be an `nnx.Module`"):
            gtp.shard({})
        with pytest.raises(TypeError, match="`blocks` is 3; it must be a pattern"):
            gtp.shard(make(), 3, min_size=64)
        with pytest.raises(TypeError, match=r"`blocks` is \('blocks\.\*', 3\), of which 3 is not allowed; it must be"):
            gtp.shard(make(), ("blocks.*", 3), min_size=64)
        with pytest.raises(TypeError, match=r"`blocks` is \(\); it must be .*, or a tuple of at least one of these"):
            gtp.shard(make(), (), min_size=64)
        with pytest.raises(TypeError, match="`methods` is 'attend'; it must be a tuple of names"):
            gtp.shard(make(), min_size=64, methods="attend")


def test_a_mesh_with_other_axes_is_refused_with_the_roles_to_pass(x64):
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)),
        pytest.raises(ValueError, match=re.escape("batch=('fsdp',), weights=('fsdp',), tensor='tp')`")),
    ):
        gtp.shard(make(), min_size=64)


def test_without_a_mesh_it_is_refused_when_sharded_and_when_called(x64):
    with pytest.raises(ValueError, match="no mesh in scope.*jax.set_mesh"):
        gtp.shard(make(), min_size=64)
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), min_size=64)
    with pytest.raises(
        ValueError,
        match=r"^[a-z0-9.]+ of \w+ was sharded by `gtp_jax.shard` over gtp 8, and no mesh is in scope.*jax.set_mesh",
    ):
        model(tokens())
    with (
        scope(MESHES["dp 2, gtp 4"]),
        pytest.raises(ValueError, match="over gtp 8, and the mesh in scope is dp 2 x gtp 4"),
    ):
        model(tokens())


def test_under_a_recipe_a_model_sharded_on_one_device_is_refused_without_its_mesh(x64):
    mesh = jax.make_mesh((1,), ("gtp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = gtp.shard(make(), min_size=64)
    refused = r"the weight [a-z0-9.]+ of \w+ was sharded by `gtp_jax.shard`, and no mesh is in scope.*jax.set_mesh"
    with gtp.use_recipe(gtp.FP8(matmuls=False)), pytest.raises(ValueError, match=refused):
        model(tokens())
    with jax.set_mesh(mesh), gtp.use_recipe(gtp.FP8(matmuls=False)):
        assert jnp.isfinite(model(tokens())).all()


def test_a_model_is_sharded_once(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), Block, min_size=64)
        with pytest.raises(ValueError, match="sharded already"):
            gtp.shard(model, Block, min_size=64)


def test_arrays_from_elsewhere_are_refused_until_they_are_put_back(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), Block, min_size=64)
        model.eval()
        wanted = model(tokens())
        kernel = model.blocks[0].up.kernel
        kernel.set_raw_value(jax.device_put(jax.device_get(kernel.get_raw_value()), jax.devices()[0]))
        refused = r"the weight blocks\.0\.up\.kernel of Block, .* as P.*, holds an array with .*Single.* gtp 8"
        with pytest.raises(ValueError, match=refused + ".* Call `gtp_jax.shard` on the model again"):
            model(tokens())
        assert jnp.array_equal(gtp.shard(model)(tokens()), wanted)


def test_arrays_on_a_mesh_with_another_axis_are_refused_until_they_are_put_back(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), Block, min_size=64)
        model.eval()
        wanted = model(tokens())
    axes = ("gtp", "other")
    with jax.set_mesh(jax.make_mesh((8, 1), axes, axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        with pytest.raises(ValueError, match="the mesh in scope is gtp 8 x other 1. .*Call `gtp_jax.shard` on the"):
            model(tokens())
        assert jnp.array_equal(gtp.shard(model)(tokens()), wanted)


class Few(nnx.Module):
    """Two blocks, and an array that the model owns itself."""

    def __init__(self):
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)])
        self.tables = nnx.List([nnx.Param(jnp.arange(128.0).reshape(8, 16))])

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x + self.tables[0])))


def on_one_device(model, committed):
    device = jax.devices()[0] if committed else None
    return jax.tree.map(lambda array: jax.device_put(np.asarray(array), device), nnx.state(model))


UPDATES = [("the model", False), ("the model", True), ("an unsharded model", False), ("its tables alone", False)]


@pytest.mark.parametrize("of, committed", UPDATES)
def test_after_nnx_update_with_arrays_on_one_device_the_next_call_refuses_them(of, committed):
    x, wanted = np.ones((8, 16), np.float32), Few()(jnp.ones((8, 16)))

    def call(model, x):  # `nnx.jit` would put arrays back itself
        graph, state = nnx.split(model)
        return jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)

    with scope(MESHES["gtp 8"]):
        model = gtp.shard(Few(), "layers.*", min_size=64)
        own = [(array.sharding, array.ndim) for array in jax.tree.leaves(nnx.state(model))]
        state = on_one_device(model if of == "the model" else Few(), committed)
        if of == "its tables alone":
            state = nnx.filter_state(state, nnx.PathContains("tables"))
        nnx.update(model, state)
        with pytest.raises(ValueError, match="`nnx.update`.* Call `gtp_jax.shard` on the model again, which"):
            model(x)
        if of == "the model" and not committed:  # a trace does not know where arrays are
            np.testing.assert_allclose(call(model, x), wanted, atol=1e-5)
        elif not committed:
            with pytest.raises(ValueError, match="now has the array and the metadata of another weight"):
                call(model, x)
        assert gtp.shard(model) is model
        np.testing.assert_allclose(call(model, x), wanted, atol=1e-5)
        placed = zip(jax.tree.leaves(nnx.state(model, nnx.Param)), own, strict=True)
        assert all(array.sharding.is_equivalent_to(*place) for array, place in placed)
        with pytest.raises(ValueError, match="sharded already, and no array has to be put back"):
            gtp.shard(model)


class Odd(nnx.Module):
    def __init__(self):
        self.layers = nnx.List([nnx.Linear(1031, 1033, rngs=nnx.Rngs(0)) for _ in range(2)])


def only_blocks(path, module):
    return type(module) is Block


OTHER_OPTIONS = [
    ({"remat": "nothing"}, "`remat` is 'nothing'", "'matmuls'"),
    ({"grad_reduce": "float32"}, "`grad_reduce` is 'float32'", "None"),
    ({"min_size": 128}, "`min_size` is 128", "64"),
    ({"keep_last": False}, "`keep_last` is False", "True"),
    ({"methods": ("attend",)}, r"`methods` is \('attend',\)", r"\('__call__', 'attend'\)"),
    ({"specs": {"*.bias": None}}, r"`specs` is {'\*.bias': None}", "{}"),
    ({"roles": gtp.Roles(tensor=None)}, r"`roles` is Roles\(.*tensor=None.*", r"Roles\(.*tensor='tp'"),
    ({"blocks": nnx.Linear}, "`blocks` is <class .*Linear'>, which matches blocks.0.*", r"blocks\.0, blocks\.1"),
    ({"blocks": "none"}, "`blocks` is 'none', which matches no module", r"blocks\.0, blocks\.1"),
]


@pytest.mark.parametrize("other, came, first", OTHER_OPTIONS)
def test_a_second_call_refuses_options_that_differ_from_those_of_the_first(other, came, first, x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), Block, min_size=64)
        refused = f"^{came}, but the model is sharded already, with {first}.*Leave it out .*build it again"
        with pytest.raises(ValueError, match=refused):
            gtp.shard(model, **other)


@pytest.mark.parametrize("blocks", [Block, only_blocks, "blocks.*"])
def test_a_second_call_with_the_options_of_the_first_puts_arrays_back(blocks, x64):
    options = dict(min_size=64, specs={"positions": None}, remat="nothing", keep_last=False, methods=("__call__",))
    options |= dict(grad_reduce="float32", roles=gtp.Roles(tensor=None))
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(make(), only_blocks, **options)
        model.eval()
        classes, wanted = [type(module) for _, module in nnx.iter_modules(model)], model(tokens())
        nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), jax.devices()[0]))
        assert gtp.shard(model, blocks, **options) is model
        assert [type(module) for _, module in nnx.iter_modules(model)] == classes
        assert jnp.array_equal(model(tokens()), wanted)


@pytest.mark.filterwarnings("default")
def test_a_large_weight_that_stays_whole_is_worth_a_warning():
    with (
        scope(MESHES["gtp 8"]),
        pytest.warns(UserWarning, match=r"\(1031, 1033\) stays whole on every rank: layers\.0\.kernel.*even_shares"),
    ):
        gtp.shard(Odd())


@pytest.mark.filterwarnings("default")
def test_a_warning_offers_padding_only_for_weights_that_may_be_padded():
    model = Odd()
    for layer in model.layers:
        layer.kernel.set_metadata(on_get_value=lambda _, value: value)
    with scope(MESHES["gtp 8"]), pytest.warns(UserWarning) as found:
        gtp.shard(model)
    said = [str(one.message) for one in found if "stays whole" in str(one.message)]
    assert len(said) == 2 and not any("even_shares" in one for one in said)


@pytest.mark.filterwarnings("default")
def test_a_large_weight_that_only_dp_divides_is_worth_a_warning():
    class Thirds(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Linear(1029, 1031, rngs=nnx.Rngs(0)) for _ in range(2)])

    words = r"\(1029, 1031\) is divided over dp 3 only: layers\.0\.kernel\. 6 ranks of dp x gtp divide none"
    with (
        jax.set_mesh(gtp.make_mesh(dp=3, gtp=2, devices=jax.devices()[:6])),
        pytest.warns(UserWarning, match=words),
    ):
        model = gtp.shard(Thirds())
        assert model.layers[0].kernel.get_raw_value().sharding.spec == P("dp", None)


class Constrained(nnx.Module):
    """A block whose author constrains its output over the mesh, as `nnx` models for the partitioner do."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return jax.lax.with_sharding_constraint(self.linear(x), P("gtp"))


@pytest.mark.parametrize("where", ["in a block", "around blocks"])
def test_a_constraint_over_an_axis_is_refused_in_local_view_and_works_in_global_view(where):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Constrained(rngs) if where == "in a block" else nnx.Linear(16, 16, rngs=rngs)] * 1)

        def __call__(self, x):
            y = self.layers[0](x)
            return y if where == "in a block" else jax.lax.with_sharding_constraint(y, P("gtp"))

    def loss(model, batch):
        return jnp.sum(model(batch) ** 2), jnp.float32(batch.shape[0])

    with scope(MESHES["gtp 8"]):
        optimizer = optax.sgd(0.1)
        model = gtp.shard(Model(nnx.Rngs(0)), "layers.*", min_size=64)
        state, batch = gtp.TrainState.create(model, optimizer), jnp.ones((8, 16))
        name = "Constrained" if where == "in a block" else "Model"
        message = rf"^{name} constrains the sharding of an array over axes of the mesh, but in local.*Use `view='g"
        with pytest.raises(ValueError, match=message) as refused:
            gtp.train_step(loss, optimizer, view="local")(state, batch)
        assert str(refused.value).count("constrains the sharding") == 1
        assert jnp.isfinite(gtp.train_step(loss, optimizer)(state, batch)[1]["loss"])
