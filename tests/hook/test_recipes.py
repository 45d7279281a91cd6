"""Recipes for models of stock layers: sharded weights travel as codes, and have the values of the codes."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax.hlo import collectives

from ..ops.test_linear_blocks import rounded
from ..recipes.oracles import matrix
from ..weights.row_scaled import LARGEST, RowScaledRecipe
from .steps import MESHES, scope

RECIPES = {
    "FP8": gtp.FP8(),
    "MXFP8": gtp.MXFP8(),
    "NVFP4": gtp.NVFP4(),
    "NVFP4 of 1 x 16": gtp.NVFP4(block=(1, 16)),
}
ALL_MESHES = {**MESHES, "gtp 4, tp 2": dict(gtp=4, tp=2)}


def kernel_init(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Kernels(nnx.Module):
    """A block whose result is its weights. By name, the number of dimensions of features in."""

    INPUTS = {"up": 1, "down": 1, "ragged": 1, "heads": 1, "out": 2, "conv": 3}

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 256, kernel_init=kernel_init(None, "tp"), rngs=rngs)
        self.down = nnx.Linear(256, 64, kernel_init=kernel_init("tp", None), rngs=rngs)
        self.ragged = nnx.Linear(56, 40, rngs=rngs)  # ranks have no whole blocks
        self.heads = nnx.LinearGeneral(64, (4, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 16), 64, axis=(-2, -1), rngs=rngs)
        self.conv = nnx.Conv(8, 32, (3, 3), rngs=rngs)

    def __call__(self, x):
        return {name: x * getattr(self, name).kernel[...] for name in self.INPUTS}


class Shown(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Kernels(rngs) for _ in range(2)])

    def __call__(self, x):
        return [block(x) for block in self.blocks]


def quantized(kernel, form, inputs=1):
    """Returns the values of a kernel's codes, of the whole kernel quantized along its features in."""
    kernel = np.asarray(kernel)
    columns = kernel.reshape(int(np.prod(kernel.shape[:inputs])), -1)
    return matrix(columns.T, form, np.float32).T.reshape(kernel.shape)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("mesh", ALL_MESHES)
def test_weights_in_use_are_the_codes_of_whole_weights_bit_for_bit(mesh, name):
    recipe = RECIPES[name]
    with scope(ALL_MESHES[mesh]), gtp.use_recipe(recipe):
        model = gtp.shard(Shown(nnx.Rngs(0)), "blocks.*", min_size=64)
        found = nnx.jit(lambda model, x: model(x))(model, jnp.ones(()))
    for block, weights in zip(model.blocks, found, strict=True):
        for kernel, inputs in Kernels.INPUTS.items():
            master = getattr(block, kernel).kernel.get_value()
            np.testing.assert_array_equal(weights[kernel], quantized(master, recipe.wire, inputs), err_msg=kernel)


WIDTH, LENGTH, VOCAB, BATCH = 32, 32, 64, 16


