"""Moments in bfloat16 and FP8, and bfloat16 parameters without float32 masters."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from messages import naming
from padded_states import padding_of
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax._words import MOST
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.layout import row_blocks_spec
from gtp_jax.nn import abstract_model
from gtp_jax.optimizers import low_precision, stochastic_rounding
from gtp_jax.optimizers._codes import Kind, decoded, encoded
from gtp_jax.optimizers._rounding import rounded, step_key
from gtp_jax.train import per_layer

ADAM = optax.adamw(1.2e-2)
LOW = low_precision(ADAM)
EIGHT = low_precision(ADAM, moments="float8")
BOTH = stochastic_rounding(LOW)
ALL = [(LOW, "float32"), (BOTH, "bfloat16"), (EIGHT, "float32")]
TOKENS = np.random.default_rng(0).integers(0, 34, (8, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "weights": np.ones((8, 8), np.float32)}
STEPS = 10


class Model(nnx.Module):
    """A table of 90 rows, a stack with 54 features, and a head. 4 divides none of these dimensions."""

    def __init__(self, rngs, dtype="float32"):
        options = dict(param_dtype=dtype, rngs=rngs)
        self.embed = gtp.Embed(90, 54, **options)
        self.blocks = gtp.Stack(lambda rngs: gtp.Dense(54, 54, param_dtype=dtype, rngs=rngs), 2, rngs=rngs)
        self.head = gtp.Dense(54, 90, use_bias=True, **options)

    def __call__(self, tokens):
        return self.head(jnp.tanh(self.blocks(self.embed(tokens))))


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"], weights=batch["weights"])


@contextlib.contextmanager
def on(**degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)), gtp.layout.even_shares():
        yield


def begin(optimizer, dtype="float32"):
    return gtp.TrainState.create(gtp.init(lambda rngs: Model(rngs, dtype), nnx.Rngs(0)), optimizer)


def run(step, state, count):
    losses = []
    for _ in range(count):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def float32_losses():
    with on(dp=2, gtp=4):
        losses = run(gtp.train_step(loss, ADAM), begin(ADAM), STEPS)[1]
    assert losses[-1] < losses[0] / 2
    return losses


@pytest.mark.parametrize("optimizer, dtype", others_full(ALL, [(EIGHT, "float32")]))
def test_losses_follow_float32_and_a_resumed_run_equals_one_never_stopped(optimizer, dtype, float32_losses, tmp_path):
    half, checkpoints = STEPS // 2, Checkpoints(tmp_path)
    with on(dp=2, gtp=4):
        step, state = gtp.train_step(loss, optimizer), begin(optimizer, dtype)
        assert state.model_def.padded
        state, first = run(step, state, half)
        kept = jax.tree.map(np.asarray, state)
        state, metrics = step(state, BATCH | {"weights": np.full((8, 8), np.nan, np.float32)})
        assert metrics["skipped"]
        same(state, kept)
        checkpoints.save(half, state)
        checkpoints.wait()
        logical = jax.tree.map(np.asarray, state.logical())
        state, second = run(step, state, half)
        np.testing.assert_allclose(first + second, float32_losses, rtol=0.05)
        assert not padding_of(state).any()
        inner = state.opt_state.inner_state
        moments = (inner.inner_state if dtype == "bfloat16" else inner)[0]
        for param, *own in zip(*map(jax.tree.leaves, (state.params, moments.mu, moments.nu)), strict=True):
            assert param.dtype == dtype
            stored = jnp.bfloat16 if optimizer is not EIGHT else "float8_e4m3fn" if param.ndim > 1 else "float32"
            for moment in own:
                assert moment.dtype == stored and moment.sharding == param.sharding
                local = moment.addressable_shards[0].data
                assert local.nbytes == local.size * jnp.dtype(stored).itemsize
        resumed = checkpoints.restore(begin(optimizer, dtype))[0]
        same(run(step, resumed, half)[0], state)
    with on(gtp=8):
        other = gtp.TrainState.create(abstract_model(lambda rngs: Model(rngs, dtype)), optimizer)
        same(checkpoints.restore(other)[0].logical(), logical)


@pytest.mark.parametrize("optimizer, dtype", ALL)
def test_an_update_of_shards_has_no_collective_and_the_same_bits_as_on_one_device(optimizer, dtype):
    def over(columns, spec, **degrees):
        params = {"w": np.linspace(-1, 1, 64 * columns).reshape(64, columns).astype(dtype)}
        init, update = jax.jit(optimizer.init), jax.jit(lambda p, s: optimizer.update(p, s, p))
        state = init(params)
        wanted = update(params, state)
        mesh = gtp.make_mesh(**degrees)
        with jax.set_mesh(mesh):

            def put(a):
                of_blocks = row_blocks_spec(params["w"].shape, spec)
                own = PartitionSpec() if a.ndim == 0 else spec if a.shape == params["w"].shape else of_blocks
                return jax.device_put(a, NamedSharding(mesh, own))

            own = jax.tree.map(put, (params, state))
            compiled = update.lower(*own).compile()
            same(compiled(*own), wanted)
            return hlo.collectives(compiled.as_text())

    assert not over(64, PartitionSpec("gtp"), gtp=8)
    if optimizer is EIGHT:
        assert not over(64, PartitionSpec("tp", "gtp"), tp=2, gtp=4)
        # 8 columns per shard: two ranks share a block, and exchange its largest number
        exchanged = over(64, PartitionSpec(None, "gtp"), gtp=8)
        assert exchanged and max(shape.bytes for one in exchanged for shape in one.results) <= 4 * 64 * 64 // 16


def bits(array):
    return np.asarray(array).astype(np.float32).view(np.uint32)


def test_applied_updates_are_bfloat16_neighbors_and_right_on_average():
    rng, size = np.random.default_rng(0), 1 << 16
    p, u = (rng.choice([-1, 1], size) * np.exp2(rng.uniform(-90, 115, size)) for _ in range(2))
    p = p.astype(jnp.bfloat16)
    near = -p.astype(np.float32) * (1 + np.exp2(-rng.uniform(1, 24, size)))  # cancels p
    u = np.where(rng.random(size) < 0.5, u, near).astype(np.float32)
    most = float(jnp.finfo(jnp.bfloat16).max)
    p[:6], u[:6] = [most, -most, 1, 1, -np.inf, np.nan], [2.0**119, -(2.0**119), np.inf, np.nan, 0, 1]
    optimizer = stochastic_rounding(optax.identity())

    @jax.jit
    def applied(p, u, step=0):
        moved, state = optimizer.update([u], optimizer.init([p])._replace(step=step), [p])
        return optax.apply_updates([p], moved)[0], state.step

    new, _ = applied(p, u)
    np.testing.assert_array_equal(bits(new)[:6].view(np.float32), [most, -most, np.inf, np.nan, np.nan, np.nan])
    words, exact = (bits(a)[6:] for a in (new, p.astype(np.float32) + u))
    below = exact & 0xFFFF0000
    assert ((words == below) | ((words == below + 0x10000) & (exact != below))).all()
    one = np.ones(size, jnp.bfloat16), np.full(size, 2.0**-12, np.float32)
    (new, step), (later, _) = applied(*one), applied(*one, 1)
    assert step == 1 and (new != later).any()
    mean = np.mean(np.asarray(new, np.float64)) - 1
    assert abs(mean * 2**12 - 1) < 0.1  # rounding to nearest gives 0


def test_seeds_steps_arrays_and_elements_use_random_bits_of_their_own():
    uses = (0, 1, "a"), (0, 2, "a"), (1, 1, "a"), (1, 2, "a"), (0, 1, "b")
    half = np.full((32, 32, 32), 1 + 2.0**-8, np.float32)  # half of the numbers are rounded up
    draw = jax.jit(lambda: [rounded(half, step_key(seed, jnp.int32(step)), (path,)) > 1 for seed, step, path in uses])
    first, *others = map(np.asarray, draw())
    for other in (True, *others, *(np.roll(first, 1, axis) for axis in range(3))):
        assert abs(np.mean(first == other) - 0.5) < 0.02


def test_moments_of_every_kind_are_bfloat16_neighbors():
    """Also subnormal numbers, the largest, Inf and NaN."""
    words = np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32)
    ends = [0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0, 1, 0xFFFF, 0x7FFFFF]
    words[: 2 * len(ends)] = ends + [end | 0x80000000 for end in ends]
    keeps = optax.GradientTransformation(lambda params: params, lambda updates, state, params=None: (updates, updates))
    optimizer, given = low_precision(keeps), [words.view(np.float32)]

    @jax.jit
    def updated(step):
        return optimizer.update(given, optimizer.init(given)._replace(step=step), given)[1]

    state, later = updated(0), updated(1)
    found, other = (np.asarray(s.inner_state[0]).view(np.uint16).astype(np.uint32) << 16 for s in (state, later))
    assert state.step == 1 and later.step == 2 and (found != other).any()
    nan, below = (words & 0x7FFFFFFF) > 0x7F800000, words & 0xFFFF0000
    above = np.where((below + 0x10000) & 0x7F800000 == 0x7F800000, below, below + 0x10000)  # no number becomes Inf
    assert ((found[nan] & 0x7FFFFFFF) > 0x7F800000).all()
    assert ((found == below) | ((found == above) & (words != below)))[~nan].all()
    up = (found != below)[~nan].sum() / (words & 0xFFFF)[~nan].sum() * 2**16
    assert abs(up - 1) < 0.02


E4M3 = np.arange(0x7F, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)  # the numbers of at least 0


@pytest.mark.parametrize("kind", Kind)
def test_moments_in_fp8_are_neighbors_right_on_average_and_never_lose_a_square(kind):
    """Rows of 37 have a short last block. Elements of a block differ by up to 2**120."""
    rng, squares, least = np.random.default_rng(0), kind is Kind.SQUARES, float(np.finfo(np.float32).tiny)
    size = np.exp2(rng.uniform(-60, 60, (2048, 1)) + rng.choice([0, -3, -10, -60], (2048, 37)) * rng.random((2048, 37)))
    given = (size * (1 if squares else rng.choice([-1, 1], size.shape))).astype(np.float32)
    given[0, :3], given[1, :3], given[2, :16] = [np.inf, np.nan, 1], [MOST, -MOST, least], 0
    given[3, :16], given[4, :16] = least, [1.75 * 2.0**8] + [0] * 15

    @jax.jit
    def rounded_by(step):
        codes = encoded(given, kind, step_key(0, step), ("a",))
        return codes, decoded(codes, kind)

    codes, found = rounded_by(0)
    assert codes.codes.dtype == jnp.float8_e4m3fn and codes.codes.shape == given.shape
    assert codes.scales.dtype == jnp.int8 and codes.scales.shape == (2048, 3)
    found, finite = np.asarray(found, np.float64), np.isfinite(given)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    exact = np.where(finite, np.abs(given.astype(np.float64)), 0)
    blocks = np.pad(np.sqrt(exact) if squares else exact, [(0, 0), (0, 48 - 37)]).reshape(2048, 3, 16).max(-1)
    scale = np.exp2(np.maximum(np.ceil(np.log2(np.maximum(blocks, 1e-300) / 448)), -126))
    np.testing.assert_array_equal(np.exp2(np.asarray(codes.scales, np.float64)), scale)
    grid = np.repeat(scale, 16, axis=1)[:, :37, None] * E4M3
    grid = np.minimum(grid**2 if squares else grid, MOST)
    above = np.argmax(grid >= exact[..., None] * (1 - 1e-7), axis=-1)
    high = np.take_along_axis(grid, above[..., None], -1)[..., 0]
    low = np.take_along_axis(grid, np.maximum(above - 1, 0)[..., None], -1)[..., 0]
    low = np.where(squares & (above == 1), high, low)  # squares are rounded up to the least code
    on = np.abs(high - exact) <= 1e-6 * exact
    own = np.abs(found)
    assert ((own == high) | (own == low) & ~on)[finite].all()
    assert (np.sign(found) == np.sign(given))[finite & (found != 0)].all()
    assert (found == 0)[given == 0].all()
    if squares:
        assert (own > 0)[exact > 0].all() and (own >= exact / 4)[finite].all()
        assert (np.sqrt(own) >= 2.0**-18 * np.repeat(blocks, 16, axis=1)[:, :37])[finite & (exact > 0)].all()

    chosen = finite & ~on & (low < high) & (exact > 0)
    share = ((exact - low) / np.where(high > low, high - low, 1))[chosen]
    draws = np.stack([np.abs(np.asarray(rounded_by(step)[1], np.float64)) == high for step in range(1, 9)])[:, chosen]
    assert abs(draws.mean() - share.mean()) < 5e-3
    for part in np.array_split(np.argsort(share), 8):
        assert abs(draws[:, part].mean() - share[part].mean()) < 1e-2
    again = jax.jit(lambda m: decoded(encoded(m, kind, step_key(1, jnp.int32(0)), ("a",)), kind))
    np.testing.assert_array_equal(again(found.astype(np.float32)), found.astype(np.float32))


def test_updates_from_moments_in_fp8_stay_bounded():
    """An update of Adam is at most (1 - b1) / sqrt(1 - b2) / sqrt(1 - b1**2 / b2) = 7.3 in exact arithmetic. Gradients
    of one block differ by up to 2**40, and most are 0."""
    rng, shape = np.random.default_rng(0), (64, 64)
    optimizer = low_precision(optax.scale_by_adam(eps=1e-30), moments="float8")
    params = {"w": np.zeros(shape, np.float32)}
    update, state = jax.jit(lambda g, s: optimizer.update(g, s, params)), jax.jit(optimizer.init)(params)
    sizes, most = np.exp2(rng.uniform(-20, 20, shape)), 0.0
    for _ in range(300):
        grads = sizes * rng.standard_normal(shape) * (rng.random(shape) < 0.05)
        updates, state = update({"w": grads.astype(np.float32)}, state)
        assert np.isfinite(updates["w"]).all()
        most = max(most, float(np.abs(updates["w"]).max()))
    assert 1 < most < 2 * 7.3, most


@pytest.mark.parametrize("moments, size", [("bfloat16", 8), ("float8", 64)])
def test_per_layer_works_inside_and_is_refused_outside(moments, size):
    def stack(dtype):
        return abstract_model(
            lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(size, size, param_dtype=dtype, rngs=rngs), 2, rngs=rngs)
        )

    sgd, model = optax.sgd(0.1, momentum=0.9), stack("float32")
    around, inside = low_precision(sgd, moments=moments), low_precision(per_layer(sgd, model), moments=moments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # neither treats the layers as one tensor
        like = [gtp.TrainState.create(model, one).params for one in (around, inside)][0]
        for one, dtype in ((around, "float32"), (stochastic_rounding(sgd), "bfloat16")):
            with pytest.raises(ValueError, match=r"depends on random numbers.* Put that transformation around it"):
                gtp.TrainState.create(stack(dtype), per_layer(one))
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda leaf: draw(leaf.shape, np.float32), like)
    same(*(jax.jit(lambda p, one=one: one.update(p, one.init(p), p))(params) for one in (around, inside)))


@pytest.mark.parametrize(
    "optimizer, path",
    [
        (optax.contrib.schedule_free(optax.sgd(1.0), 1.0), "z.w"),  # weights
        (optax.rmsprop(1.0, centered=True), "0.mu.w"),  # is squared and subtracted from `nu`
        (optax.MultiSteps(optax.sgd(1.0), 2), "acc_grads.w"),
    ],
)
def test_fp8_is_refused_for_what_is_not_known_to_be_a_moment(optimizer, path):
    init = low_precision(optimizer, moments="float8").init
    with pytest.raises(ValueError, match=naming(f"`moments` \"float8\" '{path}'", '`moments="bfloat16"`')):
        jax.eval_shape(init, {"w": jax.ShapeDtypeStruct((64, 64), "float32")})
    small = {"w": jax.ShapeDtypeStruct((63, 65), "float32"), "b": jax.ShapeDtypeStruct((5000,), "float32")}
    assert not jax.tree.leaves(jax.eval_shape(init, small).scales)


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(ValueError, match=naming("`moments` 'fp8'", "'bfloat16' 'float8'")):
        low_precision(optax.sgd(1.0), moments="fp8")
    like = {"w": jax.ShapeDtypeStruct((64, 64), "float32")}
    for one, other in ((LOW, EIGHT), (EIGHT, LOW)):
        with pytest.raises(ValueError, match=naming("`moments`", "`state`", "another format")):
            jax.eval_shape(one.update, like, jax.eval_shape(other.init, like), like)
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(TypeError, match=rf"is {dtype}; `low_precision` rounds only float32"):
            jax.eval_shape(LOW.init, {"w": jax.ShapeDtypeStruct((4,), dtype)})
    optimizer, like = stochastic_rounding(optax.sgd(1.0)), {"w": jax.ShapeDtypeStruct((4,), "float32")}
    with pytest.raises(TypeError, match="'w' is float32; `stochastic_rounding` takes only bfloat16"):
        jax.eval_shape(optimizer.init, like)
    for one in (LOW, optimizer):
        with pytest.raises(ValueError, match="`params` is None"):
            one.update(like, None)
