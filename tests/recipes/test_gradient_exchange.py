"""Gradients exchanged in few bits are the exact sum, to the rounding of each rank's share; counted to the byte."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.layout import layouts_of_kernels
from gtp_jax.mesh import AXES
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model
from gtp_jax.recipes import GRAD_WIRES
from gtp_jax.weights import exchange_gradients
from gtp_jax.weights._fused import as_shards, reduce_gradient

from ..chain.programs import lowered_step
from .test_recipe_collectives import LAYERS, SIZES
from .test_recipe_parity import ALIGNED, UNALIGNED, batch_of, host, scope, start

# Shapes of the kernels of two weights, `(in, out)` or `(experts, out, in)`, and how they are sharded.
CUTS = {
    "gtp 8, unaligned": (dict(gtp=8), [(96, 120), (96, 56)], [(40, 72)], {}),
    "gtp 4 x tp 2": (dict(gtp=4, tp=2), [(64, 128)], [(64, 64)], dict(split_dim=1)),
    "dp 2 x gtp 4, experts sharded over both": (
        dict(dp=2, gtp=4),
        [(3, 40, 32), (3, 40, 32)],
        [(3, 64, 24)],
        dict(axes=("dp", "gtp")),
    ),
}


def exchanged(name, wire, spoil=None):
    """Of each rank's random gradients: the sum by `wire`, the exact one, and the sum of magnitudes, shard by shard."""
    degrees, *kernels, cut = CUTS[name]
    rng = np.random.default_rng(len(name))
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        fused = [layouts_of_kernels(shapes, rows=1, **cut) for shapes in kernels]
        ranks = fused[0][0].ranks
        sent = [[layout.matrix_of(layout.shard_shape) for layout in one] for one in fused]
        shapes = [(one[0].matrices, sum(r for r, _ in part), part[0][1]) for one, part in zip(fused, sent, strict=True)]
        # of very different size from rank to rank, matrix to matrix and row to row
        sizes = [10.0 ** rng.uniform(-3, 3, (8, ranks, experts, rows, 1)) for experts, rows, _ in shapes]
        gradients = [
            (rng.normal(size=(*size.shape[:-1], cols)) * size).astype(np.float32)
            for size, (*_, cols) in zip(sizes, shapes, strict=True)
        ]
        if spoil is not None:
            gradients[0][0, 0, 0, 1, 7] = spoil
        flat = [g.reshape(8 * ranks, *g.shape[2:]) for g in gradients]
        whole = [g if len(s[0]) == 3 else g.reshape(-1, g.shape[-1]) for g, s in zip(flat, kernels, strict=True)]

        def shards(parts):
            return [as_shards(p, one, [jnp.float32] * len(one)) for p, one in zip(parts, fused, strict=True)]

        def exact(gradients):
            return shards(reduce_gradient(g, one, jnp.float32) for g, one in zip(gradients, fused, strict=True))

        def run(function):
            local = lambda g: jax.tree.map(lambda a: a[None], function(g))  # noqa: E731
            mapped = jax.shard_map(local, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
            return host(jax.jit(mapped)(whole))

        found = run(lambda g: shards(exchange_gradients(g, fused, GRAD_WIRES[wire])))
        return found, run(exact), run(lambda g: exact([jnp.abs(x) for x in g]))


# Half a unit in the last place; and the L2 error of a sum that rounds to nearest, of ranks of unequal size.
ROUNDING = {"bf16": 2.0**-8, "fp8": 2.0**-4, "mxfp8": 2.0**-4}
NORM = {"bf16": 2.5e-3, "fp8": 0.035, "mxfp8": 0.035}

# Half of E4M3's smallest number, at the least scale of a power of two that holds the largest element, eight times.
SMALLEST = 8 * 2 / 448 * 2.0**-10


def smallest(wire, magnitudes):
    """How far elements may be off that are tiny beside their block's, or their share's, largest."""
    if wire == "bf16":
        return [0] * len(magnitudes)
    if wire == "mxfp8":  # blocks run along the input; so a scale of a share, or none, fails
        return [SMALLEST * size.max(-1 if size.ndim == 4 else -2, keepdims=True) for size in magnitudes]
    largest = np.max([size.max((-1, -2), keepdims=True) for size in magnitudes], axis=0)
    return [SMALLEST * largest] * len(magnitudes)


@pytest.mark.parametrize("wire, name", pairwise(GRAD_WIRES, CUTS))
def test_each_element_errs_by_no_more_than_each_ranks_rounding(wire, name):
    for found, wanted, magnitudes in zip(*exchanged(name, wire), strict=True):
        for a, b, size, tiny in zip(found, wanted, magnitudes, smallest(wire, magnitudes), strict=True):
            assert np.all(np.abs(a - b) <= 1.0001 * ROUNDING[wire] * size + tiny)
            error = np.linalg.norm(a - b) / np.linalg.norm(b)
            assert 0 < error < NORM[wire]


@pytest.mark.parametrize("wire, shrinks", [("bf16", 1e-5), ("fp8", 2e-3), ("mxfp8", 2e-3)])
def test_normal_gradients_are_hardly_smaller_in_the_mean(wire, shrinks):
    rng = np.random.default_rng(1)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        (layout,) = layouts_of_kernels([(256, 1024)], rows=1)
        gradients = rng.normal(size=(8, 1024, 256)).astype(np.float32)
        mapped = jax.shard_map(
            lambda g: as_shards(*exchange_gradients([g], [[layout]], GRAD_WIRES[wire]), [layout], [jnp.float32])[0],
            in_specs=P("gtp"),
            out_specs=layout.spec,
            check_vma=False,
        )
        found = np.asarray(jax.jit(mapped)(gradients.reshape(-1, 256)))
    wanted = gradients.sum(0, dtype=np.float64).T
    bias = np.mean((found - wanted) * np.sign(wanted)) / np.mean(np.abs(wanted))
    noise = np.std(found - wanted) / np.mean(np.abs(wanted)) / np.sqrt(wanted.size)
    assert -shrinks - 4 * noise < bias < 4 * noise


@pytest.mark.parametrize("wire, spoil", pairwise(GRAD_WIRES, [np.nan, np.inf]))
def test_what_is_not_finite_arrives_so_and_spoils_its_own_block_alone(wire, spoil):
    found, wanted, _ = exchanged("gtp 4 x tp 2", wire, spoil)
    bad = [np.concatenate([np.ravel(~np.isfinite(x)) for x in one]) for one in (found[0], wanted[0])]
    assert bad[1].sum() == 1 and np.all(bad[0] >= bad[1])
    assert bad[0].sum() == (32 if wire == "mxfp8" else 1)
    assert np.all(np.isfinite(found[1][0]))


def gradients(config, degrees, microbatches, grad_wire):
    options = dict(microbatches=microbatches, recipe=gtp.NVFP4(grad_wire=grad_wire))
    with scope(degrees):
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, **options))
        return host(run(start(config, optax.sgd(1.0)), batch_of(config))[1])