class Block(nnx.Module):
    def __init__(self, rngs):
        self.heads = nnx.LinearGeneral(WIDTH, (4, 8), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 8), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.out(jnp.tanh(self.heads(x)))
        return x + self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    """Blocks, of which one is called twice and one inside `nnx.remat`, and an array that the model owns itself."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        for block in (self.blocks[0], self.blocks[1], self.blocks[1]):
            x = block(x)
        x = nnx.remat(lambda block, x: block(x))(self.blocks[2], x)
        return self.head(x)


INPUTS = {"heads": 1, "out": 2, "up": 1, "down": 1}


def loss(model, tokens):
    return gtp.cross_entropy(model(tokens), jnp.roll(tokens, 1, axis=1))


def mean_loss(model, tokens):
    total, count = loss(model, tokens)
    return total / count


def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)))


def at_codes(model, recipe):
    """Returns a copy of a model without a mesh, whose weights have the values of their codes."""
    copy = nnx.clone(model)
    for i, block in enumerate(copy.blocks):
        for name, inputs in INPUTS.items():
            if recipe.of(("blocks", str(i), name)).wire is not None:
                kernel = getattr(block, name).kernel
                kernel.set_value(jnp.asarray(quantized(kernel.get_value(), recipe.wire, inputs)))
    positions = quantized(copy.positions.get_value(), recipe.wire)
    copy.positions.set_value(jnp.asarray(positions))
    return copy


def flat(gradients):
    return {jax.tree_util.keystr(path): np.asarray(g) for path, g in jax.tree_util.tree_leaves_with_path(gradients)}


def assert_near(found, wanted, tolerance=2e-5):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name)


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
@pytest.mark.parametrize("name, mesh, keep_last", [("NVFP4", "gtp 8", True), ("MXFP8", "dp 2, gtp 4", False)])
def test_gradients_are_those_at_the_values_of_the_codes(name, mesh, keep_last):
    recipe, model = RECIPES[name], Model(nnx.Rngs(0))
    value_and_grad = nnx.jit(nnx.value_and_grad(mean_loss))
    wanted = value_and_grad(at_codes(model, recipe), tokens())
    unquantized = value_and_grad(model, tokens())
    with scope(ALL_MESHES[mesh]), gtp.use_recipe(recipe):
        sharded = gtp.shard(model, "blocks.*", min_size=64, keep_last=keep_last)
        found = value_and_grad(sharded, tokens())
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    assert_near(flat(found[1]), flat(wanted[1]))
    assert abs(float(wanted[0] - unquantized[0])) > 1e-4  # the codes have other values


def sharded(rngs):
    return gtp.shard(Model(rngs), "blocks.*", min_size=64)


def trained(mesh, steps=3, factory=sharded, **options):
    optimizer = optax.adamw(1e-2, eps=1e-3)
    with scope(ALL_MESHES[mesh]):
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(loss, optimizer, **options)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, tokens())
            losses.append(float(metrics["loss"]))
        return {"losses": np.asarray(losses), **flat(state.params)}


@pytest.fixture(scope="module")
def on_gtp_8():
    return trained("gtp 8", recipe=gtp.NVFP4())


def test_steps_of_train_step_are_the_same_on_other_meshes(on_gtp_8):
    assert_near(trained("dp 2, gtp 4", recipe=gtp.NVFP4()), on_gtp_8, 1e-3)
    assert on_gtp_8["losses"][2] < on_gtp_8["losses"][0]


def test_steps_with_microbatches_and_in_local_view_are_the_same(on_gtp_8):
    assert_near(trained("gtp 8", recipe=gtp.NVFP4(), view="local"), on_gtp_8, 1e-3)
    assert_near(trained("dp 2, gtp 4", recipe=gtp.NVFP4(), microbatches=2), on_gtp_8, 1e-3)


def test_a_recipe_in_scope_reaches_train_step_and_the_argument_comes_before_it(on_gtp_8):
    with gtp.use_recipe(gtp.NVFP4()):
        assert_near(trained("gtp 8"), on_gtp_8, 0)
    with gtp.use_recipe(gtp.FP8()):
        assert_near(trained("gtp 8", recipe=gtp.NVFP4()), on_gtp_8, 0)


@pytest.mark.parametrize("view", ["global", "local"])
def test_check_finds_that_ranks_and_one_device_use_the_same_codes(view):
    with scope(MESHES["dp 2, gtp 4"]):
        errors = gtp.check(loss, sharded, tokens(), recipe=gtp.MXFP8(), view=view)
    assert len(errors) > 20


def gathers(recipe):
    """Returns the collectives of loss and gradients of two blocks and a tied table, and elements gathered by dtype."""

    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(2 * VOCAB, 64, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(64, 512, use_bias=False, rngs=rngs) for _ in range(2)])

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = jnp.tanh(jnp.tanh(block(x)).reshape(*x.shape, 8).sum(-1))
            return self.embed.attend(x)

    with scope(MESHES["gtp 8"]), gtp.use_recipe(recipe):
        model = gtp.shard(Tied(nnx.Rngs(0)), "blocks.*", min_size=64)
        graph, state = nnx.split(model)
        batch = jax.device_put(tokens(), jax.NamedSharding(jax.sharding.get_mesh(), P("gtp")))
        gradient = jax.jit(jax.value_and_grad(lambda state, tokens: mean_loss(nnx.merge(graph, state), tokens)))
        calls = collectives(gradient.lower(state, batch).compile().as_text())
    found = {}
    for shape in (shape for call in calls if call.kind == "all-gather" for shape in call.operands):
        found[shape.dtype] = found.get(shape.dtype, 0) + shape.elements
    return calls, found


# of each of 8 ranks: codes of half a byte, and a scale for every 256 of them; sections begin at multiples of 16 bytes
KERNEL, TABLE = 64 * 512 // 8 // 2 + 64 * 512 // 8 // 256, 128 * 64 // 8 // 2 + 16


def test_codes_are_made_once_and_both_passes_move_codes_alone():
    calls, found = gathers(gtp.NVFP4(exclude=()))
    # both passes gather the blocks; forward gathers the table twice, and keeps the one with which backward begins
    assert found == {"u8": 4 * KERNEL + 2 * TABLE}
    maxima = [shape for call in calls if call.kind == "all-reduce" for shape in call.operands if shape.dims == (1,)]
    assert len(maxima) == 3  # of two blocks and the table


def test_excluded_modules_travel_in_their_dtype():
    _, found = gathers(gtp.NVFP4())
    assert found == {"u8": 4 * KERNEL, "f32": 2 * 128 * 64 // 8}


def test_second_derivatives_go_straight_through_the_codes():
    recipe = gtp.NVFP4()

    def penalty(model, x):
        graph, state = nnx.split(model)
        inner = lambda state: jnp.sin(nnx.merge(graph, state)(x)).sum()  # noqa: E731
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(inner)(state)))

    class Blocks(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.positions = nnx.Param(jnp.ones((BATCH, WIDTH)))

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x * self.positions[...]

    model, x = Blocks(nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    gradient = nnx.jit(nnx.grad(penalty))
    wanted = flat(gradient(at_codes(model, recipe), x))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(recipe):
        found = flat(gradient(gtp.shard(model, "blocks.*", min_size=64), x))
    assert_near(found, wanted, 1e-4)


@pytest.mark.parametrize("inside", [True, False], ids=["recipe in the program", "recipe around it"])
def test_one_program_serves_no_block_about_which_the_recipe_decides_otherwise(inside):
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    recipe = gtp.FP8(exclude=("blocks.1",))
    around, within = (None, recipe) if inside else (recipe, None)

    @nnx.jit
    def call(block, x):
        with gtp.use_recipe(within) if inside else contextlib.nullcontext():
            return block(x)

    with scope(MESHES["gtp 8"]):
        model = sharded(nnx.Rngs(0))
        plain = [np.asarray(nnx.jit(type(block).__call__)(block, x)) for block in model.blocks]
        with gtp.use_recipe(around):
            found = [np.asarray(call(block, x)) for block in model.blocks]
    same = [np.array_equal(one, other) for one, other in zip(found, plain, strict=True)]
    assert same == [False, True, False]


def test_blocks_about_which_a_recipe_may_decide_otherwise_cannot_be_stacked():
    with scope(MESHES["gtp 8"]):
        model = sharded(nnx.Rngs(0))
        with pytest.raises(ValueError, match="different pytree metadata"):
            jax.tree.map(lambda *a: jnp.stack(a), *[nnx.state(block) for block in model.blocks])


class Passing(nnx.Module):
    """A block whose method Flax wraps: it returns the variables that it was given, which is no write."""

    def __init__(self, wrap, rngs):
        self.linear, self.wrap = nnx.Linear(WIDTH, WIDTH, rngs=rngs), wrap

    def __call__(self, x):
        return self.wrap(lambda linear, x: jnp.tanh(linear(x)))(self.linear, x)


class Clipping(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        self.linear.kernel[...] = jnp.clip(self.linear.kernel[...], -10, 10)
        return self.linear(x)


@pytest.mark.parametrize("wrap", [nnx.remat, nnx.jit], ids=["remat", "jit"])
def test_a_block_that_passes_its_weights_through_flax_keeps_its_masters(wrap):
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.NVFP4()):
        model = nnx.Sequential(*[Passing(wrap, nnx.Rngs(i)) for i in range(2)])
        model = gtp.shard(model, Passing, min_size=64)
        before = [np.asarray(block.linear.kernel.get_value()) for block in model.layers]
        nnx.jit(lambda model, x: model(x))(model, x)
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            gradients = nnx.grad(lambda model: jnp.mean(jnp.square(model(x) - 1)))(model)
            optimizer.update(model, gradients)
            return gradients

        after = [np.asarray(block.linear.kernel.get_value()) for block in model.layers]
        gradients = step(model, optimizer, x)
    for i, block in enumerate(model.layers):
        np.testing.assert_array_equal(after[i], before[i])
        moved = np.asarray(gradients["layers"][i]["linear"]["kernel"].get_value())
        np.testing.assert_allclose(block.linear.kernel.get_value(), before[i] - 0.1 * moved, atol=1e-6)


def test_writing_a_quantized_weight_is_refused():
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.Sequential(Clipping(nnx.Rngs(0)), Clipping(nnx.Rngs(1))), Clipping, min_size=64)
        nnx.jit(lambda model, x: model(x))(model, x)
        with (
            gtp.use_recipe(gtp.NVFP4()),
            pytest.raises(ValueError, match=r"writes the weight layers\.0\.linear\.kernel"),
        ):
            nnx.jit(lambda model, x: model(x))(model, x)


class Holder(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        return nnx.remat(lambda self, x: self.blocks[1](self.blocks[0](x @ self.scale[...])))(self, x)


def test_a_quantized_weight_that_flax_passes_through_its_owners_method_is_refused():
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(Holder(nnx.Rngs(0)), "blocks.*", min_size=64)
        scale = np.asarray(model.scale.get_value())
        with gtp.use_recipe(gtp.NVFP4()), pytest.raises(ValueError, match="writes the weight scale.*around a block's"):
            nnx.jit(lambda model, x: model(x))(model, x)
        np.testing.assert_array_equal(model.scale.get_value(), scale)


def test_an_outer_product_with_a_weight_is_not_rounded_to_fp8():
    class Outer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return jnp.tensordot(x, self.linear.kernel[...], 0), self.linear.kernel[...]

    x = jax.random.normal(jax.random.key(0), (8,))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(gtp.FP8(matmuls=True)):
        model = gtp.shard(nnx.Sequential(Outer(nnx.Rngs(0))), Outer, min_size=64)
        found, values = nnx.jit(lambda model, x: model(x))(model, x)
    np.testing.assert_allclose(found, np.asarray(x)[:, None, None] * np.asarray(values), rtol=1e-6)


def test_a_format_of_ones_own_is_gathered():
    with scope(MESHES["gtp 8"]), gtp.use_recipe(RowScaledRecipe()):
        model = gtp.shard(Shown(nnx.Rngs(0)), "blocks.*", min_size=64)
        found = nnx.jit(lambda model, x: model(x))(model, jnp.ones(()))
    kernel = np.asarray(model.blocks[0].up.kernel.get_value())
    scale = np.abs(kernel).max(axis=0) / np.float32(LARGEST)  # of a row of features out
    np.testing.assert_allclose(
        found[0]["up"], (kernel / scale).astype(jnp.float8_e4m3fn).astype(np.float32) * scale, 1e-6
    )


def test_explain_lists_the_wire_of_sharded_weights_and_why_some_have_none():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(64, 128, rngs=rngs) for _ in range(2)])
            self.short = nnx.Linear(16, 64, rngs=rngs)
            self.inner = nnx.LinearGeneral((8, 8), 64, axis=(-2, -1), rngs=rngs)
            self.odd = nnx.Linear(5, 13, rngs=rngs)  # no dimension can be divided
            self.head = nnx.Linear(64, 64, rngs=rngs)

    with scope(MESHES["gtp 8"]):
        specs = {"inner.kernel": P(None, "gtp")}
        model = gtp.shard(Odd(nnx.Rngs(0)), "layers.*", min_size=64, specs=specs)
        found = gtp.explain(model, gtp.MXFP8())
        assert gtp.explain(model).weights == ()
    weights = {weight.weight: weight for weight in found.weights}
    kernel = weights["layers.0.kernel"]
    assert (kernel.shape, kernel.wire, kernel.bytes, kernel.reason) == ((64, 128), "MXFP8", 64 * 128 * 33 // 32, "")
    assert weights["head.kernel"].reason == "it matches '*head'"
    assert weights["short.kernel"].reason == "its rows of 16 elements are shorter than a block of MXFP8"
    assert weights["inner.kernel"].reason == "dimension 1 is sharded, whose shards are no rows or columns of a matrix"
    assert weights["layers.0.bias"].reason == "it is no matrix"
    assert found.untouched == ("odd.bias", "odd.kernel")
    assert "layers.0.kernel" in str(found) and "it matches '*head'" in str(found)


REFUSED = {
    "matmuls in tiles": (gtp.FP8Blocks(), r"asks for `FP8Blocks`; its products are.*Pass `gtp_jax.FP8\(\)`"),
    "grad_wire": (gtp.NVFP4(grad_wire="bf16"), r"`grad_wire='bf16'`.*not supported.*such as.*Leave it out"),
    "gradients": (gtp.BF16(grad_wire="bf16"), r"`grad_wire='bf16'`.*not supported"),
    "layers": (gtp.NVFP4(high_precision_last=1), r"high_precision_last.*not supported.*Name blocks in `exclude`"),
    "override": (gtp.FP8(override={"up": gtp.BF16(grad_wire="bf16")}), r"`grad_wire='bf16'`.*such as blocks.0.up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sharded_models_do_not_support_is_refused(name):
    recipe, message = REFUSED[name]
    with scope(MESHES["gtp 8"]):
        model = sharded(nnx.Rngs(0))
        with pytest.raises(ValueError, match=message):
            gtp.explain(model, recipe)
        with pytest.raises(ValueError, match=message), gtp.use_recipe(recipe):
            model(tokens())
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        with pytest.raises(ValueError, match=message):
            gtp.train_step(loss, optax.sgd(0.1), recipe=recipe)(state, tokens())


def test_patterns_that_match_nothing_and_scans_around_a_model_are_refused():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
            self.scale = nnx.Param(jnp.ones((WIDTH, WIDTH)))

        def __call__(self, x):
            return self.layers[1](self.layers[0](x)) @ self.scale[...]

    with scope(MESHES["gtp 8"]):
        model = gtp.shard(Scanned(nnx.Rngs(0)), min_size=64)
        with pytest.raises(ValueError, match=r"'mlp' matches no module with weights.*layers.0.kernel"):
            gtp.explain(model, gtp.NVFP4(exclude=("mlp",)))
        scan = lambda: jax.lax.scan(lambda x, _: (model(x), None), jnp.ones((8, WIDTH)), length=2)[0]  # noqa: E731
        with gtp.use_recipe(gtp.NVFP4()), pytest.raises(ValueError, match=r"quantizes scale.*scan.*add 'scale' to"):
            scan()
        with gtp.use_recipe(gtp.NVFP4(exclude=("scale",))):
            assert np.isfinite(scan()).all()


class Dense(nnx.Module):
    """Blocks that multiply by their weights in several ways, or layers of gtp_jax's own that do the same."""

    def __init__(self, rngs, own, width=64, hidden=None, tp=False):
        self.blocks = nnx.List([])
        for sizes, names in (((width, hidden or width), (None, "tp")), ((hidden or width, width), ("tp", None))):
            options = dict(use_bias=False, dtype=jnp.float32, rngs=rngs)
            if tp:
                parallel = "row" if names[0] else "column"
                options |= dict(parallel=parallel) if own else dict(kernel_init=kernel_init(*names))
            self.blocks.append((gtp.Dense if own else nnx.Linear)(*sizes, **options))

    def __call__(self, x):
        up, down = self.blocks
        return x + jnp.tanh(down(jnp.tanh(up(x))))


