"""Writes the launches of a training step from shapes, in the order in which XLA launches those of a compiled one.

`hlo.timeline` times them, as it times the launches of a compiled step. A layer is written once and runs many times;
layers with windows count as their mean. Experts are taken to be evenly loaded. The order, the bytes that elementwise
kernels move, and what is overlapped follow steps compiled for H200s (`tests/inspect/test_plan.py` compares them).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from .. import hlo
from .._words import CP, TP
from ..experts import traffic_of_layer, transport_within
from ._step_shape import VALUE, StepShape

Direction = Literal["forward", "backward"]

# The bytes that a step reads and writes per element of what it names.
_CAST = 6  # of a shard, from float32 to bfloat16, and
_JOIN = 4  # of those with others that travel together, if they travel
_NORM, _NORM_BACKWARD = 4, 14  # of the residual stream, per norm and sum
_ROPE = 4  # of queries, keys and values
_COPY = 4  # of an array in another layout
_GLU, _GLU_BACKWARD, _GLU_AGAIN = 6, 10, 6  # of the hidden features of an MLP
_EXPERT_GLU_BACKWARD = 18
_LOSS, _LOSS_OVER_TP = 8, 18  # of logits
_ROWS, _ROWS_BACKWARD = 6, 20  # of rows of an embedding that ranks exchange, and of a table's gradient
_ADD_GRADIENT = 12  # of a shard, per microbatch if there are several
_UPDATE = 24  # of a shard: weight and moments, read and written
_MOVES, _MOVES_OF_SUMS = 3, 5  # how often a gradient is read or written before; one that was reduced is also transposed
_TERM = 8  # of a weight's gradient that more than two ranks of tp sum in float32, per turn


def step_launches(shape: StepShape) -> hlo.LaunchOrder:
    """Returns the launches of a step."""
    return _Step(shape).launches()


class _Order:
    """Launches, one after another."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self.events: list[hlo.Event] = []
        self.times = 1
        self.direction: Direction = "forward"

    def launch(self, kind: str, **what: object) -> int:
        at = len(self.events)
        where = {"name": f"{kind}.{at}", "start": at, "end": at, "shapes": (), "depth": 0, "times": self.times}
        self.events.append(hlo.Event(kind, direction=self.direction, **where, **what))  # pyright: ignore[reportArgumentType]
        return at

    def matmul(self, flops: float) -> None:
        self.launch("matmul", flops=int(flops), rate="bf16 matmuls")

    def move(self, size: float) -> None:
        """Adds elementwise work that reads and writes this many bytes."""
        if size:
            self.launch("elementwise", moved=int(size), rate="elementwise work")

    def flight(self, kind: str, axes: Sequence[str], size: float, arrays: int = 1) -> _Flight:
        """Returns a collective that is not launched yet; `size` is that of its larger side on a device, in bytes."""
        return _Flight(self, kind, tuple(a for a in axes if self.shape.degrees.get(a, 1) > 1), size, arrays)

    def sync(self, kind: str, axes: Sequence[str], size: float, arrays: int = 1) -> None:
        """Adds a collective that the next launch waits for."""
        self.flight(kind, axes, size, arrays).wait()


