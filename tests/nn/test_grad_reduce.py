"""Weight gradients leave products in float32, and are summed over the ranks as `grad_reduce` says."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import LlamaConfig
from gtp_jax.nn import GRAD_REDUCE, Embed
from gtp_jax.runner.flags import Execution

from ..chain.programs import lowered_step

SIZES = dict(
    vocab_size=640, hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384
)
MATMULS = {"fp8": gtp.FP8, "mxfp8": gtp.MXFP8, "nvfp4": gtp.NVFP4}

STEPS = {
    "column and row": (dict(gtp=8), {}, {}),
    "a ring over tp": (dict(gtp=4, tp=2), {}, {}),
    "a longer ring, looped": (dict(gtp=2, tp=4), dict(num_heads=8, num_kv_heads=4, head_dim=32, unroll=1), {}),
    "a tied head": (dict(gtp=4, tp=2), dict(tie_embeddings=True), {}),
    "experts": (dict(gtp=4, tp=2), dict(num_experts=4), {}),
    "experts in nvfp4": (
        dict(gtp=8),
        dict(num_experts=4, num_layers=1),
        dict(recipe=gtp.NVFP4(matmuls=True, exclude=())),
    ),
    "uneven parts": (dict(gtp=2, tp=2), dict(vocab_size=97), {}),
    **{
        name: (dict(gtp=4, tp=2), dict(num_layers=1), dict(recipe=kind(matmuls=True, exclude=())))
        for name, kind in MATMULS.items()
    },
}


@pytest.mark.parametrize("case", others_full(STEPS, ["a ring over tp", "experts", "fp8"]))
def test_no_weight_gradient_is_bfloat16_between_its_matmul_and_its_reduce_scatter(case):
    made = made_of(case, "float32")
    assert all({"stablehlo.dot_general", "stablehlo.scatter"} & kinds.keys() for kinds in made)
    assert {dtype for kinds in made for dtypes in kinds.values() for dtype in dtypes} == {"f32"}


def test_of_todays_reduction_every_one_is_bfloat16():
    made = made_of("column and row", "bf16")
    assert [kinds["stablehlo.dot_general"] for kinds in made if "stablehlo.dot_general" in kinds] == [{"bf16"}] * 9


def made_of(case, name):
    """Of each reduce-scatter of a weight's gradient, the operations that made it and the dtypes of their results."""
    degrees, fields, options = STEPS[case]
    config = LlamaConfig(**{**SIZES, **fields}, grad_reduce=name)
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    step = lowered_step(config, mesh, batch=8, seq=128, **options)
    found = Origins(step.compiler_ir("stablehlo"))
    weights = [op for op in found.reductions if len(op.operands[0].type.shape) == 2]  # activations have a batch too
    # of a layer four, the embedding's and the head's; of a loop its body's and those of a layer beside it
    assert len(weights) == (4 * config.num_layers + 2)
    return [found.of(op.operands[0]) for op in weights]


