"""`Conv` and `Einsum` are `nnx.Conv` and `nnx.Einsum`: bit for bit without a mesh, to 1e-12 on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import every, others_full, pairwise

import gtp_jax as gtp
from gtp_jax.hlo import collectives

from .arrays import MESHES, assert_close, mesh_in_scope

# how each is made, and the shape of an example
LAYERS = {
    "one dimension": (lambda m, **o: m.Conv(8, 24, 3, **o), (7, 8)),
    "strides, padding, dilation and groups": (
        lambda m, **o: m.Conv(8, 16, (3, 2), 2, padding=((1, 2), 0), kernel_dilation=2, feature_group_count=4, **o),
        (9, 7, 8),
    ),
    "causal, no bias": (lambda m, **o: m.Conv(8, 8, (3,), padding="CAUSAL", use_bias=False, **o), (7, 8)),
    "grouped, circular": (lambda m, **o: m.Conv(8, 8, (3,), padding="CIRCULAR", feature_group_count=4, **o), (7, 8)),
    "three dimensions, transposed": (
        lambda m, **o: m.Conv(2, 5, (2, 2, 2), padding=1, input_dilation=2, **o),
        (3, 4, 5, 2),
    ),
    "patches": (lambda m, **o: m.Conv(3, 16, (4, 4), (4, 4), padding="VALID", **o), (8, 8, 3)),
    "heads": (lambda m, **o: m.Einsum("bte,ehd->bthd", (8, 6, 4), (6, 4), **o), (5, 8)),
    "ellipsis": (lambda m, **o: m.Einsum("...e,ef->...f", (8, 7), (7,), **o), (5, 8)),
    "of each position its own": (lambda m, **o: m.Einsum("bte,tef->btf", (5, 8, 3), **o), (5, 8)),
    "without a batch ahead": (lambda m, **o: m.Einsum("tbe,ef->bf", (8, 7), (7,), **o), (5, 8)),
}


class Stacked(nnx.Module):
    """A stack of residual blocks; or in a loop the same blocks of Flax's."""

    def __init__(self, module, rngs):
        self.stack = gtp.Stack(lambda rngs: Block(module, rngs), 2, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


class Block(nnx.Module):
    def __init__(self, module, rngs):
        options = dict(rngs=rngs, param_dtype=jnp.float64)
        self.conv = module.Conv(8, 16, (3,), feature_group_count=2, **options)
        self.mix = module.Einsum("btc,cd->btd", (16, 8), (8,), **options)

    def __call__(self, x):
        return x + self.mix(jax.nn.silu(self.conv(x)))


@functools.cache
def measured(name, ours, mesh, batch=24):
    """Outputs, loss, and gradients of parameters and input."""
    module = gtp.nn if ours else nnx
    options = dict(param_dtype=jnp.float64)
    make, shape = LAYERS.get(name, (None, (5, 8)))
    with mesh_in_scope(mesh):
        factory = (lambda rngs: make(module, rngs=rngs, **options)) if make else (lambda rngs: Stacked(module, rngs))
        graph, state = nnx.split(placed(factory))
        x = jax.random.normal(jax.random.key(1), (batch, *shape), jnp.float64)

        def loss(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.mean(jnp.sin(y)), y

        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(state, x))


@pytest.mark.parametrize("name", every(6, ["a stack", *LAYERS]))
def test_without_a_mesh_bit_for_bit(name, x64):
    for found, wanted in zip(*(jax.tree.leaves(measured(name, ours, None)) for ours in (True, False)), strict=True):
        assert found.tobytes() == wanted.tobytes() and found.dtype == np.float64


@pytest.mark.parametrize("name, mesh", pairwise([*LAYERS, "a stack"], MESHES, usual=2))
def test_on_a_mesh_as_without_one(name, mesh, x64):
    assert_close(measured(name, True, mesh), measured(name, False, None))


@pytest.mark.full
@pytest.mark.parametrize("name", others_full(["patches", "heads", "a stack"], ["a stack"]))
def test_a_batch_that_ranks_do_not_divide(name, x64):
    assert_close(measured(name, True, "gtp 4 x tp 2", batch=5), measured(name, False, None, batch=5))


def test_a_kernel_is_gathered_again_in_backward_and_its_gradient_scattered_once():
    with mesh_in_scope("gtp 8"):
        make = lambda rngs: gtp.nn.Conv(8, 64, (3, 3), dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
        graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
        assert state["kernel"].get_value().sharding.spec == jax.P(None, None, None, "gtp")
        grad = jax.grad(lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x))), (0, 1))
        compiled = jax.jit(grad).lower(state, jnp.ones((8, 9, 9, 8))).compile()
    kinds = [one.kind for one in collectives(compiled.as_text())]
    assert kinds.count("all-gather") == 2 and kinds.count("reduce-scatter") == 1