class Turned(nnx.Module):
    """Multiplies by its weight transposed, by `einsum`, and beneath a jit of its own."""

    def __init__(self, kernel):
        self.kernel = nnx.Param(kernel.T)

    def __call__(self, x):
        return jax.jit(lambda x, w: jnp.einsum("oi,b...i->b...o", w, x))(x, self.kernel[...])


FP8 = gtp.FP8(matmuls=True)
MATMULS = {
    "FP8": FP8,
    "MXFP8": gtp.MXFP8(matmuls=True),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False),
}
TURNED_MXFP8 = ("MXFP8", "turned")  # its blocks of one row run along the first dimension, which is not contracted
CASES = [
    *((recipe, way, "gtp 8") for recipe in MATMULS for way in ("linear", "turned") if (recipe, way) != TURNED_MXFP8),
    *((recipe, "linear", mesh) for recipe in MATMULS for mesh in ("dp 2, gtp 4", "gtp 4, tp 2")),
]


@pytest.mark.parametrize("name, way, mesh", CASES)
def test_matmuls_are_those_of_gtp_jax_own_layers(name, way, mesh):
    recipe, tp = MATMULS[name], "tp" in mesh
    sizes = dict(hidden=192 if tp else 160, tp=tp)  # 20 features of each of 8 ranks are no whole blocks
    x = jax.random.normal(jax.random.key(0), (BATCH, 4, 64))

    def loss(model, x):
        return jnp.sin(3 * model(x)).mean()

    value_and_grad = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))
    with scope(ALL_MESHES[mesh]), gtp.use_recipe(recipe):
        own = gtp.init(lambda rngs: Dense(rngs, own=True, **sizes), nnx.Rngs(0))
        wanted = value_and_grad(own, x)
        model = Dense(nnx.Rngs(0), own=False, **sizes)
        for block, other in zip(model.blocks, own.blocks, strict=True):
            block.kernel.set_value(jnp.asarray(np.asarray(other.kernel.get_value())))
        if way == "turned":
            model.blocks = nnx.List([Turned(block.kernel.get_value()) for block in model.blocks])
        model = gtp.shard(model, "blocks.*", min_size=64)
        found = value_and_grad(model, x)
        assert all(call.multiplied for call in gtp.explain(model, recipe, call=lambda model: model(x)).calls)
        with gtp.use_recipe(type(recipe)()):
            unrounded = value_and_grad(model, x)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    np.testing.assert_allclose(found[1][1], wanted[1][1], rtol=0, atol=1e-5 * np.abs(wanted[1][1]).max())
    one, other, third = (list(flat(g[1][0]).values()) for g in (found, wanted, unrounded))
    for a, b, c in zip(one, other, third, strict=True):
        a, c = (a.T, c.T) if way == "turned" else (a, c)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
        assert np.abs(c - b).max() > 1e-2 * np.abs(b).max()