class Origins:
    """Follows values of a StableHLO module back to the matmuls and sums that made them, through calls and loops."""

    LAST = ("stablehlo.dot_general", "stablehlo.scatter")

    def __init__(self, module) -> None:
        self.functions, self.calls, self.reductions = {}, {}, []

        def visit(op):
            op = op.operation
            if op.name == "func.func":
                self.functions[op.attributes["sym_name"].value] = op
            if op.name == "func.call":
                self.calls.setdefault(op.attributes["callee"].value, []).append(op)
            if op.name == "stablehlo.reduce_scatter":
                self.reductions.append(op)
            for region in op.regions:
                for block in region.blocks:
                    for inner in block.operations:
                        visit(inner)

        visit(module.operation)

    def of(self, value) -> dict[str, frozenset[str]]:
        """Kinds of all operations on the way, each with the dtypes of their results; none ahead of `LAST`."""
        found: dict[str, set[str]] = {}
        seen, waiting = set(), [value]
        while waiting:
            value = waiting.pop()
            if value in seen or not dtype_of(value).startswith(("f", "bf")):
                continue
            seen.add(value)
            kind, ahead = self.ahead_of(value)
            found.setdefault(kind, set()).add(dtype_of(value))
            waiting += [] if kind in self.LAST else ahead
        return {kind: frozenset(dtypes) for kind, dtypes in found.items()}

    def ahead_of(self, value):
        owner = value.owner
        if hasattr(owner, "operations"):  # an argument of a block
            op, index = owner.owner.operation, value.arg_number
            if op.name == "func.func":
                calls = self.calls.get(op.attributes["sym_name"].value, [])
                return "argument", [call.operands[index] for call in calls]
            if op.name == "stablehlo.while":
                return "argument", [op.operands[index], returned(op.regions[1])[index]]
            return "argument", [op.operands[index]]
        op, index = owner.operation, value.result_number
        if op.name == "func.call":
            return op.name, [returned(self.functions[op.attributes["callee"].value].regions[0])[index]]
        if op.name == "stablehlo.while":
            return op.name, [op.operands[index], returned(op.regions[1])[index]]
        if op.name == "stablehlo.optimization_barrier":
            return op.name, [op.operands[index]]
        return op.name, list(op.operands)


def returned(region):
    block = list(region.blocks)[0]
    return list(block.operations)[-1].operation.operands


def dtype_of(value) -> str:
    return str(value.type).removesuffix(">").removeprefix("tensor<").split("x")[-1]


# Loosest errors of a gradient of bfloat16 operands, in the L2 norm, summed over 8 ranks; and the least, for one that
# is rounded: 2**-9 at most, an element.
ERRORS = {"float32": (0, 1e-6), "bf16-wire": (5e-4, 2e-3), "bf16": (1e-3, 1e-2)}


def bf16(seed, *shape):
    """Random numbers that bfloat16 holds."""
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, jnp.bfloat16)


def gradient(make, x, g):
    """The gradient of `sum(module(x) * g)`, under the mesh in scope."""
    graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))

    def loss(state):
        y = nnx.merge(graph, state)(x)
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

    (found,) = jax.tree.leaves(jax.jit(jax.grad(loss))(state))
    return np.asarray(found, np.float64)


def exact(x, g):
    rows = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return rows.T @ np.asarray(g, np.float64).reshape(-1, g.shape[-1])


MODULES = {
    "alone": lambda name: lambda rngs: gtp.Dense(256, 128, grad_reduce=name, rngs=rngs),
    "column": lambda name: lambda rngs: gtp.Dense(256, 128, parallel="column", grad_reduce=name, rngs=rngs),
    "row": lambda name: lambda rngs: gtp.Dense(256, 128, parallel="row", grad_reduce=name, rngs=rngs),
}


@pytest.mark.parametrize(
    ("module", "name", "degrees"), pairwise(MODULES, GRAD_REDUCE, [dict(gtp=4, tp=2), dict(gtp=8)], usual=3)
)
def test_a_gradient_over_the_ranks_is_the_float32_sum(module, degrees, name):
    x, g = bf16(0, 8, 32, 256), bf16(1, 8, 32, 128)
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        found = gradient(MODULES[module](name), x, g)
    check(found, exact(x, g), name)


@pytest.mark.parametrize(("name", "unroll"), pairwise(GRAD_REDUCE, [1, "full"], usual=1))
def test_so_it_is_in_a_stack(unroll, name):
    def make(rngs):
        schedule = gtp.nn.Schedule(unroll=unroll)
        dense = lambda rngs: gtp.Dense(128, 128, grad_reduce=name, rngs=rngs)  # noqa: E731
        return gtp.Stack(dense, 1, schedule=schedule, rngs=rngs)

    x, g = bf16(0, 8, 32, 128), bf16(1, 8, 32, 128)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        found = gradient(make, x, g)[0]
    check(found, exact(x, g), name)


