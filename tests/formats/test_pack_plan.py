"""The layout of a layer's buffer: exact bytes, aligned sections, whole outputs."""

import pytest

from gtp_jax.formats import FORMATS, PackPlan, Piece

every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)


def piece(**changes) -> Piece:
    facts = {"rows": 64, "cols": 128, "transposed": False, "total_rows": 100, "out": 0, "out_row": 0} | changes
    return Piece(**facts)


PLAN = PackPlan((piece(), piece(rows=32, cols=33, total_rows=50, out=1, transposed=True), piece(out_row=100)))


@every_format
def test_bytes_of_aligned_pieces_are_elements_times_bytes_per_element(format):
    plan = PackPlan((piece(), piece(out_row=100)))
    # a scale section of fewer than 16 bytes would be padded; these are 32 and more
    assert plan.bytes(format) == 2 * 64 * 128 * format.bytes_per_element


# codes 64 x 128, 32 x 33, 64 x 128 (half of it, 17 bytes a row, in FP4), then scales; each rounded up to 16
BYTES = {
    "NVFP4": 4096 + 544 + 4096 + 32 + 16 + 32,
    "NVFP4_1D": 4096 + 544 + 4096 + 512 + 96 + 512,
    "MXFP8": 8192 + 1056 + 8192 + 256 + 64 + 256,
    "FP8_E4M3": 8192 + 1056 + 8192,
    "FP8_E5M2": 8192 + 1056 + 8192,
}


@every_format
def test_bytes_are_exact(format):
    assert PLAN.bytes(format) == BYTES[format.name]


@every_format
def test_sections_are_aligned_and_do_not_overlap(format):
    sections = PLAN.sections(format)
    flat = [codes for codes, _ in sections] + [scales for _, scales in sections if scales is not None]
    end = 0
    for section in flat:
        assert section.start % 16 == 0 and end <= section.start < end + 16
        end = section.start + section.bytes
    assert end <= PLAN.bytes(format) < end + 16


def test_outputs_are_the_logical_rows_of_their_pieces():
    assert PLAN.outputs(2) == ((200, 128), (50, 33))


def test_pieces_of_an_output_come_in_order_of_their_rows():
    plan = PackPlan((piece(out_row=100), piece()))
    assert plan.members(0) == (1, 0)


def test_arrays_hold_pieces_wherever_they_go():
    turns = [piece(source=(0, 0)), piece(source=(1, 0), out_row=100, transposed=True)]
    turns += [piece(source=(0, 1), out_row=200), piece(source=(1, 1), out_row=300, transposed=True)]
    assert PackPlan(tuple(turns)).arrays == ((2, 64, 128), (2, 128, 64))
    assert PLAN.arrays == ((64, 128), (33, 32), (64, 128))


def test_plans_are_equal_and_hash_by_value():
    assert PackPlan((piece(),)) == PackPlan((piece(),)) and len({PackPlan((piece(),)), PackPlan((piece(),))}) == 1


BROKEN = {
    "empty": ((), "`pieces` is empty; a plan has at least one piece"),
    "negative": ((piece(rows=-1),), "piece 0: `rows` is -1; it must be 0 or more"),
    "outputs": ((piece(out=1),), r"the outputs of the pieces are \[1\]; number the outputs 0, 1, 2"),
    "gap": (
        (piece(), piece(out_row=99)),
        "piece 1 starts at row 99 of output 0, but the pieces before it end at row 100",
    ),
    "sources": (
        (piece(source=(0, 0)), piece(out_row=100)),
        "piece 0 has a `source`, but not every piece does; give one to all of them, or to none",
    ),
    "array": ((piece(source=(1, 0)),), r"sources of the pieces are \[\(1, 0\)\]; number the arrays 0, 1, 2"),
    "twice": (
        (piece(source=(0, 0)), piece(source=(0, 0), out_row=100)),
        r"sources of the pieces are \[\(0, 0\), \(0, 0\)\]; .* the pieces within each array the same way",
    ),
    "shapes": (
        (piece(source=(0, 0)), piece(source=(0, 1), out_row=100, rows=32)),
        r"piece 1 is stored with shape \(32, 128\), but the other pieces of its array have shape \(64, 128\)",
    ),
    "cols": ((piece(), piece(cols=64, out_row=100)), "pieces 0 and 1 have 128 and 64 columns, but share output 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_pieces_that_make_no_whole_are_refused(name):
    pieces, message = BROKEN[name]
    with pytest.raises(ValueError, match=message):
        PackPlan(pieces)


def test_numbers_of_a_piece_are_integers():
    with pytest.raises(TypeError, match=r"piece 0: `rows` is 32\.0; it must be an integer"):
        PackPlan((piece(rows=32.0),))