class _Flight:
    """A collective. Nothing is launched over axes of one rank."""

    def __init__(self, order: _Order, kind: str, axes: tuple[str, ...], size: float, arrays: int) -> None:
        self.order, self.kind, self.axes, self.arrays = order, kind, axes, arrays
        self.size = int(size) if axes else 0
        self.at: int | None = None

    def start(self) -> None:
        """Launches it once."""
        if self.at is not None or not self.size:
            return
        groups = hlo.groups_over(self.order.shape.degrees, self.axes)
        ranks = len(groups[0])
        whole = (hlo.Shape("u8", (self.size // self.arrays,)),) * self.arrays
        part = (hlo.Shape("u8", (self.size // self.arrays // ranks,)),) * self.arrays
        sides = {"all-gather": (part, whole), "reduce-scatter": (whole, part)}.get(self.kind, (whole, whole))
        name, times, direction = f"{self.kind}.{len(self.order.events)}", self.order.times, self.order.direction
        own = hlo.Collective(name, self.kind, *sides, groups, self.axes, True, times, True, direction, "")
        self.at = self.order.launch(self.kind, collective=own)

    def wait(self) -> None:
        """Makes the next launch wait for its end, if none does yet."""
        self.start()
        events = self.order.events
        if self.at is not None and events[self.at].end == self.at:
            events[self.at] = dataclasses.replace(events[self.at], end=len(events))


class _Step:
    def __init__(self, shape: StepShape) -> None:
        self.shape, self.order = shape, _Order(shape)

    def launches(self) -> hlo.LaunchOrder:
        s = self.shape
        config, order, m = s.config, self.order, s.microbatches
        layers = config.num_layers
        self._begin()
        for times, divided in ((1, True), (m - 1, False)):  # weights are gathered over dp once
            if not times:
                continue
            order.direction, order.times = "forward", times
            self._embed()
            order.times = times * (layers - 1)
            if layers > 1:
                self._forward(self._gathers(), divided)
            order.times = times
            self._forward([order.flight("all-gather", s.roles.weights, VALUE * s.table)], False)
        order.times = m
        self._head()
        self._backward(self._head_reduces(), self._gathers() if layers > 1 else [])
        order.times = m * max(0, layers - 2)
        if layers > 2:
            self._backward(self._reduces(), self._gathers())
        order.times = m
        if layers > 1:
            self._backward(self._reduces(), [])
        self._end()
        return hlo.LaunchOrder(
            tuple(e for e in order.events if e.kind != "elementwise"),
            tuple(e for e in order.events if e.kind == "elementwise"),
        )

    def _gathers(self) -> list[_Flight]:
        """Returns the gathers of a layer's weights."""
        s = self.shape
        roles, order = s.roles, self.order
        dense = order.flight("all-gather", roles.weights, VALUE * s.dense, 2 if s.experts else 4)
        experts = order.flight("all-gather", roles.over_experts, VALUE * s.experts, 2)
        return [dense, experts]

    def _reduces(self) -> list[_Flight]:
        """Returns the sums of the gradients of a layer, over the ranks that gather its weights, then over dp."""
        s = self.shape
        roles, order, size = s.roles, self.order, s.gradient_bytes
        dense = order.flight("reduce-scatter", roles.weights, size * s.dense, 2 if s.experts else 4)
        experts = order.flight("reduce-scatter", roles.over_experts, size * s.experts, 2)
        return [dense, experts, order.flight("reduce-scatter", roles.over_optimizer, size * s.shard, 7)]

    def _head_reduces(self) -> list[_Flight]:
        s = self.shape
        roles, order, size = s.roles, self.order, s.gradient_bytes
        own = order.flight("reduce-scatter", roles.weights, size * s.table)
        return [own, order.flight("reduce-scatter", roles.over_optimizer, size * s.table / s.dense_ranks)]

    def _begin(self) -> None:
        """Gathers over dp what the first layer needs."""
        s = self.shape
        first = s.tables * s.table / s.dense_ranks + s.shard
        self.order.sync("all-gather", s.roles.over_optimizer, VALUE * first, 9)

    def _embed(self) -> None:
        """Looks up the embedding. Nothing hides its gather and that of the first layer."""
        s = self.shape
        order, roles = self.order, s.roles
        gathers = self._gathers()
        if not s.by_rows:
            gathers.append(order.flight("all-gather", roles.weights, VALUE * s.table))
        order.move(self._cast(s.shard))
        _start(gathers)
        _wait(gathers)
        if s.by_rows:
            order.move(_ROWS * s.dense_ranks * s.t * s.d)
            order.sync("reduce-scatter", roles.weights, VALUE * s.dense_ranks * s.t * s.d)
        elif s.tp > 1:
            order.move(_ROWS * s.t * s.d)
        order.sync("reduce-scatter", (TP,), VALUE * s.t * s.d)

    def _cast(self, elements: float) -> float:
        s = self.shape
        return (_CAST + (_JOIN if max(s.dense_ranks, s.expert_ranks) > 1 else 0)) * elements

    def _forward(self, following: list[_Flight], divided: bool) -> None:
        """Runs a layer while the weights of the following one are gathered: as late as they can be hidden, but with cp
        before the exchange of heads."""
        s = self.shape
        order, t, d, own = self.order, s.t, s.d, s.own
        heads = t * (s.q + 2 * s.kv)
        divides = order.flight("all-gather", s.roles.over_optimizer, VALUE * s.shard * divided, 7)
        order.move(self._cast(s.shard))
        if s.cp > 1:
            _start(following)
        order.move(_NORM * own * d)
        divides.start()
        self._gather_linear(2 * heads * d)
        divides.wait()
        if s.cp > 1:
            _wait(following)
        order.move(_ROPE * heads)
        self._exchange_heads(heads)
        if s.tp == 1:
            _start(following)
        order.launch("attention", flops=int(2 * 2 * self._scores), rate="attention forward")
        self._exchange_heads(t * s.q)
        order.move(_COPY * t * s.q)
        self._linear_scatter(2 * t * s.q * d)
        order.move(_NORM * own * d)
        if s.experts:
            self._experts_forward()
        else:
            down = 2 * t * s.f * d
            if not self._hides(following, down):
                _start(following)
            self._gather_linear(2 * down)
            order.move(_GLU * t * s.f)
            order.move(_COPY * own * d)
            _start(following)
            self._linear_scatter(down)
        _wait(following)

    def _backward(self, sums: list[_Flight], before: list[_Flight]) -> None:
        """Runs a layer's backward while the gradients of the following one are reduced and the weights of the layer
        before are gathered."""
        s = self.shape
        order, t, d, own = self.order, s.t, s.d, s.own
        order.direction = "backward"
        heads, hidden = t * (s.q + 2 * s.kv), 2 * t * s.f * d
        *reduces, over_dp = sums
        early = bool(over_dp.size)
        if early:
            _start(reduces)
        if s.experts:
            self._experts_backward()
        else:
            self._gather_linear(hidden)
            order.move(_GLU_BACKWARD * t * s.f)
            self._linear_scatter(2 * hidden)
        order.move(_NORM_BACKWARD * own * d)
        if s.tp == 1 and s.cp == 1:
            _start(reduces)
        self._gather_linear(2 * t * s.q * d)
        self._exchange_heads(t * s.q)
        if early:
            _wait(reduces)
            over_dp.start()
        order.launch("attention", flops=int(2 * 5 * self._scores), rate="attention backward")
        self._exchange_heads(heads)
        if s.cp > 1:
            _start(reduces)
        order.move(_ROPE * heads)
        _start(reduces)
        self._linear_scatter(2 * heads * d)
        order.move(_NORM_BACKWARD * own * d)
        if s.tp == 1:
            _wait([*reduces, over_dp])
            _start(before)
        if not s.experts:
            order.move(_GLU_AGAIN * t * s.f)
            order.matmul(hidden)
            self._gather_linear(2 * hidden)
        self._gather_linear(2 * heads * d)
        order.move(self._terms(s.dense))
        _wait([*reduces, over_dp])
        _start(before)
        order.matmul(2 * t * s.q * d)
        _wait(before)
        if s.microbatches > 1:
            order.move(_ADD_GRADIENT * s.shard)

    @property
    def _scores(self) -> float:
        """The products of numbers in the scores that are not masked, of a rank's heads and a layer: the mean."""
        s = self.shape
        return s.t * s.keys * s.q

    def _hides(self, flights: Sequence[_Flight], flops: float) -> bool:
        """Returns whether a matmul takes longer than collectives over NVLink, as XLA estimates them."""
        chip, size = self.shape.chip, sum(flight.size for flight in flights)
        return flops / hlo.fact(chip, "bf16_ceiling").value > size / hlo.fact(chip, "link_ceiling").value

    def _gather_linear(self, flops: float) -> None:
        """Multiplies each part of the sequence while the next one travels over tp."""
        self._in_turns(flops, idle=self.shape.tp - 1)

    def _linear_scatter(self, flops: float) -> None:
        """Multiplies each part of the sequence while the sum of the one before travels over tp."""
        self._in_turns(flops, idle=0)

    def _in_turns(self, flops: float, idle: int) -> None:
        """Multiplies one part of the sequence in each turn, and sends another, except in the turn `idle`."""
        s = self.shape
        for turn in range(s.tp):
            part = self.order.flight("collective-permute", (TP,), VALUE * s.own * s.d * (turn != idle))
            part.start()
            self.order.matmul(flops / s.tp)
            part.wait()

    def _terms(self, elements: float) -> float:
        """Returns the bytes of adding up the gradients of weights by the parts of the sequence."""
        s = self.shape
        return _TERM * (s.tp - 1) * elements if s.tp > 2 else 0

    def _exchange_heads(self, elements: float) -> None:
        s = self.shape
        if s.cp > 1:
            self.order.move(_COPY * elements)
            self.order.sync("all-to-all", (CP,), VALUE * elements)

    def _traffic(self, direction: Direction, first: bool) -> None:
        """Sends tokens to the ranks of their experts, or their sums back, as the exchange does."""
        s = self.shape
        config, axis = s.config, s.roles.experts
        if s.ep == 1 or axis is None:
            return
        transport = transport_within(s.ep * s.tp, s.gpus_per_host)
        none = math.comb(config.num_experts - config.num_experts // s.ep, config.top_k)
        travels = 1 - none / math.comb(config.num_experts, config.top_k) if transport == "ragged" else 1.0
        found = traffic_of_layer(
            ranks=s.ep,
            transport=transport,
            tokens=s.t,
            top_k=config.top_k,
            chunks=1,
            rows=(s.ep - 1) * s.t * travels,
            width=s.d,
            itemsize=VALUE,
            form=None,
            keeps_shares=False,
        )
        for one in found:
            back = "combine" in one.what or one.what == "gradients of shares"
            if one.direction == direction and back != first:
                self.order.sync(one.kind, (axis,), one.bytes * s.ep / (s.ep - 1))

    @property
    def _shared(self) -> float:
        """The operations of the forward pass of the MLP that all tokens share."""
        s = self.shape
        return 6 * s.t * s.d * s.config.shared_hidden / s.tp

    def _experts_forward(self) -> None:
        s = self.shape
        order, t, d, rows, f = self.order, s.t, s.d, s.rows, s.f
        order.sync("all-gather", (TP,), VALUE * t * d)
        order.move((_CAST + VALUE) * t * d)
        order.matmul(2 * t * d * s.config.num_experts)
        self._traffic("forward", True)
        order.move(VALUE * (t + rows) * d)
        order.matmul(4 * rows * d * f + self._shared)
        order.move(_GLU * rows * f)
        order.matmul(2 * rows * f * d)
        order.move(VALUE * (2 * t + rows) * d)
        self._traffic("forward", False)
        order.sync("reduce-scatter", (TP,), VALUE * t * d)

    def _experts_backward(self) -> None:
        s = self.shape
        order, t, d, rows, f = self.order, s.t, s.d, s.rows, s.f
        order.sync("all-gather", (TP,), 2 * VALUE * t * d, 2)
        self._traffic("backward", True)
        order.move(VALUE * (t + rows) * d)
        order.matmul(2 * rows * f * d)
        order.move(_EXPERT_GLU_BACKWARD * rows * f)
        order.matmul(4 * rows * d * f)
        order.move(VALUE * (2 * t + rows) * d)
        order.move(VALUE * (t + rows) * d)
        order.matmul(4 * rows * d * f + 2 * self._shared)
        order.matmul(2 * rows * d * f)
        self._traffic("backward", False)
        order.matmul(4 * t * d * s.config.num_experts)
        order.move(_NORM_BACKWARD * t * d)
        order.sync("reduce-scatter", (TP,), VALUE * t * d)

    def _head(self) -> None:
        s = self.shape
        order, t, d, own = self.order, s.t, s.d, s.own
        flops = 2 * t * s.table
        order.move(_NORM * own * d)
        self._gather_linear(flops)
        order.move((_LOSS if s.tp == 1 else _LOSS_OVER_TP) * t * s.vocab)
        order.direction = "backward"
        gathers = self._gathers()
        _start(gathers)
        self._linear_scatter(flops)
        order.move(_NORM_BACKWARD * own * d)
        self._gather_linear(flops)
        order.move(self._terms(s.table))
        _wait(gathers)

    def _end(self) -> None:
        """Reduces the gradients of the first layer and of the embedding, and updates the shards."""
        s = self.shape
        order, roles = self.order, s.roles
        sums = self._reduces()
        if s.by_rows:
            order.sync("all-gather", roles.weights, VALUE * s.dense_ranks * s.t * s.d)
        else:
            sums[:0] = [order.flight("reduce-scatter", roles.weights, s.gradient_bytes * s.table)]
        sums += self._head_reduces()[1:]
        _start(sums)
        order.move(_ROWS_BACKWARD * s.table / (s.dense_ranks if s.by_rows else 1))
        _wait(sums)
        order.times = 1
        dense, experts = s.stored
        replicas = [a for a in roles.batch if a not in (*roles.weights, *roles.over_optimizer)]
        order.sync("all-reduce", replicas, 4 * (dense + experts))
        moves = (_MOVES_OF_SUMS if s.dense_ranks > 1 else _MOVES) * dense + _MOVES * experts
        order.move(_UPDATE * (dense + experts) + s.gradient_bytes * moves)


def _start(flights: Sequence[_Flight]) -> None:
    for flight in flights:
        flight.start()


def _wait(flights: Sequence[_Flight]) -> None:
    for flight in flights:
        flight.wait()
