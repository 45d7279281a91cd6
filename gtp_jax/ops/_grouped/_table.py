"""The implementations of grouped matmuls, and the choice of one."""

from __future__ import annotations

from .._implementation import Implementation, choose
from ._contract import GroupedMatmul, Problem
from ._hopper import HOPPER, HOPPER_FP8, HOPPER_TILES
from ._pallas import PALLAS
from ._xla import XLA

# The first that lacks nothing is taken. PALLAS takes every problem that has kernels, and XLA every problem.
TABLE = (HOPPER_TILES, HOPPER_FP8, HOPPER, PALLAS, XLA)


def pick(operation: str, implementation: Implementation | None, problem: Problem) -> GroupedMatmul:
    """Returns the implementation of a problem.

    Args:
        operation: the name of the operation, for messages.
        implementation: as in `grouped_matmul`.
        problem: what is to be computed. If no implementation multiplies its codes, the values of codes are multiplied.

    Raises:
        ValueError, NotImplementedError: as in `choose`.
    """
    rows = [row for row in TABLE if row.codes in (None, problem.codes)]
    chosen = choose(operation, implementation, rows, problem)
    return chosen if problem.rows else XLA  # kernels do not copy empty arrays
