"""A layer of experts: each row by its own expert's kernel, on every mesh and sharding; one gather, one scatter."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo

from ..recipes.oracles import matrix

ROWS, FEATURES, SIZES = 20, 48, {"a": 56, "b": 24}  # no size is a multiple of gtp * 16


class Model(nnx.Module):
    def __init__(self, rngs, experts, sizes=SIZES, **options):
        dtypes = dict(dtype="float64", param_dtype="float64")
        self.grouped = gtp.nn.GroupedDense(experts, FEATURES, sizes, rngs=rngs, **dtypes, **options)


def loss(model, batch):
    """Whole outputs on every rank, or this rank's columns of them, whose squares add up over tp."""
    found = [model.grouped(x, n) for x, n in zip(batch["x"], batch["sizes"], strict=True)]
    return sum(jnp.sum(y**2) for one in found for y in one.values()), jnp.float64(1)


def batch_of(experts):
    """A sequence a rank of eight, of ragged sizes; an expert without rows, and rows without an expert."""
    rng = np.random.default_rng(experts)
    share = rng.dirichlet(np.ones(experts) / 2)
    share[-1] = 0
    sizes = np.stack([rng.multinomial(ROWS - i % 3, share / share.sum()) for i in range(8)])
    return {"x": rng.normal(size=(8, ROWS, FEATURES)), "sizes": sizes.astype(np.int32)}


def run(degrees, experts, recipe=None, **options):
    """Parameters, the gradient and the compiled text."""
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
        make = lambda rngs: Model(rngs, experts, **options)  # noqa: E731
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(1.0))
        jitted = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, recipe=recipe, view="local"))
        compiled = jitted.lower(state, batch_of(experts)).compile()
        _, gradient = compiled(state, batch_of(experts))
        host = lambda tree: jax.tree.map(np.asarray, tree)["grouped"]["kernel"]  # noqa: E731
        return host(state.params), host(gradient), compiled.as_text()


def oracle(kernels, experts):
    """The gradient of the sum of squares, expert by expert."""
    batch, found = batch_of(experts), {name: np.zeros(w.shape) for name, w in kernels.items()}
    for x, sizes in zip(batch["x"], batch["sizes"], strict=True):
        for expert, rows in enumerate(np.split(x, np.cumsum(sizes))[:experts]):
            for name, w in kernels.items():
                found[name][expert] += 2 * (rows @ w[expert].T).T @ rows
    return found


CUTS = {
    "gtp 4 x tp 2, columns": (dict(gtp=4, tp=2), 2, dict(parallel="column")),
    "gtp 4 x tp 2, experts divided": (dict(gtp=4, tp=2), 4, dict(parallel="expert")),
    "dp 2 x gtp 4, sharded over both": (dict(dp=2, gtp=4), 3, dict(axes=("dp", "gtp"))),
    "gtp 4 x tp 2, 64 sharded over both": (dict(gtp=4, tp=2), 64, dict(axes=("tp", "gtp"))),
}


@pytest.mark.parametrize("name", others_full(CUTS, ["gtp 4 x tp 2, columns", "dp 2 x gtp 4, sharded over both"]))
def test_gradients_are_those_of_a_matmul_an_expert(name, x64):
    degrees, experts, options = CUTS[name]
    kernels, gradient, _ = run(degrees, experts, **options)
    # the ranks of columns together count a sequence as often as one counts a token
    ranks = degrees.get("dp", 1) * degrees["gtp"] * (degrees["tp"] if options.get("parallel") == "column" else 1)
    for key, wanted in oracle(kernels, experts).items():
        np.testing.assert_allclose(gradient[key] * ranks, wanted, rtol=0, atol=1e-12 * np.abs(wanted).max())


def test_all_experts_travel_in_one_gather_and_one_scatter(x64):
    experts = 8
    _, _, text = run(dict(gtp=8), experts, gtp.NVFP4(), sizes={"a": 256, "b": 128})  # shards hold whole blocks
    found = hlo.collectives(text)
    kinds = [(c.kind, c.direction) for c in found if c.axes == ("gtp",) and c.kind != "all-reduce"]
    assert sorted(kinds) == [("all-gather", "forward"), ("reduce-scatter", "backward")]  # no gradient for the input
    assert {c.dtype for c in found if c.kind == "all-gather"} == {"u8"}
    maxima = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name]
    assert [c.operand_bytes for c in maxima] == [4 * 2 * experts]  # two kernels an expert


def test_every_expert_is_quantized_by_itself(x64):
    degrees, experts, options = CUTS["gtp 4 x tp 2, experts divided"]
    recipe = gtp.NVFP4()
    scaled = lambda key, shape, dtype: (  # noqa: E731  experts of very different size
        jax.random.normal(key, shape, dtype) * 10.0 ** jnp.arange(shape[0])[:, None, None]
    )
    kernels, gradient, _ = run(degrees, experts, recipe, kernel_init=scaled, **options)
    quantized = {k: np.stack([matrix(e, recipe.wire, "float64") for e in w]) for k, w in kernels.items()}
    for key, wanted in oracle(quantized, experts).items():
        for expert in range(experts):
            found = gradient[key][expert] * degrees["gtp"]
            np.testing.assert_allclose(found, wanted[expert], rtol=0, atol=1e-12 * np.abs(wanted[expert]).max())


def dense(**options):
    return gtp.nn.GroupedDense(4, 8, 16, rngs=nnx.Rngs(0), **options)


def mixture(**options):
    return gtp.nn.MoE(8, 8, **{"num_experts": 2, **options}, rngs=nnx.Rngs(0))


REFUSED = {
    "parallel": (lambda: dense(parallel="experts"), "`parallel` 'experts' 'column' 'row'"),
    "rows": (lambda: dense()(jnp.ones((3, 7)), jnp.ones(4, int)), "GroupedDense (rows, 8)"),
    "count": (lambda: dense()(jnp.ones((3, 8)), jnp.ones(3, int)), "`group_sizes` (3,) (4,)"),
    "kind": (lambda: dense()(jnp.ones((3, 8)), jnp.ones(4)), "`group_sizes` float32"),
    "axes": (lambda: dense(axes=("gtp", "gtp")), "`axes` ('gtp', 'gtp') different"),
    "top_k": (lambda: mixture(top_k=3), "`top_k` 3 2 experts"),
    "moe loss": (lambda: mixture(loss_reduction="none"), "`loss_reduction` 'none' 'sum' 'mean'"),
}
ON_A_MESH = {
    "tp twice": (lambda: dense(parallel="row", axes=("tp", "gtp")), "`axes` ('tp', 'gtp') (4, 16, 8) 'tp'"),
    "no axis": (lambda: dense(axes=("ep",)), "'ep'"),
    "global": (lambda: dense()(jnp.ones((8, 8)), jnp.ones(4, int)), "GroupedDense `MoE` `shard_map` `view='local'`"),
}


@pytest.mark.parametrize("name", [*REFUSED, *ON_A_MESH])
def test_bad_argument_is_named(name):
    call, message = (REFUSED | ON_A_MESH)[name]
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)) if name in ON_A_MESH else contextlib.nullcontext():
        with pytest.raises(TypeError if name == "kind" else ValueError, match=naming(message)):
            jax.eval_shape(call)
