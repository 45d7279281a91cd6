"""Defines mixtures of experts for the FSDP2 contender, with `torch._grouped_mm` or torchao's grouped FP8 matmuls.

Without expert parallelism, every rank multiplies its own tokens by gathered experts. All shapes are static, so a block
is compiled as a whole. With expert parallelism, the ranks divide the experts, and all-to-alls send tokens to the ranks
of their experts and back. As in torchtitan, the host must know the split sizes of these all-to-alls, so the parts
between them are compiled separately.

In both passes, rows are moved to their places and back by gathers, because the backward of autograd's gather would
scatter row by row.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from workload import Workload

# The multiple to which the rows of each group are padded. In the gradient of FP8 experts, the columns of a group must
# begin at a multiple of 16 bytes. In bfloat16, no operand's contiguous dimension is divided into groups.
ALIGNMENT = {"bf16": 1, "fp8": 16}

GroupedMatmul = Callable[..., torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Places:
    """The places of rows that are sorted by expert.

    Attributes:
        ends: int32, the end of each expert's rows, including padding.
        source: the row at each place; the number of rows if there is none.
        place: the place of each row.
    """

    ends: torch.Tensor
    source: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, place: torch.Tensor, ends: torch.Tensor, alignment: int) -> Places:
        """Returns the places of rows.

        Args:
            place: the place of each row.
            ends: the end of each expert's rows, including padding.
            alignment: the multiple to which the rows of each group are padded.
        """
        rows = place.shape[0]
        numbers = torch.arange(rows, device=place.device)
        # the host does not know the sizes of groups, so this leaves room for the largest padding
        most = rows if alignment == 1 else (rows + (alignment - 1) * ends.shape[0]) // alignment * alignment
        source = torch.full((most,), rows, device=place.device)
        return cls(ends.to(torch.int32), source.scatter(0, place, numbers), place)


def sorted_places(expert_of: torch.Tensor, sizes: torch.Tensor, alignment: int) -> Places:
    """Returns the places of rows that are in any order. `sizes` has the number of rows of each expert."""
    order = torch.argsort(expert_of, stable=True)
    ends, shift = _ends_and_shift(sizes, torch.cumsum(sizes, 0) - sizes, alignment)
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    return Places.of(place + shift[expert_of] if alignment > 1 else place, ends, alignment)


def arrived_places(counts: torch.Tensor, rows: int, alignment: int) -> Places:
    """Returns the places of rows that came from several ranks, and are sorted by expert for each rank.

    Args:
        counts: `(ranks, experts)`, the number of rows from each rank for each expert.
        rows: the sum of `counts`, on the host.
        alignment: the multiple to which the rows of each group are padded.
    """
    flat = counts.flatten()
    begins = (torch.cumsum(flat, 0) - flat).view_as(counts)
    earlier = torch.cumsum(counts, 0) - counts  # rows of the same expert from lower ranks
    ends, shift = _ends_and_shift(counts.sum(0), begins - earlier, alignment)
    place = torch.arange(rows, device=counts.device) + shift.flatten().repeat_interleave(flat, output_size=rows)
    return Places.of(place, ends, alignment)


def _ends_and_shift(sizes: torch.Tensor, begins: torch.Tensor, alignment: int) -> tuple[torch.Tensor, torch.Tensor]:
    padded = (sizes + alignment - 1) // alignment * alignment
    ends = torch.cumsum(padded, 0)
    return ends, ends - padded - begins


def _rows_at(x: torch.Tensor, source: torch.Tensor, top_k: int, rows: int, padded: bool) -> torch.Tensor:
    """Returns `x[source // top_k]`, with zeros where there is no source row."""
    if not padded:
        return x[source // top_k]
    found = x[source.clamp(max=rows - 1) // top_k]
    return torch.where((source < rows)[:, None], found, torch.zeros((), dtype=x.dtype, device=x.device))


class Spread(torch.autograd.Function):
    """Copies each token to the places of its `top_k` choices: `(tokens, features)` to `(places, features)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor, top_k: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.top_k = top_k
        return _rows_at(x, source, top_k, place.shape[0], source.shape[0] != place.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (place,) = ctx.saved_tensors
        by_choice = gradient[place]
        if ctx.top_k > 1:
            by_choice = by_choice.view(-1, ctx.top_k, gradient.shape[1]).sum(1)
        return by_choice, None, None, None


class Collect(torch.autograd.Function):
    """Brings rows back from their places: `(places, features)` to `(rows, features)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, place)
        return x[place]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        source, place = ctx.saved_tensors
        return _rows_at(gradient, source, 1, place.shape[0], source.shape[0] != place.shape[0]), None, None


