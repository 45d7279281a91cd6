"""Quantizes and gathers the weights of one call, and reduces their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ..chain import together
from ..mesh import current_view
from ..weights import Scaling, Wire, straight_through
from ._codes import Coded, decode, encode
from ._exchange import Exchange, exchange
from ._movement import gather, gather_on_ranks, scatter
from ._parts import cast
from ._placement import Placement


@dataclasses.dataclass(frozen=True)
class Weights:
    """How the weights of one call are gathered, and how their gradients are reduced.

    Attributes:
        placements: the placement of each weight.
        coded: how each weight is quantized for its gather; `None` for a weight that is not quantized.
        exchanged: how the gradients that ranks have of each weight are summed by the hook; `None` for a weight whose
            gradient XLA sums.
        casts: the dtype in which each weight is gathered or decoded; `None` for the weight's own dtype.
    """

    placements: tuple[Placement, ...]
    coded: tuple[Coded | None, ...]
    exchanged: tuple[Exchange | None, ...]
    casts: tuple[np.dtype | None, ...]

    def encode(
        self, shards: Sequence[Any], made: Sequence[Wire], scaling: Sequence[Scaling | None]
    ) -> tuple[Wire, ...]:
        """Returns the codes of all quantized weights, as wires: the codes that the step has made, and new codes of the
        weights for which it has made none.

        Args:
            shards: the shards of the weights.
            made: the codes that the step has made, as wires. A member of a wire is named `(number,)`, after its weight.
            scaling: the scaling of each weight by amaxes of earlier steps; `None` for a weight that is scaled by its
                own.
        """
        done = {number for wire in made for (number,) in wire.members}
        left = [None if number in done else own for number, own in enumerate(self.coded)]
        amaxes = [None if one is None else one.of_weight for one in scaling]
        return (*made, *encode(shards, left, self._dtypes(shards), amaxes))

    def sent(self, shards: Sequence[Any]) -> list[jax.Array]:
        """Returns the shards of the weights that are not quantized, in the dtypes in which they are gathered. A barrier
        makes XLA write cast shards to memory once. Otherwise, XLA could cast them again for each gather."""
        plain = self._plain
        found = cast([shards[i] for i in plain], [self.casts[i] for i in plain])
        made = [n for n, i in enumerate(plain) if self.casts[i] is not None]
        for n, one in zip(made, together([found[n] for n in made])[0], strict=True):
            found[n] = one
        return found

    def gather(self, shards: Sequence[Any], sent: Sequence[Any], wires: Sequence[Wire]) -> list[jax.Array]:
        """Returns the gathered weights. Their derivatives with respect to the shards are those of weights that are
        gathered as they are. Second derivatives need this, because they differentiate the gather.

        Args:
            shards: the shards of the weights.
            sent: what `sent` returned.
            wires: what `encode` returned.
        """
        dtypes = self._dtypes(shards)
        like = [jax.ShapeDtypeStruct(shard.shape, shard.dtype) for shard in shards]  # so that the rule holds no arrays

        def make(given: tuple[Sequence[Any], tuple[Wire, ...]]) -> dict[int, jax.Array]:
            sent, wires = given
            placements = [self.placements[i] for i in self._plain]
            found = dict(zip(self._plain, gather_on_ranks(sent, placements), strict=True))
            return found | (decode(wires, like, self.coded, dtypes, self.placements) if wires else {})

        moved = lambda i, own: gather(own.astype(dtypes[i]), self.placements[i])  # noqa: E731
        found = straight_through(dict(enumerate(shards)), (list(sent), tuple(wires)), make, moved)
        return [found[i] for i in range(len(shards))]

    def reduce(
        self, gradients: Mapping[int, jax.Array], apart: Mapping[int, jax.Array], axes: tuple[str, ...]
    ) -> dict[int, jax.Array]:
        """Returns the gradients of shards, by the numbers of the weights.

        Args:
            gradients: the gradients of gathered weights, by number.
            apart: in global view, the gradients of weights, or a part of them, kept apart by rank. They are summed over
                ranks, and then added to those in `gradients`; see [Note: one gradient per rank].
            axes: the axes of the mesh that shard the batch.
        """
        sent = apart if current_view() == "global" else gradients
        found = exchange(sent, self.exchanged, self.placements, axes)
        for i, gradient in gradients.items():
            if sent is apart or i not in found:
                own = scatter(gradient, self.placements[i])
                found[i] = own if i not in found else own.astype(found[i].dtype) + found[i]
        return found

    @property
    def _plain(self) -> list[int]:
        return [i for i, coded in enumerate(self.coded) if coded is None]

    def _dtypes(self, shards: Sequence[Any]) -> list[np.dtype]:
        return [np.dtype(s.dtype) if own is None else own for s, own in zip(shards, self.casts, strict=True)]


def gather_once(
    weights: Weights, shards: Sequence[Any], made: Sequence[Wire], scaling: Sequence[Scaling | None]
) -> list[jax.Array]:
    """Returns gathered weights. Backward does not gather them again, unless a `jax.checkpoint` around the call
    recomputes them. Backward reduces their gradients to the gradients of the shards.

    Args:
        weights: how the weights are gathered, and how their gradients are reduced.
        shards: the shards of the weights.
        made: as in `Weights.encode`.
        scaling: as in `Weights.encode`.
    """

    dtypes = [shard.dtype for shard in shards]

    @jax.custom_vjp
    def apply(shards: list[Any], codes: list[Any]) -> list[jax.Array]:
        return weights.gather(shards, weights.sent(shards), jax.tree.unflatten(tree, codes))

    def forward(shards: list[Any], codes: list[Any]) -> tuple[list[jax.Array], None]:
        return apply(shards, codes), None

    def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array], None]:
        found = weights.reduce(dict(enumerate(gradients)), {}, ())
        return [found[i].astype(dtype) for i, dtype in enumerate(dtypes)], None

    apply.defvjp(forward, backward)
    codes, tree = jax.tree.flatten(weights.encode(shards, made, scaling))
    return apply(list(shards), codes)
