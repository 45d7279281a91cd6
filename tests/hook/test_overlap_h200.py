"""XLA's schedule of a sharded GPT-2 of stock layers, compiled for eight H200s. No GPU is needed."""

import pytest

import gtp_jax as gtp
from gtp_jax import hlo

from .programs import HIDDEN, LAYERS, VOCAB, WIDTH, compiled

missing = hlo.missing_packages()
pytestmark = pytest.mark.skipif(bool(missing), reason=f"compiling for H200 needs {', '.join(missing)}")

MATRICES = [WIDTH * WIDTH] * 4 + [WIDTH * HIDDEN] * 2  # elements of the matrices of a block
TABLE = VOCAB * WIDTH  # elements of the embedding, and of the head
ELEMENTS = LAYERS * sum(MATRICES) + 2 * TABLE


def elements(shapes, dtype=""):
    """The number of elements of arrays of a dtype; by default of all, since XLA may gather several dtypes together."""
    return sum(shape.elements for shape in shapes if dtype in ("", shape.dtype))


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh", [(("gtp", 8),), pytest.param((("dp", 2), ("gtp", 4)), marks=pytest.mark.slow)], ids=str
)
def test_each_matrix_is_gathered_once_in_each_pass_and_reduced_once_under_matmuls(mesh):
    program = hlo.launch_order(compiled(degrees=mesh)[0])
    gathers, scatters = program.collectives("all-gather"), program.collectives("reduce-scatter")
    # one gather for all weights of a block; the table and the first block, which wait for nothing, share one
    assert len(gathers) == 2 * LAYERS + 1
    gathered = {"forward": 0, "backward": 0}
    for e in gathers:
        gathered[e.direction] += elements(e.collective.results)
    # backward of the lookup needs no table; backward begins with the head, whose gathered weight forward has kept
    assert gathered == {"forward": ELEMENTS, "backward": ELEMENTS - 2 * TABLE}
    assert sum(elements(e.collective.operands) for e in scatters) == ELEMENTS
    assert {e.collective.dtype for e in scatters} == {"bf16"}  # the dtype in which the layers compute
    # only biases and norms, the widest of which is the bias of `up`
    summed = [shape for e in program.collectives("all-reduce") for shape in e.shapes]
    assert all(shape.elements <= LAYERS * 10 * WIDTH for shape in summed)
    bare = {e.name for e in program.exposed("all-gather", "reduce-scatter")}
    # no computation precedes the embedding and the first block, or follows their gradients
    assert not bare & {e.name for e in gathers[2:]}
    assert len(scatters) > LAYERS  # none has more bytes than the gradients of one unit
    # those of one unit, and of what comes before the blocks, may end after all matmuls
    assert len(bare & {e.name for e in scatters[:-3]}) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["matmuls", "nothing"])
def test_temporaries_are_fewer_than_without_the_hook(remat):
    assert compiled(remat=remat)[1] < compiled(hook=False)[1]


# of each of 8 ranks: codes of half a byte, and a scale for every 256 of them
CODES = sum(MATRICES) // 8 // 2 + sum(MATRICES) // 8 // 256


@pytest.mark.full
def test_codes_of_a_block_are_made_once_and_gathered_under_the_block_before_it():
    program = hlo.launch_order(compiled(recipe=gtp.NVFP4())[0])
    gathers = program.collectives("all-gather")
    coded = [elements(e.collective.operands, "u8") for e in gathers]
    assert [size for size in coded if size] == [CODES] * 2 * LAYERS  # one gather a block and pass
    assert sum(elements(e.collective.results, "bf16") for e in gathers) == 2 * TABLE  # both excluded
    bare = {e.name for e in program.exposed("all-gather", "reduce-scatter")}
    assert not bare & {e.name for e in gathers[2:]}
    maxima = [elements(e.shapes) for e in program.collectives("all-reduce") if "pmax" in e.collective.op_name]
    assert maxima == [LAYERS * len(MATRICES)]


@pytest.mark.slow
def test_fp8_matmuls_are_one_call_each_and_codes_are_gathered_under_them():
    text, _ = compiled(recipe=gtp.FP8(matmuls=True))
    program = hlo.launch_order(text)
    # XLA joins some products of query, key and value, so that there are fewer than three of each matrix
    assert 2 * LAYERS * len(MATRICES) < text.count('custom_call_target="__cublas$lt$matmul$f8"')
    gathers = program.collectives("all-gather")
    codes = sum(elements(e.collective.operands, "u8") for e in gathers)
    assert codes == 2 * LAYERS * sum(MATRICES) // 8
    assert {e.collective.dtype for e in program.collectives("reduce-scatter")} == {"bf16"}
    bare = {e.name for e in program.exposed("all-gather")}
    assert not bare & {e.name for e in gathers[2:] if e.direction == "forward"}