class Named(nnx.Module):
    """A layer of gtp_jax's own, whose weight has the path that a stock layer's has."""

    def __init__(self, *sizes, **options):
        self.kernel = gtp.Dense(*sizes, **options)

    def __call__(self, x):
        return self.kernel(x)


class Rounding(nnx.Module):
    """Two blocks, and with `twice` another call of the first, which has keys of its own."""

    def __init__(self, rngs, own, tp=False, twice=True):
        self.twice = twice
        init = lambda _, shape, dtype: jax.random.normal(jax.random.key(shape[0]), shape, dtype) / 8  # noqa: E731
        self.blocks = nnx.List([])
        for sizes, names in (((64, 128), (None, "tp")), ((128, 64), ("tp", None))):
            common = dict(use_bias=False, dtype=jnp.float32, rngs=rngs)
            if own:
                parallel = dict(parallel="row" if names[0] else "column") if tp else {}
                self.blocks.append(Named(*sizes, kernel_init=init, **parallel, **common))
            else:
                own_init = nnx.with_partitioning(init, names) if tp else init
                self.blocks.append(nnx.Linear(*sizes, kernel_init=own_init, **common))
        if not own:
            gtp.shard(self, "blocks.*", min_size=64)

    def __call__(self, x):
        up, down = self.blocks
        x = jnp.tanh(down(jnp.tanh(up(x))))
        return jnp.tanh(up(x)) if self.twice else x


