"""dp shards (ZeRO): masters and optimizer state are divided over dp too, and nothing but bytes and memory changes."""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from placed import placed

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

from ..gradients import keeps_gradient
from ..parity.plain_llama import Oracle

# 96 features and 1000 tokens were filled up with padding once, which the optimizer's arrays had to be rid of.
SIZES = dict(
    vocab_size=1000, hidden_size=96, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24, intermediate_size=192
)
CONFIG = LlamaConfig(**SIZES, dtype="float64", tie_embeddings=True)
LOOPED = dataclasses.replace(CONFIG, num_layers=5, unroll=1)  # two iterations, each of which ends the sum of another's
REPLICAS = gtp.mesh.Roles(optimizer=())
STEPS, MICROBATCHES = 3, 4

CUBE, PLANE = {"dp": 2, "gtp": 2, "tp": 2}, {"dp": 4, "gtp": 2}


@contextlib.contextmanager
def place(degrees, roles=None):
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
        with gtp.mesh.use_roles(roles or gtp.mesh.Roles()):
            yield


def batches(rows: int = 32):
    rng = np.random.default_rng(5)
    for _ in range(STEPS):
        tokens = rng.integers(0, CONFIG.vocab_size, (rows, 9)).astype(np.int32)
        weights = (rng.random((rows, 8)) > np.linspace(0, 0.8, rows)[:, None]).astype(np.float32)  # some are masked
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(found, wanted, tolerance, what):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.ravel(a - b)) / max(np.linalg.norm(np.ravel(b)), 1e-30)
        assert error <= tolerance, f"{what}{jax.tree_util.keystr(path)}: relative error {error:.2e}"


def begin(optimizer, config=CONFIG):
    return gtp.TrainState.create(placed(lambda rngs: Llama(config, rngs=rngs), 3), optimizer)


def train(degrees, optimizer, roles=None, rows=32, config=CONFIG, **options):
    """First gradient, as the optimizer is given it, and its norm from before; losses, and parameters at the end."""
    with place(degrees, roles):
        optimizer = keeps_gradient(optimizer)
        state = begin(optimizer, config)
        step = gtp.train_step(next_token_loss, optimizer, **options)
        losses, gradient = [], None
        for batch in batches(rows):
            state, metrics = step(state, batch)
            gradient = gradient or host((state.opt_state[0], metrics["grad_norm"]))
            losses.append(float(metrics["loss"]))
        return gradient, losses, host(state.params)


@functools.cache
def stock(config=CONFIG):
    """What stock Flax makes of the same parameters and batches, with clipping."""
    start = host(begin(optax.adamw(1e-2), config).params)
    return Oracle(config).train(start, list(batches()), optax.adamw(1e-2), 0.5)


RUNS = {
    "cube, each": (CUBE, None, "each"),
    "cube, last": (CUBE, None, "last"),
    "cube, replicas": (CUBE, REPLICAS, "each"),
    "plane, each": (PLANE, None, "each"),
    "plane, last": (PLANE, None, "last"),
    "plane, each, in global view": (PLANE, None, "each"),
    "cube, each, in global view": (CUBE, None, "each"),
    "cube, each, looped": (CUBE, None, "each"),
    "cube, each, looped, in global view": (CUBE, None, "each"),
}
USUAL = ("cube, last",)  # tests/parity has the other, with a model that is not tied


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.slow) for n in RUNS])
def test_losses_gradients_and_steps_are_those_of_stock_flax(name, x64):
    """A tied head, which uses its table twice in each of four microbatches; gradients clipped by the global norm."""
    degrees, roles, when = RUNS[name]
    view = "global" if "global" in name else "local"
    options = {"microbatches": MICROBATCHES, "reduce_over_dp": when, "max_grad_norm": 0.5, "view": view}
    config = LOOPED if "looped" in name else CONFIG
    gradient, losses, end = train(degrees, optax.adamw(1e-2), roles, config=config, **options)
    wanted, wanted_losses, wanted_end = stock(config)
    assert_close(gradient, wanted, 1e-12, "gradient of ")
    assert_close(losses, wanted_losses, 1e-12, "loss of step ")
    assert_close(end, wanted_end, 3e-11, "after 3 steps ")  # Adam amplifies rounding where a gradient is near zero


