"""Modules that several others share, stacked weights that a scan slices, and gtp_jax's own stacks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp

from .models import F64, WIDTH
from .steps import MESHES, assert_equal, scope, together


def mean(model, x):
    return jnp.sin(3 * model(x)).mean()


def inputs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(16, WIDTH)))


class Sharing(nnx.Module):
    """A block that uses a module of the model around it."""

    def __init__(self, shared, rngs):
        self.shared, self.own = shared, nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        return x + jnp.tanh(self.shared(jnp.sin(self.own(x))))


class SharingModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.entry = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)
        self.blocks = nnx.List([Sharing(self.entry, rngs) for _ in range(2)])

    def __call__(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.entry(x)


def test_a_module_that_several_blocks_hold_has_the_sum_of_its_gradients(x64):
    assert_equal(*together(SharingModel, mean, inputs(), MESHES["gtp 8"], blocks="blocks.*"))


class Reading(nnx.Module):
    """A head that multiplies by a table which the model holds too, and reads itself."""

    def __init__(self, table):
        self.table = table

    def __call__(self, x):
        return x @ self.table[...].T


class Tied(nnx.Module):
    def __init__(self, rngs, remat=False):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (64, WIDTH)))
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.head, self.remat = Reading(self.table), remat

    def __call__(self, tokens):
        x = self.table[...][tokens]
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        head = lambda self, x: self.logits(x)  # noqa: E731
        return (nnx.remat(head) if self.remat else head)(self, x)

    def logits(self, x):
        return self.head(x) + x @ self.table[...].T


VIEWS = [("local", gtp.NVFP4(), False), ("local", gtp.recipes.BF16(), True), ("global", gtp.NVFP4(), False)]


@pytest.mark.parametrize("view, recipe, remat", others_full(VIEWS, VIEWS[1:2]), ids=str)
def test_a_weight_of_the_model_itself_that_a_module_shares_is_gathered_once(view, recipe, remat):
    def loss(model, tokens):
        return gtp.cross_entropy(model(tokens), jnp.roll(tokens, 1, axis=1))

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (16, 4)))
    with scope(MESHES["gtp 8"]):
        errors = gtp.train.check(
            loss, lambda rngs: gtp.shard(Tied(rngs, remat), "blocks.*", min_size=64), tokens, view=view, recipe=recipe
        )
    assert len(errors) == 6


class Looping(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.ones((WIDTH, WIDTH)))

    def __call__(self, x):
        return self.blocks[1](self.blocks[0](x)) @ self.scale[...]


@pytest.mark.parametrize("view", others_full(["global", "local"], ["local"]))
def test_a_model_called_in_a_loop_into_which_it_is_not_passed_gathers_its_weights_there(view):
    def loss(model, x):
        y = jnp.sin(jax.lax.scan(lambda x, _: (model(x), None), x, length=2)[0])
        return y.sum(), jnp.float32(y.size)

    with scope(MESHES["gtp 8"]):
        assert gtp.train.check(
            loss, lambda rngs: gtp.shard(Looping(rngs), "blocks.*", min_size=64), inputs(), view=view
        )


class TwoPaths(nnx.Module):
    def __init__(self, rngs):
        self.entry = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([self.entry, nnx.Linear(WIDTH, WIDTH, rngs=rngs), self.entry])
        self.wide.parent = self

    def __call__(self, x):
        return self.blocks[2](self.blocks[1](self.blocks[0](x)))


def test_a_shared_module_is_known_by_each_of_its_paths():
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(TwoPaths)(nnx.Rngs(0)), "blocks.*", min_size=64, specs={"blocks.2.kernel": P("gtp")})
        assert model.entry.kernel.get_value().sharding.spec == P("gtp")
        found = gtp.explain(model, gtp.FP8(exclude=("blocks.2",)), call=lambda model: model(jnp.ones((8, WIDTH))))
    unit = next(unit for unit in found.units if "entry" in (unit.module, *unit.also))
    assert {unit.module, *unit.also} == {"blocks.0", "blocks.2", "entry"}
    reasons = {name: w.reason for w in found.weights for name in (w.weight, *w.also)}
    assert reasons["entry.kernel"] == reasons["blocks.0.kernel"] == "it matches 'blocks.2'"
    assert reasons["blocks.1.kernel"] == ""
    assert " = entry" in str(found) or "entry = " in str(found)


class Predictors(nnx.Module):
    """A head with the table of an embedding, which two further predictors share."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, WIDTH, rngs=rngs)
        self.head = nnx.Dict(embed=self.embed, out=nnx.Linear(WIDTH, 64, rngs=rngs))
        self.predictors = nnx.List(
            [nnx.Dict(head=self.head, own=nnx.Linear(WIDTH, WIDTH, rngs=rngs)) for _ in range(2)]
        )