def rounded_gradients(mesh, own, recipe, seed=0, steps=0, **options):
    def loss(model, x):
        return jnp.sin(3 * model(x)).sum(), jnp.float32(x.size)

    with scope(ALL_MESHES[mesh]):
        state = gtp.TrainState.create(
            gtp.init(lambda rngs: Rounding(rngs, own, "tp" in mesh, twice="view" not in options), nnx.Rngs(0)),
            optax.sgd(1.0),
        )
        state = dataclasses.replace(state, step=state.step + steps)
        run = lambda state, x: gtp.loss_and_gradients(loss, state, x, recipe=recipe, seed=seed, **options)  # noqa: E731
        x = jax.random.normal(jax.random.key(0), (BATCH, 4, 64))
        return list(flat(jax.jit(run)(state, x)[1]).values())


@pytest.mark.parametrize(
    "mesh, options", [("gtp 8", {}), ("gtp 4, tp 2", dict(microbatches=2)), ("dp 2, gtp 4", dict(view="local"))]
)
def test_gradients_are_rounded_with_the_bits_of_gtp_jax_own_layers(mesh, options):
    recipe = gtp.NVFP4(matmuls=True)
    found, wanted = (rounded_gradients(mesh, own, recipe, **options) for own in (False, True))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_a_block_within_remat_and_a_weight_of_the_models_own_are_rounded_too():
    found = trained("gtp 8", recipe=gtp.NVFP4(matmuls=True))
    nearest = trained("gtp 8", recipe=gtp.NVFP4(matmuls=True, stochastic=False))
    assert found["losses"][2] < found["losses"][0]
    assert abs(found["losses"][2] - nearest["losses"][2]) > 1e-6
    assert_near({"losses": found["losses"]}, {"losses": nearest["losses"]}, 2e-2)


