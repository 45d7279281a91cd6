"""Experts in tiles that shards may cut: codes and scales are those of one device, bit for bit, and bytes travel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo

from ..ops import oracle
from .test_tiles import batch, loss, numbers, scope

EXPERTS, WIDTH = 4, 192
TILE = (128, 128)
RECIPE = gtp.FP8Blocks(exclude=())
# rows of each kernel; degrees; the layer's options
PLACES = {
    "parts of tiles": ((256, 512), dict(gtp=8), {}),
    "kernels of odd sizes": ((200, 72), dict(gtp=4), {}),
    "gtp 4 x ep 2": ((256, 64), dict(gtp=4, ep=2), dict(experts_axis="ep")),
    "gtp 2 x tp 2 x ep 2, features": (
        (512, 256),
        dict(gtp=2, tp=2, ep=2),
        dict(experts_axis="ep", parallel="column"),
    ),
    "gtp 2 x tp 2 x ep 2, experts over both": (
        (256, 64),
        dict(gtp=2, tp=2, ep=2),
        dict(experts_axis="ep", parallel="expert"),
    ),
    "experts unevenly over tp": ((256, 64), dict(gtp=2, tp=3), dict(parallel="expert")),
    "gathered over tp too": ((256, 64), dict(gtp=2, tp=2), dict(axes=("tp", "gtp"))),
    "dp shards too": ((256, 64), dict(dp=2, gtp=2), dict(axes=("dp", "gtp"))),
    "stored in parts over dp": ((256, 64), dict(dp=2, gtp=4), {}),
}


def kernels_of(sizes):
    """Kernels whose experts differ in size by powers of e."""
    rng = np.random.default_rng(5)
    factors = np.exp(4 * rng.normal(size=(EXPERTS, 1, 1))).astype(np.float32)
    return {size: np.stack([numbers((size, WIDTH + e))[:, :WIDTH] for e in range(EXPERTS)]) * factors for size in sizes}


def layer_of(kernels, sizes, options):
    """A layer of these kernels, which the initializer finds by their rows."""
    out = {str(i): size for i, size in enumerate(sizes)}
    make = lambda rngs: gtp.GroupedDense(  # noqa: E731
        EXPERTS,
        WIDTH,
        out if len(sizes) > 1 else sizes[0],
        dtype="float32",
        kernel_init=lambda _, shape, __: jnp.asarray(kernels[shape[1]]),
        rngs=rngs,
        **options,
    )
    return gtp.init(make, nnx.Rngs(0))


def in_local_view(function, layer, *operands, specs):
    """`function(layer, *operands)` on every rank; operands are replicated."""
    graph, state = nnx.split(layer)
    here = jax.tree.map(lambda a: a.sharding.spec, state)
    local = lambda state, *operands: function(nnx.merge(graph, state), *operands)  # noqa: E731
    mapped = jax.shard_map(local, in_specs=(here, *(P() for _ in operands)), out_specs=specs, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(state, *operands))


def spec_without(layout, *axes):
    """The partitions of a weight that is whole over some axes."""
    return P(
        *(tuple(a for a in ([e] if isinstance(e, str) else e or ()) if a not in axes) for e in layout.of_shards.spec)
    )


@pytest.mark.parametrize("place", others_full(PLACES, list(PLACES)[1:5:3]))
def test_codes_and_scales_are_those_of_one_device_bit_for_bit(place):
    sizes, degrees, options = PLACES[place]
    (kernel,) = kernels_of(sizes[:1]).values()
    with scope(degrees), gtp.use_recipe(RECIPE):
        layer = layer_of({sizes[0]: kernel}, sizes[:1], options)
        (layout,) = layer.layouts
        specs = layout.of_shards.matrix_spec, spec_without(layout, *layout.axes)
        codes, scales = in_local_view(lambda own: (own.wire().codes, own.wire().scales), layer, specs=specs)
    for expert in range(EXPERTS):
        wanted, inverse = oracle.quantize_blocked(kernel[expert], TILE)
        np.testing.assert_array_equal(codes[expert], wanted)
        np.testing.assert_array_equal(scales[expert].view(np.int32), inverse.view(np.int32))


@pytest.mark.parametrize("place", others_full(PLACES, list(PLACES)[:5:2]))
def test_experts_multiply_the_values_of_one_device(place):
    """Both kernels of a gather: a product with the identity is the weight."""
    sizes, degrees, options = PLACES[place]
    kernels = kernels_of(sizes)
    with scope(degrees), gtp.use_recipe(RECIPE):
        layer = layer_of(kernels, sizes, options)
        own = layer.own_experts
        x = jnp.tile(jnp.eye(WIDTH), (own, 1))
        run = lambda layer, x: layer(x, jnp.full(own, WIDTH, jnp.int32))  # noqa: E731
        features = "tp" if options.get("parallel") == "column" else None
        found = in_local_view(run, layer, x, specs=P(options.get("experts_axis"), features))
    for name, size in enumerate(sizes):
        products = np.asarray(found[str(name)]).reshape(EXPERTS, WIDTH, size)
        for expert in range(EXPERTS):
            wanted = oracle.rounded_blocked(kernels[size][expert], TILE)
            np.testing.assert_array_equal(products[expert].T, wanted.astype(np.float32))


class Model(nnx.Module):
    """A stack of experts, and a dense layer."""

    def __init__(self, rngs, experts=None, **options):
        sizes = dict(num_experts=EXPERTS, top_k=2, dtype="float32", **(experts or {}))
        make = lambda rngs: gtp.MoE(128, 256, rngs=rngs, **sizes)  # noqa: E731
        self.blocks = gtp.Stack(make, 2, rngs=rngs)
        self.last = gtp.Dense(128, 256, dtype="float32", rngs=rngs, **options)

    def __call__(self, x):
        return self.last(self.blocks(x))


@pytest.mark.full
def test_one_maximum_is_reduced_and_weights_of_experts_travel_as_bytes():
    with scope(dict(gtp=4, ep=2)):
        optimizer = optax.sgd(0.1)
        model = gtp.init(Model, nnx.Rngs(0))
        told = {fact.module: fact.bytes for fact in gtp.explain(model, RECIPE).facts}
        axes = model.last.layouts[0].axes
        state = gtp.TrainState.create(model, optimizer)
        text = gtp.train_step(loss, optimizer, recipe=RECIPE).lower(state, batch(128, 256)).compile().as_text()
    kernel = 256 * 128
    assert told == {
        "blocks.layers.up": 2 * EXPERTS * kernel,
        "blocks.layers.down": EXPERTS * kernel,
        "last": kernel,
    }
    found = hlo.collectives(text)
    (reduced,) = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name]
    assert reduced.times == 1 and reduced.dtype == "s32"
    # two tiles of each kernel: gate, up and down of two layers; of all experts if the axes contain ep
    assert set(axes) == {"gtp", "ep"}
    assert reduced.operand_bytes == 4 * 2 * (2 * 3 * EXPERTS + 1)
    gathers = [c for c in found if c.kind == "all-gather" and "gtp" in c.axes]
    assert {c.dtype for c in gathers} == {"u8"}
    along = sum(c.result_bytes * c.times for c in gathers if c.direction == "forward")
    # a rank gathers the weights of its own experts
    assert along == 2 * 3 * kernel * EXPERTS // 2 + kernel


def test_ranks_with_different_parts_of_a_kernel_keep_their_own_scales():
    """Experts that are gathered over tp are reduced over it, but not the columns of a dense layer that tp divides."""
    kernel = numbers((128, 256)) * np.repeat(np.float32([1, 1e4]), 128)
    with scope(dict(gtp=2, tp=2)):
        init = lambda _, shape, __: jnp.asarray(kernel)  # noqa: E731
        experts, dense = dict(axes=("tp", "gtp"), parallel=None), dict(parallel="column", kernel_init=init)
        model = gtp.init(lambda rngs: Model(rngs, experts, **dense), nnx.Rngs(0))

        def loss(model, batch):
            found = model.last(batch["x"])
            return (jnp.sum(found), jnp.float32(1)), {"found": found}

        state = gtp.TrainState.create(model, optax.sgd(0.1))
        x = jnp.tile(jnp.eye(128)[:, None], (1, 2, 1))
        found = gtp.eval_step(loss, has_aux=True, recipe=RECIPE)(state, {"x": x})["aux"]["found"]
    wanted = oracle.rounded_blocked(kernel.T, TILE).T
    np.testing.assert_array_equal(np.asarray(found)[:, 0], wanted.astype(np.float32))