class WithTerm(torch.autograd.Function):
    """Returns routing weights unchanged. Backward treats `weight` times `term` as if it were part of the loss."""

    @staticmethod
    def forward(ctx: Any, shares: torch.Tensor, term: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return shares.view_as(shares)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, gradient.new_full((), ctx.weight), None


@dataclasses.dataclass(frozen=True)
class Splits:
    """The numbers of rows that are sent to each rank of a group (`there`), and received from each (`back`)."""

    there: list[int]
    back: list[int]
    group: Any

    def reversed(self) -> Splits:
        """Returns the splits with which rows are sent back."""
        return Splits(self.back, self.there, self.group)


class Travel(torch.autograd.Function):
    """Sends rows to the ranks of a group; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: Splits) -> torch.Tensor:
        ctx.splits = splits
        arrived = x.new_empty(sum(splits.back), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), splits.back, splits.there, group=splits.group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Travel.apply(gradient, ctx.splits.reversed()), None


def exchange_counts(sizes: torch.Tensor, ranks: int, group: Any) -> tuple[torch.Tensor, Splits]:
    """Returns the number of rows from each rank for each local expert, `(ranks, experts)`, and the splits, for which
    the host waits."""
    sent = sizes.view(ranks, -1)
    counts = torch.empty_like(sent)
    dist.all_to_all_single(counts, sent, group=group)
    there, back = torch.stack([sent.sum(1), counts.sum(1)]).tolist()
    return counts, Splits(there, back, group)


def _of_any_length(x: torch.Tensor) -> torch.Tensor:
    """Returns the array, marked so that compiled functions accept any length from the first call on."""
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


class Experts(nn.Module):
    """The experts of a rank: SwiGLU, with gate and up in one matmul, on rows sorted by expert.

    The kernels are `(experts, out, in)` and are transposed when they are multiplied: both grouped matmuls accept this
    layout without a copy.
    """

    def __init__(self, work: Workload, multiply: GroupedMatmul) -> None:
        super().__init__()
        own = work.num_experts // work.ep
        self.up = nn.Parameter(torch.empty(own, 2 * work.intermediate_size, work.hidden_size))
        self.down = nn.Parameter(torch.empty(own, work.hidden_size, work.intermediate_size))
        self.multiply = multiply

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        gate, up = self.multiply(x, self.up.transpose(-2, -1), offs=ends).chunk(2, -1)
        return self.multiply(F.silu(gate) * up, self.down.transpose(-2, -1), offs=ends)


class MoE(nn.Module):
    """The second half of a block, with its norm and residual: each token passes through its `top_k` likeliest experts.

    The router multiplies in float32, by weights that FSDP2 gathers in bfloat16. Its load-balancing term measures the
    load of each sequence, and is part of the gradient but not of the reported loss.

    Args:
        work: the sizes.
        group: the process group of the ranks that divide the experts.
        multiply: the grouped matmul.
        alignment: the multiple to which the rows of each group are padded for `multiply`.
        shared: the MLP that every token also passes through; `None` if there is none.
    """

    def __init__(
        self, work: Workload, group: Any, multiply: GroupedMatmul, alignment: int, shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.work, self.group, self.alignment = work, group, alignment
        self.norm = nn.RMSNorm(work.hidden_size, eps=work.epsilon)
        self.router = nn.Parameter(torch.empty(work.num_experts, work.hidden_size))
        self.experts = Experts(work, multiply)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, shares, sizes, expert_of = self.route(x)
        if self.work.ep == 1:
            places = sorted_places(expert_of, sizes, self.alignment)
            rows = Spread.apply(h.flatten(0, 1), places.source, places.place, self.work.top_k)
            return self.finish(x, h, self.experts(rows, places.ends), shares, places.source, places.place)
        rows, source, place = self.pack(h, sizes, expert_of)
        counts, splits = exchange_counts(sizes, self.work.ep, self.group)
        arrived = _of_any_length(Travel.apply(rows, splits))
        rows, ends, arrived_source, arrived_place = self.arrange(arrived, counts)
        rows, arrived_source, arrived_place = map(_of_any_length, (rows, arrived_source, arrived_place))
        rows = self.unarrange(_of_any_length(self.experts(rows, ends)), arrived_source, arrived_place)
        return self.finish(x, h, Travel.apply(rows, splits.reversed()), shares, source, place)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns normalized tokens, their routing weights, the number of rows per expert, and the chosen experts."""
        work = self.work
        h = self.norm(x)
        probs = torch.softmax(F.linear(h.float(), self.router.float()), -1)  # (sequences, tokens, experts)
        highest, chosen = torch.topk(probs, work.top_k, dim=-1)
        experts = torch.arange(work.num_experts, device=x.device)
        load = (chosen.flatten(1)[..., None] == experts).sum(1)  # (sequences, experts)
        even = work.top_k * x.shape[1] / work.num_experts
        term = work.aux_loss_coeff * (load[:, None] / even * probs).sum() / probs.shape[:2].numel()
        shares = WithTerm.apply(highest / highest.sum(-1, keepdim=True), term, 1 / work.microbatches)
        return h, shares, load.sum(0), chosen.flatten()

    def pack(self, h: torch.Tensor, sizes: torch.Tensor, expert_of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns a row for each choice, sorted by expert and hence by rank, and `source` and `place` of the rows."""
        places = sorted_places(expert_of, sizes, 1)
        rows = Spread.apply(h.flatten(0, 1), places.source, places.place, self.work.top_k)
        return rows, places.source, places.place

    def arrange(self, arrived: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the rows that arrived, sorted by expert, and `ends`, `source` and `place` of the rows."""
        places = arrived_places(counts, arrived.shape[0], self.alignment)
        return Spread.apply(arrived, places.source, places.place, 1), places.ends, places.source, places.place

    def unarrange(self, outputs: torch.Tensor, source: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Returns outputs in the order in which their rows arrived."""
        return Collect.apply(outputs, source, place)

    def finish(
        self,
        x: torch.Tensor,
        h: torch.Tensor,
        outputs: torch.Tensor,
        shares: torch.Tensor,
        source: torch.Tensor,
        place: torch.Tensor,
    ) -> torch.Tensor:
        """Returns `x` plus the sum of each token's experts, weighted in float32, and the output of the shared MLP."""
        by_choice = Collect.apply(outputs, source, place).view(*shares.shape, -1)
        y = (by_choice.float() * shares[..., None]).sum(-2).to(x.dtype)
        return x + y if self.shared is None else x + y + self.shared(h)

    def compile_parts(self) -> None:
        """Compiles the parts between the exchanges separately. The number of rows that arrive varies from step to step,
        so `forward` marks it as dynamic."""
        for part in ("route", "pack", "arrange", "unarrange", "finish"):
            setattr(self, part, torch.compile(getattr(self, part)))
        self.experts.compile()
