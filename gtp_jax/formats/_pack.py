"""The wire format of a layer: where the codes and scales of each weight are in one buffer of bytes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter

from ._array import codes_shape, scales_shape
from ._spec import Format

# Every section of a buffer starts at a multiple of this, and so does the end of the buffer, so that the sections of a
# gathered buffer are aligned for a GPU's widest loads.
SECTION_BYTES = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """The shard of one weight of a layer.

    Attributes:
        rows: the number of rows of a shard, padding included. If there are several shards, it is a multiple of the rows
            of the format's block, so that no block straddles two shards.
        cols: the contraction size. Blocks run along it.
        transposed: whether the shard is stored as `(cols, rows)` instead of `(rows, cols)`.
        total_rows: the number of logical rows of all shards together. Rows beyond it are padding, and are stripped.
        out: the number of the output array that the piece becomes part of.
        out_row: the row of that output at which the piece starts; in a plan with `by_shard`, the row within one shard's
            part of that output.
        source: `(array, index)`: which of the arrays passed to `pack` holds the piece, and at which index along its
            first dimension, as for one expert of several. `None` if each piece is an array of its own, in the order of
            the pieces.
    """

    rows: int
    cols: int
    transposed: bool
    total_rows: int
    out: int
    out_row: int
    source: tuple[int, int] | None = None

    @property
    def stored(self) -> tuple[int, int]:
        """The shape of a shard as stored."""
        return (self.cols, self.rows) if self.transposed else (self.rows, self.cols)


@dataclasses.dataclass(frozen=True)
class Section:
    """A range of bytes in a buffer, which holds a uint8 matrix.

    Attributes:
        start: the offset of the first byte.
        shape: the shape of the matrix.
    """

    start: int
    shape: tuple[int, int]

    @property
    def bytes(self) -> int:
        """The length in bytes, without the padding up to the next section."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class PackPlan:
    """How the weights of one layer share a buffer: the codes of all pieces in order, then the scales of all pieces.

    The pieces of an output are contiguous: in order of `out_row`, each starts where the previous one ends. The amax is
    not sent, because it is the same on every rank.

    Attributes:
        pieces: the pieces, one per weight.
        by_shard: whether an output is ordered by shard, each shard with the rows of all its pieces, padding included,
            as a gather of unquantized weights would leave them. Otherwise it is ordered by piece, without padding. In a
            plan with `by_shard`, the `total_rows` of each piece is its `rows`.

    Raises:
        TypeError: if a number of a piece is not an integer.
        ValueError: if a number is negative, or the pieces do not form whole outputs or whole source arrays.
    """

    pieces: tuple[Piece, ...]
    by_shard: bool = False

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError("`pieces` is empty; a plan has at least one piece.")
        for index, piece in enumerate(self.pieces):
            for name in ("rows", "cols", "total_rows", "out", "out_row"):
                number = getattr(piece, name)
                if not hasattr(number, "__index__"):
                    raise TypeError(f"piece {index}: `{name}` is {number!r}; it must be an integer.")
                if number < 0:
                    raise ValueError(f"piece {index}: `{name}` is {number}; it must be 0 or more.")
            if self.by_shard and piece.total_rows != piece.rows:
                raise ValueError(
                    f"piece {index}: `total_rows` is {piece.total_rows}, but with `by_shard` nothing is stripped; it "
                    f"must be {piece.rows}, the rows of a shard."
                )
        outs = sorted({piece.out for piece in self.pieces})
        if outs != list(range(len(outs))):
            raise ValueError(
                f"the outputs of the pieces are {outs}; number the outputs 0, 1, 2 and so on, without gaps."
            )
        for out in outs:
            self._check_output(out)
        self._check_sources()

    def _check_sources(self) -> None:
        named = [index for index, piece in enumerate(self.pieces) if piece.source is not None]
        if not named:
            return
        if len(named) < len(self.pieces):
            raise ValueError(
                f"piece {named[0]} has a `source`, but not every piece does; give one to all of them, or to none."
            )
        held = sorted(self.sources)
        counts = Counter(array for array, _ in held)
        if held != [(array, index) for array in range(len(counts)) for index in range(counts[array])]:
            raise ValueError(
                f"the `(array, index)` sources of the pieces are {held}; number the arrays 0, 1, 2 and so on, without "
                "gaps, and the pieces within each array the same way."
            )
        for index, piece in enumerate(self.pieces):
            shape = self.arrays[self.sources[index][0]][1:]
            if piece.stored != shape:
                raise ValueError(
                    f"piece {index} is stored with shape {piece.stored}, but the other pieces of its array have shape "
                    f"{shape}. All pieces of an array must have the same shape."
                )

    def _check_output(self, out: int) -> None:
        members = self.members(out)
        row = 0
        for index in members:
            piece = self.pieces[index]
            if piece.out_row != row:
                raise ValueError(
                    f"piece {index} starts at row {piece.out_row} of output {out}, but the pieces before it end at row "
                    f"{row}. Set `out_row` to the sum of `total_rows` of the pieces before it."
                )
            if piece.cols != self.pieces[members[0]].cols:
                raise ValueError(
                    f"pieces {members[0]} and {index} have {self.pieces[members[0]].cols} and {piece.cols} columns, "
                    f"but share output {out}. All pieces of an output must have the same `cols`."
                )
            row += piece.total_rows

    @property
    def sources(self) -> tuple[tuple[int, int], ...]:
        """For each piece, the number of the array that holds it, and its index in that array."""
        return tuple((index, 0) if piece.source is None else piece.source for index, piece in enumerate(self.pieces))

    @functools.cached_property
    def arrays(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays that `pack` takes: `(pieces, *stored)`, or `stored` if each piece is an array."""
        if self.pieces[0].source is None:
            return tuple(piece.stored for piece in self.pieces)
        counts = Counter(array for array, _ in self.sources)
        first = {array: self.pieces[number].stored for number, (array, index) in enumerate(self.sources) if index == 0}
        return tuple((counts[array], *first[array]) for array in sorted(counts))

    def members(self, out: int) -> tuple[int, ...]:
        """Returns the indices of the pieces that form an output, from its first row to its last."""
        indices = [index for index, piece in enumerate(self.pieces) if piece.out == out]
        return tuple(sorted(indices, key=lambda index: (self.pieces[index].out_row, self.pieces[index].total_rows)))

    def outputs(self, shards: int) -> tuple[tuple[int, int], ...]:
        """Returns the shape `(rows, cols)` of each output, for this number of shards."""
        times = shards if self.by_shard else 1
        return tuple(
            (times * sum(self.pieces[index].total_rows for index in members), self.pieces[members[0]].cols)
            for members in map(self.members, range(len({piece.out for piece in self.pieces})))
        )

    def sections(self, format: Format) -> tuple[tuple[Section, Section | None], ...]:
        """Returns the sections of the codes and the scales of each piece in the buffer of one shard."""
        return self._lay_out(format)[0]

    def bytes(self, format: Format) -> int:
        """Returns the length of the buffer of one shard in bytes, a multiple of 16."""
        return self._lay_out(format)[1]

    def _lay_out(self, format: Format) -> tuple[tuple[tuple[Section, Section | None], ...], int]:
        end = 0

        def section(shape: tuple[int, int]) -> Section:
            nonlocal end
            placed = Section(end, shape)
            end += -(-placed.bytes // SECTION_BYTES) * SECTION_BYTES
            return placed

        matrices = [(piece.rows, piece.cols) for piece in self.pieces]
        codes = [section(codes_shape(format, matrix, False)) for matrix in matrices]
        shapes = [scales_shape(format, matrix, False) for matrix in matrices]
        scales = [None if shape is None else section(shape) for shape in shapes]
        return tuple(zip(codes, scales, strict=True)), end