LOOPED = dataclasses.replace(ALIGNED, num_layers=4, unroll=1)
MODELS = {
    "gtp 8, unaligned": (UNALIGNED, dict(gtp=8), 1),
    "dp 2 x gtp 2, four microbatches, looped": (LOOPED, dict(dp=2, gtp=2), 4),
    "gtp 2 x tp 2, experts": (dataclasses.replace(ALIGNED, num_experts=4), dict(gtp=2, tp=2), 1),
}


@pytest.mark.full
@pytest.mark.parametrize("grad_wire, name", list(zip(itertools.cycle(GRAD_WIRES), MODELS)))
def test_a_models_gradients_are_those_of_a_reduce_scatter_but_for_that_rounding(name, grad_wire):
    config, degrees, microbatches = MODELS[name]
    config = dataclasses.replace(config, dtype="float32")
    wanted, found = (gradients(config, degrees, microbatches, how) for how in (None, grad_wire))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        names, error = jax.tree_util.keystr(path), np.linalg.norm(a - b) / np.linalg.norm(b)
        if "kernel" in names and "layers" in names:
            assert 0 < error < NORM[grad_wire], f"{names}: {error}"
        else:  # norms, router, embedding and head
            assert error < 1e-6, f"{names}: {error}"


def test_a_reduce_scatter_sums_in_the_dtype_asked_for():
    """As traced, for XLA's CPU backend widens what it compiles; `tests/chain/test_overlap_h200.py` sees a GPU's."""
    config = LlamaConfig(**{**SIZES, "grad_reduce": "float32"})
    text = lowered_step(config, gtp.make_mesh(gtp=8), batch=8, seq=128).as_text()
    sums = re.findall(r"stablehlo\.reduce_scatter.*?\}\) : \(tensor<[\dx]+x(\w+)>\)", text, re.DOTALL)
    assert len(sums) == 4 * LAYERS + 2 and set(sums) == {"f32"}


def test_what_stays_in_high_precision_is_reduce_scattered_and_explain_says_so():
    recipe = gtp.NVFP4(
        grad_wire="mxfp8",
        high_precision_first=1,
        override={"mlp": gtp.MXFP8(grad_wire="bf16"), "qkv": gtp.recipes.BF16()},
    )
    mesh = gtp.make_mesh(gtp=8)
    with jax.set_mesh(mesh):
        told = gtp.explain(abstract_model(lambda rngs: Llama(LlamaConfig(**SIZES), rngs=rngs)), recipe)
    wanted = {
        ("qkv", 0): "reduce-scatter bfloat16",
        ("out", 0): "reduce-scatter bfloat16",
        ("up", 0): "reduce-scatter bfloat16",
        ("qkv", 1): "reduce-scatter bfloat16",
        ("out", 1): "all-to-all MXFP8, summed in float32",
        ("up", 1): "all-to-all bfloat16, summed in float32",
        ("head", 0): "reduce-scatter bfloat16",
    }
    found = {(fact.module.split(".")[-1], fact.first): fact.reduction for fact in told.facts}
    assert wanted.items() <= found.items() and "all-to-all MXFP8" in str(told)
    text = lowered_step(LlamaConfig(**SIZES), mesh, batch=8, seq=128, recipe=recipe).as_text()
    assert text.count("stablehlo.all_to_all") == 2 * (LAYERS - 1)
    # the first layer's four, the others' query, key and value, the embedding's and the head's
    assert text.count("stablehlo.reduce_scatter") == 4 + (LAYERS - 1) + 2