predictors = nnx.jit(Predictors)


@pytest.mark.parametrize("path", ["head.embed", "predictors.1.head.embed"])
def test_what_a_shared_module_shares_is_known_by_each_of_its_paths(path):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(predictors(nnx.Rngs(0)), nnx.Linear, min_size=64, specs={f"{path}.*": P(None, "gtp")})
        assert model.embed.embedding.get_value().sharding.spec == P(None, "gtp")


def test_a_list_that_holds_one_module_several_times_has_it_as_its_block():
    with scope(MESHES["gtp 8"]):
        model = nnx.jit(lambda: nnx.Sequential(*[nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))] * 3))()
        model = gtp.shard(model, min_size=64)
        found = gtp.explain(model, call=lambda model: model(inputs()))
    assert [call.prefetched for call in found.calls] == [False, True, True]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs, **F64)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Scanned(nnx.Module):
    """Layers whose weights are stacked, and which run in a scan."""

    def __init__(self, length=3):
        self.layers = nnx.vmap(Block)(nnx.Rngs(0).fork(split=length))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_layers_that_a_scan_takes_apart_are_gathered_one_by_one(x64):
    assert_equal(*together(Scanned, mean, inputs(), MESHES["gtp 8"], blocks=Block))


def test_explain_reports_the_slices_that_a_scan_gathers():
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(Scanned)(), Block, min_size=64)
        whole = gtp.explain(model, gtp.NVFP4())
        found = gtp.explain(model, gtp.NVFP4(), call=lambda model: model(jnp.ones((16, WIDTH))))
    up, wide = (next(w for w in one.weights if w.weight == "layers.up.kernel") for one in (found, whole))
    assert (up.slices, up.shape) == (3, (WIDTH, 2 * WIDTH))
    assert (wide.slices, wide.shape) == (1, (3, WIDTH, 2 * WIDTH))
    assert (up.wire, up.bytes) == ("NVFP4", WIDTH * 2 * WIDTH // 2 + 8 * 16)  # each rank sends codes and 16 B of scales
    assert {call.module for call in found.calls} == {"layers"}
    assert 3 * found.units[0].bytes == whole.units[0].bytes


def test_a_scan_over_a_dimension_that_is_sharded_is_refused(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.jit(lambda: Scanned(8))(), Block, min_size=64, specs={"layers.up.kernel": P("gtp")})
        with pytest.raises(ValueError, match=naming("layers.up.kernel 3 (16, 32) `specs`")):
            model(inputs())


class Stacked(nnx.Module):
    """A `Stack` of blocks with a plain layer in them, and a plain head."""

    def __init__(self, rngs):
        self.stack = gtp.Stack(Block, length=2, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64) for _ in range(2)])

    def __call__(self, x):
        x = self.stack(x)
        for head in self.heads:
            x = head(x)
        return x


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
def test_what_is_in_a_stack_is_left_alone(x64):
    def loss(degrees, factory):
        with scope(degrees):
            state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optax.sgd(0.5))
            step = gtp.train_step(mean, optax.sgd(0.5))
            state, first = step(state, inputs())
            state, second = step(state, inputs())
            return [float(first["loss"]), float(second["loss"])], state

    wanted, _ = loss(None, Stacked)
    found, state = loss(MESHES["gtp 8"], lambda rngs: gtp.shard(Stacked(rngs), min_size=64))
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    kernels = state.params["stack"]["layers"]["up"]["kernel"], state.params["heads"]["0"]["kernel"]
    assert [kernel.sharding.is_fully_replicated for kernel in kernels] == [True, False]
    assert jax.tree.leaves(state.model_def.specs)