@pytest.mark.parametrize("name", others_full(GRAD_REDUCE, ["bf16"]))
def test_with_one_rank_nothing_is_rounded(name):
    x, g = (jax.random.normal(jax.random.key(i), (8, 32, size)) for i, size in enumerate((256, 128)))
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        make = lambda name: lambda rngs: gtp.Dense(256, 128, dtype="float32", grad_reduce=name, rngs=rngs)  # noqa: E731
        found, wanted = (gradient(make(one), x, g)[0] for one in (name, "float32"))
    np.testing.assert_array_equal(found, wanted)
    assert np.any(np.asarray(wanted) != np.asarray(wanted.astype(jnp.bfloat16)))


@pytest.mark.parametrize("name", others_full(GRAD_REDUCE, ["float32"]))
def test_so_it_is_of_a_table(name):
    tokens = jnp.asarray(np.random.default_rng(2).integers(0, 64, (8, 128)))
    g = bf16(3, 8, 128, 128)
    wanted = np.zeros((64, 128))
    np.add.at(wanted, np.asarray(tokens), np.asarray(g, np.float64))
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        found = gradient(lambda rngs: Embed(64, 128, grad_reduce=name, rngs=rngs), tokens, g)
    check(found, wanted, name)


def check(found, wanted, name):
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    least, most = ERRORS[name]
    assert least <= error <= most, f"{error:.2e}"


WIRE = {"float32": ("reduce-scatter", "f32", 4), "bf16-wire": ("all-to-all", "u16", 2)}


@pytest.mark.full
@pytest.mark.parametrize(("name", "parts"), pairwise(["bf16-wire", "float32"], [1, 2], usual=1))
def test_the_wire_has_as_many_bytes_as_the_name_says(name, parts):
    """`bf16` compiled: `tests/chain/test_overlap_h200.py`; XLA's CPU backend widens its sum."""
    kind, dtype, size = WIRE[name]
    step = lowered_step(
        LlamaConfig(**SIZES, grad_reduce=name), gtp.make_mesh(gtp=8), batch=8 * parts, seq=128, microbatches=parts
    )
    over_gtp = [c for c in hlo.collectives(step.compile().as_text()) if c.axes == ("gtp",)]
    sums = [c for c in over_gtp if c.kind in ("reduce-scatter", "all-to-all")]
    assert {(c.kind, c.dtype, c.direction) for c in sums} == {(kind, dtype, "backward")}
    block = 512 * 128 + 128 * 256 + 768 * 128 + 128 * 384
    assert sum(c.times * c.operand_bytes for c in sums) == size * parts * (2 * block + 2 * 640 * 128)


@pytest.mark.parametrize(("remat", "unroll"), pairwise(["matmuls", "everything"], ["full", 1], usual=1))
def test_a_slot_is_never_saved_for_backward(remat, unroll):
    def saved(name):
        def make(rngs):
            schedule = gtp.nn.Schedule(unroll=unroll)
            dense = lambda rngs: gtp.Dense(96, 96, grad_reduce=name, rngs=rngs)  # noqa: E731
            return gtp.Stack(dense, 3, schedule=schedule, remat=remat, rngs=rngs)

        graph, state = nnx.split(make(nnx.Rngs(0)))
        x = jnp.zeros((8, 4, 96), jnp.bfloat16)
        residuals = jax.eval_shape(lambda state: jax.vjp(lambda s: nnx.merge(graph, s)(x), state)[1], state)
        return Counter((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(residuals))

    assert saved("float32") == saved("bf16-wire") == saved("bf16")
    assert sum(saved("float32").values())


def test_an_unknown_name_is_refused():
    refused = pytest.raises(ValueError, match=naming("`grad_reduce` 'int8' float32 bf16-wire bf16"))
    with refused:
        gtp.Dense(8, 8, grad_reduce="int8", rngs=nnx.Rngs(0))
    with refused:
        LlamaConfig(**SIZES, grad_reduce="int8")
    with refused:
        Execution(grad_reduce="int8")
