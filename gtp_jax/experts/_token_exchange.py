"""Describes, for `inspect`, the tokens that travel to experts of other ranks."""

from __future__ import annotations

import dataclasses
import math

from flax import nnx

from ..formats import Format
from ..mesh import degree
from ..nn import StackedLayers, groups_of
from ..recipes import Recipe
from ..weights import Groups, Layers, ModulePath
from ._exchange import places_of_round, worst_case
from ._moe import MoE
from ._traffic import Traffic, token_bytes, traffic_of_layer
from ._transports import Transport, choose_transport


@dataclasses.dataclass(frozen=True)
class TokenExchange:
    """How the tokens of a `MoE` travel to experts of other ranks, and how many rows are multiplied.

    Attributes:
        module: the path of the `MoE` in the model, and the layers concerned if the layers of a stack differ.
        axis: the mesh axis whose ranks divide the experts.
        ranks: the number of these ranks.
        transport: how tokens travel.
        tokens: the number of tokens per rank each time the layer runs.
        chunks: the number of chunks in which tokens travel.
        round_rows: how many rows of a chunk a rank's experts multiply at once; the outputs of these matmuls may be
            saved for backward.
        worst_rows: how many rows of a chunk a rank multiplies, in several rounds, if every token chooses as many of its
            experts as it can.
        arrived_bytes: the bytes of the transient array in which a chunk's partial sums arrive, or its tokens if they do
            not travel as codes.
        dispatched_bytes: the bytes that leave a rank in the dispatches of all chunks, if all experts are equally
            likely; with groups of experts and `ragged`, an upper bound.
        traffic: everything that a rank sends, in both passes.
    """

    module: str
    axis: str
    ranks: int
    transport: Transport
    tokens: int
    chunks: int
    round_rows: int
    worst_rows: int
    arrived_bytes: int
    dispatched_bytes: int
    traffic: tuple[Traffic, ...]

    @property
    def rounds(self) -> int:
        """The most rounds that a chunk can take. Evenly loaded experts take one if `round_size` is at least 1."""
        return -(-self.worst_rows // self.round_rows)


def exchanges(model: nnx.Module, recipe: Recipe | None = None, *, tokens: int) -> tuple[TokenExchange, ...]:
    """Returns how tokens travel in each `MoE` whose experts are divided among ranks.

    Args:
        model: the model, which may be abstract.
        recipe: the recipe of the step; if experts multiply in FP8 (also in blocks) or MXFP8, tokens travel as codes.
        tokens: the number of tokens per microbatch of one rank of the axes that shard the batch.
    """
    groups = groups_of(model, recipe)
    # a module outside of any stack is assumed to be differentiated without remat
    stacks = {path: module for path, module in nnx.iter_modules(model) if isinstance(module, StackedLayers)}
    found = []
    for path, module in nnx.iter_modules(model):
        axis = module.roles.experts if isinstance(module, MoE) else None
        if not isinstance(module, MoE) or axis is None or degree(axis) == 1:
            continue
        remat = [getattr(stack, "remat", None) for at, stack in stacks.items() if path[: len(at)] == at]
        of_layers = _formats(groups, (*path, "up"))
        for form in dict.fromkeys(of_layers.values()):
            parts = [layers for layers, own in of_layers.items() if own is form]
            name = ".".join(map(str, path)) + ("" if len(parts) == len(of_layers) else _numbers(parts))
            found.append(_exchange_of(module, name, axis, tokens, form, keeps_shares=remat in ([], ["everything"])))
    return tuple(found)


def _formats(groups: Groups, path: ModulePath) -> dict[Layers, Format | None]:
    """Returns, for each range of layers, the format of the codes in which tokens travel to the experts; `None` if they
    travel in the compute dtype."""
    operands = {layers: group.operands for (at, layers), group in groups.items() if at == path}
    return {
        layers: own.activation if own is not None and own.rounds_input_once else None
        for layers, own in operands.items()
    }


def _numbers(parts: list[Layers]) -> str:
    ranges = (f"{one.start}" if one.stop == one.start + 1 else f"{one.start}-{one.stop - 1}" for one in parts)
    return f" (layers {', '.join(ranges)})"


def _exchange_of(
    module: MoE, name: str, axis: str, tokens: int, form: Format | None, *, keeps_shares: bool
) -> TokenExchange:
    own = tokens // (degree(module.roles.tensor) if module.divides_sequence(3) else 1)
    ranks, experts = degree(axis), module.up.own_experts
    chunks = math.gcd(own, module.exchange_chunks)
    sizes = own // chunks, module.top_k, ranks, experts
    transport = choose_transport(axis, module.transport)
    width, number = module.up.in_features, module.up.dtype.itemsize
    none = math.comb(module.num_experts - experts, module.top_k) / math.comb(module.num_experts, module.top_k)
    # the fraction of tokens that go to a given rank; an upper bound with groups, which limit how many ranks a token
    # reaches
    travels = 1.0 if transport != "ragged" else min(1 - none, module.most_ranks / ranks)
    rows = (ranks - 1) * own * travels
    return TokenExchange(
        module=name,
        axis=axis,
        ranks=ranks,
        transport=transport,
        tokens=own,
        chunks=chunks,
        round_rows=places_of_round(*sizes, module.round_size),
        worst_rows=worst_case(*sizes),
        arrived_bytes=ranks * (own // chunks) * width * number,
        dispatched_bytes=int(rows * token_bytes(width, number, form)),
        traffic=traffic_of_layer(
            ranks=ranks,
            transport=transport,
            tokens=own,
            top_k=module.top_k,
            chunks=chunks,
            rows=rows,
            width=width,
            itemsize=number,
            form=form,
            keeps_shares=keeps_shares,
        ),
    )
