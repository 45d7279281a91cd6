"""Every row is multiplied with its own group's kernel, whatever the sizes; by an oracle in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

from gtp_jax.formats import FP8_BLOCKS, FP8_E4M3
from gtp_jax.ops import grouped_matmul
from gtp_jax.ops._grouped import _triton as triton
from gtp_jax.ops._grouped._contract import Problem
from gtp_jax.ops._grouped._hopper import HOPPER, HOPPER_FP8, HOPPER_TILES
from gtp_jax.ops._grouped._pallas import PALLAS
from gtp_jax.ops._grouped._table import pick
from gtp_jax.ops._grouped._xla import XLA

from ..hlo.programs import array, grouped_kernels, h200_mesh, needs_target
from .experts import groups_of

BLOCK = triton.Block(rows=16, columns=32, depth=16, warps=4, stages=2)
ON_CPU = {
    "xla": (XLA, {}),
    "pallas, interpreted": (triton, dict(block=BLOCK, interpret=True)),
}
# rows, in, out, groups, rows that belong to none; blocks of 16, 32 and 16 divide none, or all
CASES = [
    (77, 33, 70, 8, 9),
    pytest.param((40, 16, 48, 64, 0), marks=pytest.mark.slow),
    pytest.param((300, 96, 160, 4, 0), marks=pytest.mark.slow),
    pytest.param((5, 16, 16, 3, 5), marks=pytest.mark.slow),
]


@pytest.fixture
def on_cpu():
    """Computes on the CPU: on a GPU, matmuls of float32 are rounded to TF32 unless told otherwise."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def operands(rows, features, out, groups, none, dtype=np.float64):
    rng = np.random.default_rng([rows, features, out, groups])
    cuts = np.sort(rng.integers(0, rows - none + 1, groups - 1))
    sizes = np.diff(np.concatenate([[0], cuts, [rows - none]])).astype(np.int32)
    if groups > 2:  # an empty one, its rows left to its neighbour
        sizes[1], sizes[2] = 0, sizes[1] + sizes[2]
    shapes = ((rows, features), (groups, out, features), (rows, out))
    return jnp.asarray(sizes), *(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def gathered(weight, shards):
    """Kernels `(groups, out, in)` as a gather over so many ranks makes them."""
    groups, out, features = weight.shape
    return jnp.asarray(np.swapaxes(np.reshape(weight, (groups, shards, out // shards, features)), 0, 1))


def joined(weight):
    """`gathered`, back."""
    _, groups, _, features = weight.shape
    return np.swapaxes(weight, 0, 1).reshape(groups, -1, features)


def oracle(sizes, x, weight, gradient):
    """Result and gradients, group by group, in float64."""
    x, weight, gradient = (np.asarray(a, np.float64) for a in (x, weight, gradient))
    y, to_x, to_weight = np.zeros(gradient.shape), np.zeros(x.shape), np.zeros(weight.shape)
    for group, mine in enumerate(groups_of(sizes)):
        y[mine] = x[mine] @ weight[group].T
        to_x[mine] = gradient[mine] @ weight[group]
        to_weight[group] = gradient[mine].T @ x[mine]
    return y, to_x, to_weight


def assert_close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - b)
        assert error <= tolerance * np.linalg.norm(b), f"relative error {error / np.linalg.norm(b):.2e}"


@pytest.mark.parametrize("shards", others_full([1, 2], [2]))  # of 35 rows, which are no multiple of a block
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.usefixtures("on_cpu")
def test_kernels_multiply_each_row_with_its_own_groups_kernel(name, case, shards):
    kernels, options = ON_CPU[name]
    sizes, x, weight, gradient = operands(*case, dtype=np.float32)
    as_gathered = gathered(weight, shards)

    @jax.jit
    def run(x, weight, gradient):
        return (
            kernels.product(x, weight, sizes, dtype=x.dtype, transposed=True, **options),
            kernels.product(gradient, weight, sizes, dtype=x.dtype, transposed=False, **options),
            kernels.outer(gradient, x, sizes, shards=shards, dtype=x.dtype, **options),
        )

    *found, to_weight = run(x, as_gathered, gradient)
    assert_close((*found, joined(to_weight)), oracle(sizes, x, weight, gradient), 1e-6)


@pytest.mark.parametrize("shards", others_full([1, 4], [4]))
@pytest.mark.parametrize(
    "dtype, tolerance",
    others_full([("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 1e-2)], [("float64", 1e-14), ("bfloat16", 1e-2)]),
)
@pytest.mark.usefixtures("on_cpu")
def test_gradients_are_those_of_a_matmul_a_group(shards, dtype, tolerance, x64):
    sizes, x, weight, gradient = operands(90, 24, 64, 8, 3, dtype)
    as_gathered = gathered(weight, shards)

    @jax.jit
    def run(x, weight, gradient):
        y, backward = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="reference"), x, weight)
        return y, *backward(gradient)

    y, to_x, to_weight = run(x, as_gathered, gradient)
    assert y.dtype == to_x.dtype == to_weight.dtype == dtype
    found = (y, to_x, joined(to_weight))
    assert_close(found, oracle(sizes, x, weight, gradient), tolerance)


@pytest.mark.usefixtures("on_cpu")
def test_no_group_sees_what_is_not_finite_in_another():
    sizes, x, weight, gradient = operands(60, 16, 16, 4, 4, np.float32)
    last = int(sizes[0]) - 1
    x, gradient = np.array(x), np.array(gradient)
    x[last], gradient[-1] = np.nan, np.inf  # of group 0, and of none
    for kernels, options in ON_CPU.values():

        @jax.jit
        def run(x, gradient, kernels=kernels, options=options):
            y = kernels.product(x, weight[None], sizes, dtype=x.dtype, transposed=True, **options)
            return y, kernels.outer(gradient, x, sizes, shards=1, dtype=x.dtype, **options)

        y, to_weight = run(x, gradient)
        assert np.isnan(np.asarray(y)).any(axis=1).nonzero()[0].tolist() == [last]
        assert np.isnan(joined(to_weight)).any(axis=(1, 2)).tolist() == [True, False, False, False]


@pytest.mark.usefixtures("on_cpu")
def test_no_rows_have_an_empty_product_and_no_gradient():
    x, weight = jnp.zeros((0, 6)), jnp.ones((2, 3, 5, 6))

    @jax.jit
    def run(x, weight):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.zeros(3, jnp.int32)), x, weight)
        return y, *back(y)

    y, to_x, to_weight = run(x, weight)
    assert y.shape == (0, 10) and to_x.shape == x.shape
    np.testing.assert_array_equal(to_weight, np.zeros(weight.shape))


@pytest.mark.full
def test_sizes_beyond_the_rows_are_cut_off():
    _, x, weight, gradient = operands(60, 16, 16, 4, 0, np.float32)
    sizes = jnp.array([50, 30, 2, 7], jnp.int32)
    for kernels, options in ON_CPU.values():
        y = kernels.product(x, weight[None], sizes, dtype=x.dtype, transposed=True, **options)
        assert_close([y], oracle([50, 10, 0, 0], x, weight, gradient)[:1], 1e-6)


HALF, SINGLE = np.dtype(jnp.bfloat16), np.dtype(np.float32)
PICKED = [
    (Problem((2, 8, 64, 128), 100, HALF), HOPPER),
    (Problem((2, 8, 64, 128), 100, HALF, FP8_E4M3), HOPPER_FP8),
    (Problem((2, 8, 64, 128), 100, HALF, FP8_BLOCKS), HOPPER_TILES),
    (Problem((2, 8, 64, 120), 100, HALF, FP8_E4M3), HOPPER),  # 120 codes are no multiple of 16 bytes, 120 values are
    (Problem((2, 8, 60, 128), 100, HALF, FP8_BLOCKS), PALLAS),  # parts of 60 rows
    (Problem((2, 8, 64, 128), 100, SINGLE, FP8_E4M3), XLA),
    (Problem((2, 8, 64, 128), 0, HALF), XLA),
]


@pytest.mark.parametrize("problem, wanted", PICKED)
def test_the_first_implementation_that_takes_a_problem_is_picked(problem, wanted, monkeypatch):
    assert pick("grouped_matmul", "reference", problem) is XLA
    monkeypatch.setattr("gtp_jax.ops._grouped._contract.platform", lambda: "gpu")
    monkeypatch.setattr("gtp_jax.ops._grouped._hopper.supports_grouped_matmul", lambda: True)
    monkeypatch.setattr("gtp_jax.native.has", lambda *_: True)
    assert pick("grouped_matmul", None, problem) is wanted
    monkeypatch.setattr("gtp_jax.native.has", lambda *_: False)
    assert pick("grouped_matmul", None, problem) is (PALLAS if wanted is not XLA else XLA)


ROWS, FEATURES, OUT, GROUPS = 4096, 1024, 2048, 8


def compiled_for_h200(grad):
    mesh = h200_mesh(1)

    def run(x, weight, sizes, gradient):
        y, backward = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="native"), x, weight)
        return backward(gradient) if grad else y

    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    shapes = ((ROWS, FEATURES), (1, GROUPS, OUT, FEATURES), (GROUPS,), (ROWS, OUT))
    dtypes = (jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bfloat16)
    given = [array(mesh, shape, P(), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return jax.jit(mapped).lower(*given).compile(compiler_options={"xla_gpu_mock_custom_calls": True})


@needs_target
@pytest.mark.parametrize("grad, launches", others_full([(False, 1), (True, 2)], [(True, 2)]))
def test_on_h200_a_pass_is_one_kernel_a_product_without_a_dense_copy(grad, launches):
    compiled = compiled_for_h200(grad)
    text = compiled.as_text()
    assert grouped_kernels(text) == launches
    assert " dot(" not in text and "__cublas" not in text
    # a dense fallback copies the rows once for each group
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * ROWS * FEATURES


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(x=(4, 7)), ValueError, "`x` (4, 7) `weight` (1, 2, 6, 8) (rows, in)"),
        (dict(sizes=(3,)), ValueError, "`group_sizes` (3,) 2 groups"),
        (dict(kind=jnp.float32), TypeError, "`group_sizes` float32 int32"),
        (dict(dtype=jnp.bfloat16), TypeError, "`x` float32 `weight` bfloat16 cast"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, error, message):
    given = {"x": (4, 8), "sizes": (2,), "kind": jnp.int32, "dtype": jnp.float32, **change}
    weight = jnp.ones((1, 2, 6, 8), given["dtype"])
    with pytest.raises(error, match=naming(message)):
        grouped_matmul(
            jnp.ones(given["x"]), weight, jnp.ones(given["sizes"], given["kind"]), implementation="reference"
        )


# the last three are of sizes that Hopper's kernels take, of four shards too; the others are Pallas's
ON_GPUS = [*CASES, (2048, 320, 1000, 64, 100), (4096, 512, 768, 8, 0), (3000, 256, 672, 16, 50), (200, 72, 160, 24, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 5e-3), ("float16", 1e-3)])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("case", ON_GPUS, ids=str)
def test_gpus_multiply_each_row_with_its_own_groups_kernel(case, shards, dtype, tolerance):
    if case[2] % shards:
        pytest.skip(f"{shards} shards do not divide {case[2]}")
    sizes, x, weight, gradient = operands(*case, dtype)

    @jax.jit
    def run(x, weight, gradient):
        y, backward = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation="native"), x, weight)
        return y, *backward(gradient)

    y, to_x, to_weight = run(x, gathered(weight, shards), gradient)
    assert_close((y, to_x, joined(to_weight)), oracle(sizes, x, weight, gradient), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [60, 500, 4000])