def test_bits_differ_by_seed_and_step_and_are_the_same_if_both_are():
    run = functools.partial(rounded_gradients, "gtp 8", False)
    recipe = gtp.NVFP4(matmuls=True)
    first, again, other, later = run(recipe), run(recipe), run(recipe, seed=1), run(recipe, steps=1)
    nearest = run(gtp.NVFP4(matmuls=True, stochastic=False))
    for one, same, *others in zip(first, again, other, later, nearest, strict=True):
        np.testing.assert_array_equal(one, same)
        assert all(np.abs(one - two).max() > 1e-3 * np.abs(one).max() for two in others)


def test_a_product_across_blocks_of_one_row_stays_as_it_is_and_is_reported():
    x = jax.random.normal(jax.random.key(0), (BATCH, 64))
    with scope(MESHES["gtp 8"]):
        model = nnx.Sequential(*[Turned(linear.kernel[...]) for linear in Dense(nnx.Rngs(0), own=False).blocks])
        model = gtp.shard(model, Turned, min_size=64)
        call = nnx.jit(lambda model, x: model(x))
        with gtp.use_recipe(gtp.MXFP8()):
            wanted = call(model, x)
        with gtp.use_recipe(MATMULS["MXFP8"]):
            np.testing.assert_array_equal(call(model, x), wanted)
        found = gtp.explain(model, MATMULS["MXFP8"], call=lambda model: model(x))
    assert found.unmultiplied == ("layers.0.kernel", "layers.1.kernel")


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
@pytest.mark.parametrize("way", ["permuted", "rows permuted", "reshaped"])
def test_a_product_in_blocks_contracts_what_blocks_run_along_in_order(name, way):
    class Shuffled(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (64, 96)) / 8)

        def __call__(self, x):
            if way == "permuted":  # every fourth feature in follows another
                return jnp.einsum("bij,jio->bo", x.reshape(-1, 4, 16), self.kernel[...].reshape(16, 4, 96))
            if way == "rows permuted":
                return x @ self.kernel[...].reshape(64, 4, 24).swapaxes(1, 2).reshape(64, 96)
            return jnp.einsum("bij,ijop->bop", x.reshape(-1, 4, 16), self.kernel[...].reshape(4, 16, 8, 12))

    x, recipe = jax.random.normal(jax.random.key(0), (BATCH, 64)), MATMULS[name]
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(nnx.Sequential(Shuffled(nnx.Rngs(0))), Shuffled, min_size=64)
        found = gtp.explain(model, recipe, call=lambda model: model(x))
    assert found.unmultiplied == (() if way == "reshaped" else ("layers.0.kernel",))


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_matmuls_in_blocks_multiply_what_the_oracle_says_operands_are_rounded_to(name):
    recipe, random = MATMULS[name], np.random.default_rng(0)
    x, g = (random.normal(size=(8, 32, size)).astype(np.float32) for size in (64, 96))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(recipe):
        model = nnx.Sequential(nnx.Linear(64, 96, use_bias=False, rngs=nnx.Rngs(0)))
        kernel = np.asarray(model.layers[0].kernel[...])
        model = gtp.shard(model, nnx.Linear, min_size=64)
        loss = lambda model, x: (model(x) * g).sum()  # noqa: E731
        y = nnx.jit(lambda model, x: model(x))(model, x)
        to_model, to_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(model, x)
    (to_kernel,) = jax.tree.leaves(to_model)
    form, operands = recipe.wire, recipe.operands
    weight = rounded(kernel.T, form)
    tokens = dict(columns=True, transform=operands.hadamard)
    forward = [rounded(own, operands.activation) @ weight.T for own in x]  # a rank has one sequence
    back = [rounded(own, operands.gradient) @ rounded(weight, form, columns=True) for own in g]
    summed = sum(
        rounded(one, operands.activation, **tokens).T @ rounded(own, operands.gradient, **tokens)
        for one, own in zip(x, g, strict=True)
    )
    for found, wanted in ((y, forward), (to_x, back), (to_kernel, summed)):
        assert np.linalg.norm(found - np.asarray(wanted)) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("view", ["global", "local"])
