"""Updates a state on the host while backward is computed, on each rank.

[Note: updates under backward] XLA may compute an update at any time after its gradient is known, and for large models
it computes all updates after backward. So the trace of backward is evaluated in steps: as soon as the gradients of a
layer are known, its parts are updated, and what backward computes next depends on the last of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ..mesh import Path
from ._evaluation import Evaluation, Slab
from ._known_at import Piece
from ._moved import Move, first_of
from ._streamed import Update

Tree = Any


class UnderBackward(NamedTuple):
    """An update of a state that is partly on the host, which does not wait for all gradients.

    Attributes:
        update: the update. Its scalars are `scalars(total, tokens)`.
        arrays: the arrays that it updates in parts, of each parameter.
        read: the scalars of the state that the parts read, by number of the argument.
        scalars: a function of the loss and the number of tokens.
        skipped: a function of the loss, the number of tokens and `skip`, which returns whether the arrays keep their
            values; `None` if they never do.
        skip: the argument of `skipped`.
    """

    update: Update
    arrays: list[list[jax.Array]]
    read: dict[int, jax.Array]
    scalars: Callable[[jax.Array, jax.Array | None], Tree]
    skipped: Callable[[jax.Array, jax.Array | None, jax.Array | None], jax.Array] | None
    skip: jax.Array | None

    @property
    def inputs(self) -> Tree:
        """The arrays that a rank needs, as a pytree."""
        return self.arrays, self.read, self.skip

    @property
    def specs(self) -> Tree:
        """The partitions of `inputs`."""
        return self.update.specs(), PartitionSpec(), PartitionSpec()

    def run(
        self, evaluation: Evaluation, gradients: Mapping[Path, Any], total: Any, tokens: Any, inputs: Tree
    ) -> list[list[jax.Array]]:
        """Evaluates backward, and returns the updated arrays of each parameter. Runs on each rank.

        Args:
            evaluation: the evaluation of the trace of backward.
            gradients: the variables of the gradients, by path of the parameter.
            total: the variable of the loss.
            tokens: the variable of the number of tokens, or `None`.
            inputs: the rank's parts of `inputs`.
        """
        arrays, read, skip = inputs
        known = evaluation.value(total), None if tokens is None else evaluation.value(tokens)
        slabs = [evaluation.slabs(gradients[path]) for path in self.update.paths]
        pieces = {
            path: tuple(Piece(slab.shape[0], (slab.at,)) for slab in own)
            for path, own in zip(self.update.paths, slabs, strict=True)
        }
        return self.update.run(
            _Gradients(evaluation, slabs, known[0]),
            pieces,
            arrays,
            # Otherwise XLA may fold constants among them into the update, and it would round differently.
            lax.optimization_barrier(self.update.common(read, self.scalars(*known), on_rank=True)),
            None if self.skipped is None else self.skipped(*known, skip),
            in_place=False,
        )


@dataclasses.dataclass(frozen=True)
class _Gradients:
    """Gradients that an evaluation computes when they are asked for; see `Gradients`.

    Attributes:
        evaluation: the evaluation.
        slabs: for each parameter, the slabs of its gradient.
        total: the loss, which depends on what forward reads of parameters whose gradients are constants.
    """

    evaluation: Evaluation
    slabs: Sequence[Sequence[Slab]]
    total: jax.Array

    def of(self, moves: Sequence[Move], place: int) -> tuple[jax.Array, list[jax.Array]]:
        (at,), number, part = moves[place]
        self.evaluation.until(at)
        rows = [math.prod(slab.shape[:-1]) for slab in self.slabs[number]]
        ends = list(itertools.accumulate(rows))
        n = bisect.bisect_right(ends, part.first)
        own = part._replace(first=part.first - ends[n] + rows[n])
        gradient = own.of(self.slabs[number][n].value())
        return gradient, [first_of(gradient), *([first_of(self.total)] if at < 0 else [])]

    def updated(self, moves: Sequence[Move], place: int, results: list[jax.Array]) -> list[jax.Array]:
        if place + 1 < len(moves) and moves[place + 1].at == moves[place].at:
            return results
        return self.evaluation.before_rest(results)