def test_bfloat16_is_computed_as_flax_computes_it():
    make = lambda m, rngs: m.Conv(8, 16, (3,), dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
    x = jax.random.normal(jax.random.key(1), (8, 7, 8))
    plain = nnx.jit(lambda model, x: model(x))(nnx.jit(lambda: make(nnx, nnx.Rngs(0)))(), x)
    with mesh_in_scope("gtp 4 x tp 2"):
        model = placed(lambda rngs: make(gtp.nn, rngs))
        found = jax.jit(lambda x: model(x))(x)
    assert found.dtype == jnp.bfloat16 and np.asarray(found).tobytes() == np.asarray(plain).tobytes()


def conv(*sizes, **options):
    return gtp.nn.Conv(*sizes, rngs=nnx.Rngs(0), **options)


def einsum(*sizes, **options):
    return gtp.nn.Einsum(*sizes, rngs=nnx.Rngs(0), **options)


REFUSED = [
    (lambda: conv(8, 0, 3), "Conv(8, 0, 3) whole"),
    (lambda: conv(8, 8, 2.5), "sizes whole"),
    (lambda: conv(8, 9, 3, feature_group_count=3), "`feature_group_count` 3 8 9"),
    (lambda: conv(8, 8, 3, mask=np.ones((3, 8, 8))), "`mask` gtp_jax.nn.Conv Remove `gtp_jax.Param`"),
    (lambda: conv(8, 8, 3)(np.ones((2, 7, 9))), "Conv 1 8 (2, 7, 9)"),
    (lambda: einsum("be,ef->bf", (8, 8), kernel_metadata={"out_sharding": ()}), "`kernel_metadata` gtp_jax.nn.Einsum"),
    (lambda: einsum("be,ef", (8, 8)), "`einsum_str` 'be,ef' two output"),
    (lambda: einsum("be,efg->bfg", (8, 8)), "'efg' 3 `kernel_shape` (8, 8)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_a_bad_argument_is_named(call, message):
    with pytest.raises(ValueError, match=naming(message)):
        jax.eval_shape(call)


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda rngs: gtp.nn.Conv(8, 8, (3,), rngs=rngs), True),
        (lambda rngs: gtp.nn.Einsum("bte,ts->bse", (4, 4), rngs=rngs), True),
        (lambda rngs: gtp.nn.Einsum("...e,ef->...f", (8, 8), rngs=rngs), False),
    ],
)
def test_a_part_of_a_sequence_is_refused_where_the_result_depends_on_the_whole(make, whole):
    with jax.set_mesh(gtp.make_mesh(cp=2, devices=jax.devices()[:2])):
        model, state = nnx.split(placed(make))

        def local(state, x):
            return nnx.merge(model, state)(x)

        specs = jax.tree.map(lambda a: a.sharding.spec, state)
        tokens = jax.sharding.PartitionSpec(None, "cp")
        call = jax.shard_map(local, in_specs=(specs, tokens), out_specs=tokens, check_vma=False)
        x = jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)
        if not whole:
            assert jax.eval_shape(call, state, x).shape == x.shape
            return
        with pytest.raises(ValueError, match=naming("part of every sequence cp = 2 global view")):
            jax.eval_shape(call, state, x)