def test_steps_with_fp8_matmuls_are_those_of_one_device_but_for_roundings(view):
    with scope(MESHES["dp 2, gtp 4"]):
        errors = gtp.check(loss, sharded, tokens(), recipe=FP8, view=view, tolerance=1e-1)
    assert len(errors) > 20


def test_explain_names_the_weights_whose_products_stay_as_they_are():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.heads = nnx.LinearGeneral(WIDTH, (4, 8), rngs=rngs)
            self.conv = nnx.Conv(32, 32, (3,), rngs=rngs)
            self.table = nnx.Param(jnp.ones((WIDTH, WIDTH)))
            self.wide = nnx.Param(jnp.ones((WIDTH, WIDTH)))
            self.batched = nnx.Param(jnp.ones((4, WIDTH, WIDTH)))
            self.scanned = nnx.Param(jnp.ones((WIDTH, WIDTH)))

        def __call__(self, x):
            x = self.conv(self.heads(x).reshape(*x.shape)) * self.table[0]
            x, wide = (a.astype(jnp.bfloat16) for a in (x, self.wide[...]))
            x = jnp.dot(x, wide, preferred_element_type=jnp.float32)
            x = jnp.einsum("bti,bio->bto", x.reshape(4, -1, WIDTH), self.batched[...])
            return jax.lax.scan(lambda x, _: (x @ self.scanned[...], None), x, length=2)[0]

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([Mixed(rngs)])

        def __call__(self, x):
            return self.blocks[0](x)

    with scope(MESHES["gtp 8"]):
        model = gtp.shard(Model(nnx.Rngs(0)), "blocks.*", min_size=128)
        found = gtp.explain(model, FP8, call=lambda model: model(jnp.ones((BATCH, 16, WIDTH))))
    names = [f"blocks.0.{name}" for name in ("batched", "conv.kernel", "scanned", "table", "wide")]
    assert sorted(found.unmultiplied) == names
    assert found.calls[0].multiplied == ("blocks.0.heads.kernel",)
    assert f"that the recipe's format supports: {', '.join(found.unmultiplied)}" in str(found)


def test_second_derivatives_of_fp8_matmuls_are_refused():
    x = jnp.ones((BATCH, 64))
    with scope(MESHES["gtp 8"]), gtp.use_recipe(FP8):
        model = gtp.shard(Dense(nnx.Rngs(0), own=False), "blocks.*", min_size=64)
        inner = lambda x: jax.grad(lambda x: jnp.sin(model(x)).sum())(x)  # noqa: E731
        with pytest.raises(TypeError, match="differentiated again through `linear_fp8`"):
            jax.grad(lambda x: (inner(x) ** 2).sum())(x)


@pytest.mark.parametrize("remat", ["nothing", "everything"])
def test_remat_changes_no_number_of_fp8_matmuls(remat):
    x = jax.random.normal(jax.random.key(0), (BATCH, 64))
    found = []
    for policy in ("matmuls", remat):
        with scope(MESHES["gtp 8"]), gtp.use_recipe(FP8):
            model = gtp.shard(Dense(nnx.Rngs(0), own=False), "blocks.*", min_size=64, remat=policy)
            found.append(flat(nnx.jit(nnx.grad(lambda model, x: jnp.sin(model(x)).mean()))(model, x)))
    assert_near(found[1], found[0], 1e-5)