def test_on_gpus_no_group_sees_what_is_not_finite_in_another(rows, dtype):
    sizes, x, weight, gradient = operands(rows, 64, 128, 4, 4, "bfloat16")
    last = int(sizes[0]) - 1
    x, gradient = x.at[last].set(np.nan), gradient.at[-1].set(np.inf)  # of group 0, and of none
    run = pick("grouped_matmul", "native", Problem(weight[None].shape, rows, x.dtype))
    y = run.product(x, weight[None], sizes, dtype=x.dtype, transposed=True)
    to_x = run.product(gradient, weight[None], sizes, dtype=x.dtype, transposed=False)
    to_weight = joined(run.outer(gradient, x, sizes, shards=1, dtype=np.dtype(dtype)))
    assert np.isnan(np.asarray(y, np.float32)).any(axis=1).nonzero()[0].tolist() == [last]
    assert np.isfinite(np.asarray(to_x, np.float32)).all()
    assert np.isnan(np.asarray(to_weight, np.float32)).any(axis=(1, 2)).tolist() == [True, False, False, False]


@pytest.mark.gpu
def test_on_gpus_sizes_beyond_the_rows_are_cut_off():
    _, x, weight, gradient = operands(600, 64, 128, 4, 0, "bfloat16")
    sizes = jnp.array([500, 300, 2, 7], jnp.int32)
    run = pick("grouped_matmul", "native", Problem(weight[None].shape, len(x), x.dtype))
    y = run.product(x, weight[None], sizes, dtype=x.dtype, transposed=True)
    to_weight = joined(run.outer(gradient, x, sizes, shards=1, dtype=np.dtype(np.float32)))
    wanted = oracle([500, 100, 0, 0], x, weight, gradient)
    assert_close([y, to_weight], [wanted[0], wanted[2]], 5e-3)