RECIPES = {
    "NVFP4, ends in bf16, one layer pregathered": (
        {"recipe": gtp.NVFP4(high_precision_first=1, high_precision_last=1), "pregathered_layers": 1},
        96,
    ),
    "MXFP8, shards cut blocks in two": ({"recipe": gtp.MXFP8()}, 72),
    "FP8, codes multiplied": ({"recipe": gtp.FP8(matmuls=True)}, 64),
    "bf16": ({}, 64),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_what_travels_is_that_of_replicas_bit_for_bit(name):
    """Codes of stored parts, joined, are those of whole shards, and what is in no format is rounded alike."""
    options, dim = RECIPES[name]
    sizes = dict(vocab_size=512, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=128)
    config = LlamaConfig(**sizes, hidden_size=dim, dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(0, 512, (16, 33)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    found = []
    for roles in (None, REPLICAS):
        with place({"dp": 2, "gtp": 4}, roles):
            state = begin(optax.sgd(0.1, momentum=0.9), config)
            step = gtp.train_step(next_token_loss, optax.sgd(0.1, momentum=0.9), **options)
            losses = []
            for _ in range(2):
                state, metrics = step(state, batch)
                losses.append(np.asarray(metrics["loss"]))
            found.append((losses, host(state.params)))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)


OPTIMIZERS = {
    "clipped adafactor": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adafactor(1e-2, 32)),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-2),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_agree_with_one_device(name, x64):
    one, sharded = (train(degrees, OPTIMIZERS[name](), rows=8)[2] for degrees in (None, CUBE))
    assert_close(sharded, one, 1e-9, "after 3 steps ")


@functools.cache
def compiled(degrees, roles, config, microbatches=1, when="each"):
    """The compiled AdamW step, from shapes: its module, its state, and its collectives over dp."""
    with place(dict(degrees), roles):
        optimizer = optax.adamw(1e-3)
        state = gtp.TrainState.create(abstract_model(lambda rngs: Llama(config, rngs=rngs)), optimizer)
        rows = NamedSharding(jax.sharding.get_mesh(), P(("dp", "gtp")))
        tokens = jax.ShapeDtypeStruct((8 * microbatches, 16), jnp.int32, sharding=rows)
        step = gtp.train_step(
            next_token_loss, optimizer, microbatches=microbatches, reduce_over_dp=when, max_grad_norm=1.0, view="local"
        )
        lowered = step.lower(state, {"tokens": tokens, "targets": tokens})
    program = lowered.compile().as_text()
    return state, [c for c in hlo.collectives(program) if "dp" in c.axes], hlo.collectives(program)


SMALL = LlamaConfig(**SIZES)


def bytes_of(collectives, kind):
    return sum(c.times * c.wire_bytes for c in collectives if c.kind == kind)


@pytest.mark.parametrize(
    "when, times", [pytest.param("each", 4, marks=pytest.mark.slow), pytest.param("last", 1, marks=pytest.mark.full)]
)
def test_bytes_over_dp(when, times):
    """Of dp 2 each rank sends half of its shards: in bfloat16 once a step, of gradients in float32. Every gather and
    permutation belongs to the model's passes or to dp's gather, so that the optimizer moves nothing."""
    state, over_dp, everything = compiled(tuple(CUBE.items()), None, SMALL, 4, when)
    divided = [a for a in jax.tree.leaves(state.params) if "dp" in str(a.sharding.spec)]
    shards = sum(a.size // 4 for a in divided)  # over gtp and tp
    assert bytes_of(over_dp, "all-gather") == shards * 2 // 2
    assert bytes_of(over_dp, "reduce-scatter") == times * shards * 4 // 2
    assert bytes_of(over_dp, "all-reduce") < 4096, "norms' scales, the norm and the loss alone"
    assert {c.kind for c in over_dp} == {"all-gather", "reduce-scatter", "all-reduce"}
    moves = [c for c in everything if c.kind in ("all-gather", "all-to-all", "collective-permute")]
    assert moves and all("shard_map" in c.op_name for c in moves), [c.op_name for c in moves]
    scalars = [c for c in everything if "shard_map" not in c.op_name]
    assert sum(c.operand_bytes for c in scalars) < 1024, "the global norm alone"


def test_every_device_stores_its_part_of_masters_and_moments():
    """Matrices are divided by all eight devices; vectors stay whole."""
    with place(CUBE):
        model = abstract_model(lambda rngs: Llama(SMALL, rngs=rngs))
        state = gtp.TrainState.create(model, optax.adamw(1e-2))
    for a in jax.tree.leaves((state.params, state.opt_state)):
        parts = 8 if a.ndim > 1 and "tp" in str(a.sharding.spec) else 1
        assert math.prod(a.sharding.shard_shape(a.shape)) * parts == a.size, a.sharding
        assert parts == 8 or a.size <= 2 * 96


class Deep(nnx.Module):
    """Ten layers: joined two first, then six, then two."""

    def __init__(self, rngs):
        make = functools.partial(gtp.Dense, 48, 48, dtype="float64", param_dtype="float64")
        self.stack = gtp.Stack(make, 10, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


def cubes(model, batch):
    return jnp.sum(model(batch["x"]) ** 3), jnp.float64(batch["x"].shape[0])


def test_layers_that_arrive_in_parts_are_those_of_one_array(x64):
    found = []
    x = np.random.default_rng(0).normal(size=(8, 4, 48))
    for degrees in (None, CUBE):
        with place(degrees):
            optimizer = optax.adam(1e-2)
            state = gtp.TrainState.create(placed(Deep), optimizer)
            step = gtp.train_step(cubes, optimizer)
            program = step.lower(state, {"x": x}).compile()
            state, metrics = program(state, {"x": x})
            found.append(host((metrics["loss"], state.params)))
    assert_close(found[1], found[0], 1e-11, "")
    joined = [c for c in hlo.collectives(program.as_text()) if c.axes == ("dp",) and c.kind == "all-gather"]
    assert sorted(c.operands[0].dims[1] for c in joined) == [2, 2, 6]


def test_a_model_outside_a_train_step_gathers_for_itself(x64):
    """`nnx.value_and_grad` under `nnx.jit`, in global view."""

    def make(rngs):
        return gtp.Stack(functools.partial(gtp.Dense, 48, 48, dtype="float64", param_dtype="float64"), 3, rngs=rngs)

    found = []
    x = np.random.default_rng(0).normal(size=(8, 4, 48))
    for degrees in (None, CUBE):
        with place(degrees):
            model = placed(make)
            value, gradients = nnx.jit(nnx.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))(model, x)
            found.append(host((value, nnx.to_pure_dict(gradients))))
    assert model.layers.kernel.get_value().addressable_shards[0].data.size == 3 * 48 * 48 // 4  # over dp and gtp
    assert_close(found[1], found[0], 1e-12, "")


def test_what_divides_nothing_stays_whole_on_every_rank_of_dp():
    from gtp_jax.layout import layouts_of_kernels

    with place({"dp": 4, "gtp": 2}):
        (other,) = layouts_of_kernels([(98, 1024)], rows=1)
        assert other.spec == P(None, ("gtp", "dp")) and other.stored_shape == (98, 128)
        (columns,) = layouts_of_kernels([(128, 34)], rows=1)
        assert columns.spec == P(("gtp", "dp"), None)
        (mixed,) = layouts_of_kernels([(36, 50)], rows=1)
        assert mixed.spec == P("dp", "gtp"), "25 columns are divided no further, 36 rows are"
        (whole,) = layouts_of_kernels([(7, 34)], rows=1)
        assert whole.spec == P(None, "gtp") and whole.copies == 1  # small: no word
        with gtp.layout.even_shares(False), pytest.warns(UserWarning, match=naming("(501, 1002) dp 4")):
            layouts_of_kernels([(501, 1002)], rows=1)


def test_names_and_axes_are_checked():
    with pytest.raises(ValueError, match=naming("`reduce_over_dp` 'first' 'each' 'last'")):
        gtp.train_step(next_token_loss, optax.adamw(1e-3), reduce_over_dp="first")
    with pytest.raises(ValueError, match=naming("`reduce_over_dp` 'last' `view='local'`")):
        gtp.train_step(next_token_loss, optax.adamw(1e-3), reduce_over_dp="last", microbatches=2)
    with pytest.raises(ValueError, match=naming("`optimizer` ('gtp',) gtp ('dp',)")):
        gtp.mesh.Roles(optimizer=("gtp",))
    with pytest.raises(ValueError, match=naming("`optimizer` ['dp']")):
        gtp.mesh.Roles(optimizer=["dp"])
