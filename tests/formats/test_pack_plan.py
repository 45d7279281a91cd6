"""The layout of a layer's buffer: exact bytes, aligned sections, whole outputs."""

import pytest
from messages import naming

from gtp_jax.formats import FORMATS, PackPlan, Piece

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)


def piece(**changes) -> Piece:
    facts = {"rows": 64, "cols": 128, "transposed": False, "total_rows": 100, "out": 0, "out_row": 0} | changes
    return Piece(**facts)


PLAN = PackPlan((piece(), piece(rows=32, cols=33, total_rows=50, out=1, transposed=True), piece(out_row=100)))


# codes 64 x 128, 32 x 33, 64 x 128 (half of it, 17 bytes a row, in FP4), then scales; each rounded up to 16
BYTES = {
    "NVFP4": 4096 + 544 + 4096 + 32 + 16 + 32,
    "NVFP4_1D": 4096 + 544 + 4096 + 512 + 96 + 512,
    "MXFP8": 8192 + 1056 + 8192 + 256 + 64 + 256,
    "FP8_E4M3": 8192 + 1056 + 8192,
    "FP8_E5M2": 8192 + 1056 + 8192,
}


@every_format
def test_bytes_are_exact_and_sections_are_aligned_and_do_not_overlap(format):
    assert PLAN.bytes(format) == BYTES[format.name]
    sections = PLAN.sections(format)
    end = 0
    for section in [codes for codes, _ in sections] + [scales for _, scales in sections if scales is not None]:
        assert section.start % 16 == 0 and end <= section.start < end + 16
        end = section.start + section.bytes
    assert end <= PLAN.bytes(format) < end + 16


def test_outputs_are_the_logical_rows_of_their_pieces_in_order():
    assert PLAN.outputs(2) == ((200, 128), (50, 33))
    assert PackPlan((piece(out_row=100), piece())).members(0) == (1, 0)


def test_arrays_hold_pieces_wherever_they_go():
    turns = [piece(source=(0, 0)), piece(source=(1, 0), out_row=100, transposed=True)]
    turns += [piece(source=(0, 1), out_row=200), piece(source=(1, 1), out_row=300, transposed=True)]
    assert PackPlan(tuple(turns)).arrays == ((2, 64, 128), (2, 128, 64))
    assert PLAN.arrays == ((64, 128), (33, 32), (64, 128))


BROKEN = {  # what the message must name: the pieces
    "`pieces` empty": (),
    "piece 0 `rows` -1 0": (piece(rows=-1),),
    "[1] 0, 1, 2": (piece(out=1),),
    "piece 1 99 output 0 100": (piece(), piece(out_row=99)),
    "piece 0 `source`": (piece(source=(0, 0)), piece(out_row=100)),
    "sources [(1, 0)]": (piece(source=(1, 0)),),
    "sources [(0, 0), (0, 0)] within": (piece(source=(0, 0)), piece(source=(0, 0), out_row=100)),
    "piece 1 (32, 128) (64, 128)": (piece(source=(0, 0)), piece(source=(0, 1), out_row=100, rows=32)),
    "pieces 0 1 128 64 output": (piece(), piece(cols=64, out_row=100)),
}


@pytest.mark.parametrize("named", BROKEN)
def test_pieces_that_make_no_whole_are_refused(named):
    with pytest.raises(ValueError, match=naming(named)):
        PackPlan(BROKEN[named])


def test_numbers_of_a_piece_are_integers():
    with pytest.raises(TypeError, match=naming("piece 0 `rows` 32.0 integer")):
        PackPlan((piece(rows=32.0),))
