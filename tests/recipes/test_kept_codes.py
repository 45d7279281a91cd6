"""`FP8(matmuls=True, keep_codes=True)`: codes of inputs are saved for wgrad instead of the inputs, and nothing else
changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from placed import placed
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import hlo, native
from gtp_jax.chain import REMAT
from gtp_jax.collectives import gather_linear_fp8, join_parts, linear_scatter_fp8, split_parts
from gtp_jax.formats import FP8_E5M2
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model
from gtp_jax.ops import linear_fp8
from gtp_jax.train import compile_options

from ..chain.programs import lowered_step
from ..hlo.programs import needs_target

WITHOUT, KEPT = gtp.FP8(matmuls=True), gtp.FP8(matmuls=True, keep_codes=True)
ROWS, INTO, OUT = 16, 24, 40


def gathered(x, w, **options):
    return join_parts(gather_linear_fp8(x, w, FP8_E5M2, "tp", **options), "tp")


def scattered(x, w, **options):
    return linear_scatter_fp8(split_parts(x, "tp"), w, FP8_E5M2, "tp", **options)


def alone(x, w, **options):
    return linear_fp8(x, w, FP8_E5M2, **options)


# Each product, and the partitions of its input, weight and output over tp.
CUT, FEATURES = P(None, "tp"), P(None, None, "tp")
PRODUCTS = {
    "alone": (alone, P(), P(), P()),
    "gathered": (gathered, CUT, P("tp"), FEATURES),
    "scattered": (scattered, FEATURES, P(None, "tp"), CUT),
}
products = pytest.mark.parametrize("product", PRODUCTS)


def mapped(product, **options):
    function, *into, out = PRODUCTS[product]
    call = lambda x, w: function(x, w, **options)  # noqa: E731
    if product == "alone":
        return call
    mesh = jax.sharding.get_mesh()
    return jax.shard_map(call, mesh=mesh, in_specs=tuple(into), out_specs=out, check_vma=False)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    with jax.set_mesh(gtp.make_mesh(gtp=1, tp=2, devices=jax.devices()[:2])):
        yield tuple(jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in ((2, ROWS, INTO), (OUT, INTO)))


@pytest.mark.parametrize("product, dtype", pairwise(PRODUCTS, ["bfloat16", "float32"]))
def test_products_and_gradients_are_the_same_bit_for_bit(product, dtype, operands):
    x, w = (a.astype(dtype) for a in operands)

    def found(**options):
        y, back = jax.vjp(jax.jit(mapped(product, **options)), x, w)
        return y, *back(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(dtype))

    for one, other in zip(found(keep_codes=True), found(), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
        assert one.dtype == other.dtype and np.asarray(one, np.float32).any()


@products
def test_backward_keeps_codes_or_the_input_and_not_both(product, operands):
    x, w = operands
    for keep_codes, wanted in ((False, (x.size, w.size)), (True, (0, x.size + w.size))):
        call = jax.jit(mapped(product, keep_codes=keep_codes))
        saved = jax.eval_shape(lambda x, w: jax.vjp(call, x, w)[1], x, w)  # noqa: B023
        sizes = [(leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(saved)]
        assert tuple(sum(n for d, n in sizes if d == dtype) for dtype in ("bfloat16", "uint8")) == wanted


@products
def test_a_second_derivative_and_forward_mode_are_refused(product, operands):
    x, w = operands
    call = mapped(product, keep_codes=True)
    first = jax.grad(lambda x: jnp.sum(jnp.square(call(x, w).astype(jnp.float32))))
    with pytest.raises(TypeError, match=naming("differentiated again")):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(first(x).astype(jnp.float32))), x)
    if product == "alone":
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(lambda x: call(x, w), (x,), (x,))


def test_examples_of_a_vmap_are_scaled_each_by_its_own_amax(operands):
    x, w = operands
    x = x * jnp.array([1, 9], x.dtype)[:, None, None]

    def gradients(**options):
        one = jax.grad(lambda x, w: jnp.sum(jnp.sin(alone(x, w, **options))), (0, 1))
        return jax.jit(jax.vmap(one, (0, None)))(x, w)

    for one, other in zip(gradients(keep_codes=True), gradients(), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128
)


def factory(rngs):
    return Llama(CONFIG, rngs=rngs)


def trained(recipe, degrees, remat="matmuls"):
    """The loss and the gradients of a Llama."""
    tokens = np.random.default_rng(1).integers(0, 128, (8, 16)).astype(np.int32)
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1)}
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])):
        model = placed(factory)
        model.blocks.remat = remat
        state = gtp.TrainState.create(model, optax.identity())
        run = jax.jit(lambda s: gtp.loss_and_gradients(next_token_loss, s, batch, recipe=recipe, view="local"))
        return jax.tree.map(np.asarray, run(state))


MODELS = [(dict(gtp=1), "matmuls"), (dict(gtp=2, tp=2), "matmuls"), *((dict(gtp=2), remat) for remat in REMAT)]


@pytest.mark.full
@pytest.mark.parametrize("degrees, remat", MODELS, ids=str)
def test_a_model_s_loss_and_gradients_are_the_same_bit_for_bit(degrees, remat):
    found, wanted = (trained(recipe, degrees, remat) for recipe in (KEPT, WITHOUT))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_frozen_weights_have_no_wgrad_and_keep_no_codes():
    def program(recipe):
        make = lambda rngs: gtp.lora(Llama(CONFIG, rngs=rngs), 4, 8.0, recipe=recipe, rngs=rngs)  # noqa: E731
        with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
            state = gtp.TrainState.create(abstract_model(make), optax.identity())
            tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
            batch = {"tokens": tokens, "targets": tokens}
            run = jax.jit(lambda s, b: gtp.loss_and_gradients(next_token_loss, s, b, view="local"))
            return run.lower(state, batch).as_text()

    assert program(KEPT) == program(WITHOUT)


def test_it_requires_matmuls():
    with pytest.raises(ValueError, match=naming("`keep_codes` `matmuls=True`")):
        gtp.FP8(keep_codes=True)
    with pytest.raises(TypeError, match=naming("`keep_codes` 1 True False")):
        gtp.FP8(matmuls=True, keep_codes=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@needs_target
@pytest.mark.skipif(not native.has("gtp_quantize", "CUDA"), reason=native.describe())
@pytest.mark.parametrize("remat, again", [("matmuls", False), ("nothing", True)])
def test_on_h200_backward_quantizes_no_input(remat, again):
    mesh = gtp.make_mesh(gtp=2, devices=hlo.topology_devices(hlo.parse_target("h200:2")))
    options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1, fp8=True)}
    sizes = dict(hidden_size=1024, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=128, intermediate_size=2048)
    config = LlamaConfig(vocab_size=1024, remat=remat, **sizes)
    step = lowered_step(config, mesh, batch=2, seq=1024, compiler_options=options, recipe=KEPT)
    dense = 4 * config.num_layers
    # the gradient once, and the input once in forward, and under `nothing` in the forward pass that is run again
    assert step.compile().as_text().count('custom_call_target="gtp_quantize"') == dense * (3 if again else 2)
