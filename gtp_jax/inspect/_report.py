"""Formats an inspection as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

from .. import hlo
from ..chain import OFFLOADED
from ..hlo import COMPUTE, columns, quantity
from ..runner.flags import settings_of
from ._inspection import Inspection
from ._offload import break_even
from ._timeline import seconds


def as_text(inspection: Inspection) -> str:
    """Returns the inspection as readable text: sections of tables."""
    sections = [
        _heading(inspection),
        _parameters(inspection),
        f"how weights are sent, recipe {inspection.options.quantization.summary}\n\n{inspection.wire}",
        *([_exchanges(inspection)] if inspection.exchanges else []),
        inspection.memory.table() + _capacity(inspection),
        *([_state_on_host(inspection)] if inspection.options.execution.offloaded else []),
        *([_on_host(inspection)] if inspection.options.execution.remat in OFFLOADED else []),
        "collectives of one step\n\n" + hlo.table(inspection.collectives),
    ]
    if inspection.order is not None:
        sections += ["order of launches\n\n" + hlo.render(inspection.order), _over_dp(inspection)]
        sections.append(_overlap(inspection))
    return "\n\n".join(sections)


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Returns the inspection as values that JSON can hold."""
    result: dict[str, Any] = {
        "options": settings_of(inspection.options),
        "mesh": inspection.degrees,
        "batch": inspection.batch,
        "param_count": inspection.param_count,
        "flops_per_step": inspection.flops,
        "compile_s": inspection.compile_s,
        "parameters": [dataclasses.asdict(p) for p in inspection.parameters],
        "wire": [dataclasses.asdict(fact) for fact in inspection.wire.facts],
        "exchanges": [{**dataclasses.asdict(one), "rounds": one.rounds} for one in inspection.exchanges],
        "untouched": list(inspection.wire.untouched),
        "share": None if inspection.wire.share is None else dataclasses.asdict(inspection.wire.share),
        "memory": {**dataclasses.asdict(inspection.memory), "peak_bytes": inspection.memory.peak_bytes},
        "state": _state(inspection),
        "host_bytes": inspection.host_bytes,
        "collectives": [{"count": count, **_collective(c)} for c, count in hlo.summary(inspection.collectives)],
    }
    if inspection.order is not None and inspection.timeline is not None:
        exposed = {e.name for e in inspection.order.exposed()}
        result["order"] = [_event(e, e.name in exposed) for e in inspection.order.events]
        result["modelled"] = _modelled(inspection.timeline)
        if inspection.over_network is not None:
            result["modelled_over_network"] = _modelled(inspection.over_network)
    return result


def _heading(inspection: Inspection) -> str:
    o, devices = inspection.options, math.prod(inspection.degrees.values())
    where = o.target or f"{devices} virtual CPU devices"
    mesh = " x ".join(f"{axis} {size}" for axis, size in inspection.degrees.items())
    return (
        f"{o.title}: {inspection.param_count:,} parameters on {where}, {mesh}\n"
        f"one step: {inspection.batch} sequences of {o.seq} tokens in {o.execution.microbatches} microbatch(es), "
        f"{quantity(inspection.flops / devices, 'FLOP')} per device; "
        f"compiled in {inspection.compile_s:.1f} s"
    )


def _parameters(inspection: Inspection) -> str:
    rows = []
    for p in inspection.parameters:
        axes = (a if isinstance(a, str) else "-" if a is None else "*".join(a) for a in p.partition)
        size = quantity(p.bytes_per_device, "B")
        rows.append((p.path, p.dtype, _shape(p.logical_shape), ", ".join(axes), size, p.note))
    table = columns(("parameter", "dtype", "shape", "sharded over", "per device", "in use"), rows, right=(4,))
    return f"{table}\n\nwithin a chain nothing moves between column- and row-parallel layers: ranks own the same units"


def _capacity(inspection: Inspection) -> str:
    target = inspection.options.machine
    if target is None:
        return ""
    memory_bytes = hlo.fact(target.chip, "memory").value
    share = inspection.memory.peak_bytes / memory_bytes
    return f"\n{share:.0%} of the {quantity(memory_bytes, 'B')} of an {target.chip}, by XLA's estimate"


def _state_on_host(inspection: Inspection) -> str:
    """Returns tables of the state in both memories, and of what a step copies."""
    target = inspection.options.machine
    table = inspection.state.table(None if target is None else target.chip)
    return f"a state partly in the host's memory, offload {inspection.options.execution.offload}\n\n{table}"


def _on_host(inspection: Inspection) -> str:
    """Returns a table of the copies to the host and back, and whether a layer computes longer than its copies take."""
    remat, target = inspection.options.execution.remat, inspection.options.machine
    title = f"activations in the host's memory, remat {remat}"
    if target is None or inspection.order is None:
        return f"{title}\n\na CPU has one memory, so nothing is copied; --target compiles for GPUs"
    link = hlo.fact(target.chip, "host_link_peak")
    rows, of_layer = [], 0.0
    microbatches = inspection.options.execution.microbatches
    for kind in (hlo.TO_HOST, hlo.FROM_HOST):
        copies = [copy for copy in inspection.host_copies if copy.kind == kind]
        moved = sum(copy.times * copy.shapes[0].bytes for copy in copies)
        of_layer = moved / inspection.options.model.num_layers / microbatches
        bare = sum(copy.times for copy in copies if not inspection.order.under(copy))
        times = sum(copy.times for copy in copies)
        rows.append((kind, times, quantity(moved, "B"), quantity(moved / link.value, "s"), bare))
    table = columns(("copies", "count", "bytes", "take", "no compute under"), rows, right=(1, 2, 3, 4))
    even = break_even(of_layer, inspection.layer_flops, target.chip)
    return f"{title}: {quantity(inspection.host_bytes, 'B')} per device\n\n{table}\n\n{even}"


def _over_dp(inspection: Inspection) -> str:
    """Returns a table of what runs under each collective over dp; identical collectives share a line."""
    assert inspection.order is not None and inspection.timeline is not None
    groups: dict[tuple[Any, ...], list[tuple[int, float, float]]] = defaultdict(list)
    for span in (inspection.over_network or inspection.timeline).spans:
        event, own = span.event, span.event.collective
        if own is None or "dp" not in own.axes:
            continue
        under = [e.kind for e in inspection.order.under(event)]
        words = ", ".join(f"{under.count(kind)} {kind}" for kind in COMPUTE if kind in under)
        alike = (event.kind, event.direction, own.axes, own.dtype, own.wire_bytes, words or "nothing")
        groups[alike].append((event.times, span.end_us - span.start_us, span.exposed_us))
    rows = []
    for (kind, direction, axes, dtype, sent, words), found in groups.items():
        times, lasts, exposed = (sum(column) for column in zip(*found, strict=True))
        cells = (times, kind, direction, ",".join(axes), dtype, quantity(sent, "B"), words)
        rows.append((*cells, seconds(lasts), seconds(exposed)))
    header = ("count", "kind", "pass", "over", "dtype", "sent each", "overlapped compute", "modelled", "exposed")
    title = "collectives over dp, and what hides them" + (", with the network" if inspection.over_network else "")
    return f"{title}\n\n{columns(header, rows, right=(0, 5, 7, 8)) if rows else 'none'}"


def _overlap(inspection: Inspection) -> str:
    assert inspection.order is not None and inspection.timeline is not None
    rows = []
    for kind in dict.fromkeys(e.kind for e in inspection.order.collectives()):
        events, exposed = inspection.order.collectives(kind), inspection.order.exposed(kind)
        asynchronous = sum(e.end > e.start for e in events)
        sent = sum(e.times * e.collective.wire_bytes for e in exposed if e.collective)
        rows.append((kind, len(events), asynchronous, len(exposed), quantity(sent, "B")))
    line, network = inspection.timeline, inspection.over_network
    modelled = columns(
        ("modelled", "step", "compute", "communication", "exposed", ""),
        [_times("NVLink between all GPUs", line)]
        + ([] if network is None else [_times("NVLink within hosts, network between them", network)]),
        right=(1, 2, 3, 4, 5),
    )
    return (
        "exposed collectives: no compute runs while they are in flight\n\n"
        + columns(("kind", "launches", "async", "exposed", "exposed bytes"), rows, right=(1, 2, 3, 4))
        + f"\n\n{modelled}\n\n"
        + "".join(f"  {kind} at {_fact(rate)}\n" for kind, rate in line.rates.items())
        + f"  NVLink at {_fact(line.link_rate)}\n"
        f"  each array of a collective takes {_fact(line.link_latency)}\n"
        f"  {_network(inspection)}\n"
        "  launches and contention are left out: use this to compare schedules, not to predict step times"
    )


def _fact(fact: hlo.Fact) -> str:
    return f"{quantity(fact.value, fact.unit)}: {fact.source}"


def _times(links: str, line: hlo.Timeline) -> tuple[str, ...]:
    share = line.exposed_us / line.total_us if line.total_us else 0.0
    times = (line.total_us, line.compute_us, line.communication_us, line.exposed_us)
    return (links, *map(seconds, times), f"{share:.0%}")


def _network(inspection: Inspection) -> str:
    """Returns a line that says how hosts are joined in the model."""
    network = inspection.options.network
    if network is None:
        return "slower links between hosts are left out; --network-rate describes them"
    return (
        f"network at {quantity(network.rate, 'B/s')} per GPU between hosts of {network.gpus_per_host}, as "
        "--network-rate says; a ring leaves a host through the adapters of all its ranks there"
    )


def _exchanges(inspection: Inspection) -> str:
    rows = [
        (
            one.module,
            f"{one.axis} {one.ranks}",
            one.transport,
            f"{one.tokens:,}",
            str(one.chunks),
            f"{one.round_rows:,}",
            f"{one.worst_rows:,}",
            str(one.rounds),
            quantity(one.arrived_bytes, "B"),
            quantity(one.dispatched_bytes, "B"),
        )
        for one in inspection.exchanges
    ]
    header = (
        *("module", "over", "transport", "tokens", "chunks", "rows per round"),
        *("at worst", "rounds", "transient", "dispatch"),
    )
    traffic = [
        (one.module, each.direction, each.what, each.kind, each.dtype, str(each.count), quantity(each.bytes, "B"))
        for one in inspection.exchanges
        for each in one.traffic
    ]
    traffic_header = ("module", "pass", "what travels", "kind", "dtype", "count", "sent")
    return (
        "how tokens are sent to experts on other ranks, per rank, each time a layer runs\n\n"
        + columns(header, rows, right=(3, 4, 5, 6, 7, 8, 9))
        + "\n\nno token is dropped: if experts receive more rows of a chunk than fit in a round, they run more rounds, "
        "at most\n`rounds`. Backward keeps at most one round of rows per chunk. `dispatch` is what a rank sends if "
        "experts are evenly\nloaded.\n\n"
        + columns(traffic_header, traffic, right=(5, 6))
        + "\n\nin this order, per layer and microbatch, from a rank whose experts are evenly loaded. XLA may combine "
        "collectives that\nare ready at the same time. Below, XLA counts a ragged exchange at the size of the worst "
        "load."
    )


def _shape(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims)) or "scalar"


def _collective(c: hlo.Collective) -> dict[str, Any]:
    return {
        "kind": c.kind,
        "direction": c.direction,
        "axes": c.axes,
        "group": c.group,
        "dtype": c.dtype,
        "asynchronous": c.asynchronous,
        "count_exact": c.exact,
        "operands": [str(s) for s in c.operands],
        "results": [str(s) for s in c.results],
        "operand_bytes": c.operand_bytes,
        "result_bytes": c.result_bytes,
        "wire_bytes": c.wire_bytes,
    }


def _state(inspection: Inspection) -> dict[str, Any]:
    state, target = inspection.state, inspection.options.machine
    return {**dataclasses.asdict(state), "copying_s": None if target is None else state.copying_s(target.chip)}


def _modelled(line: hlo.Timeline) -> dict[str, Any]:
    network = line.network
    return {
        "rates": {kind: rate._asdict() for kind, rate in line.rates.items()},
        "link_rate": line.link_rate._asdict(),
        "link_latency": line.link_latency._asdict(),
        **({} if network is None else {"network": dataclasses.asdict(network)}),
        **{k: getattr(line, k) for k in ("total_us", "compute_us", "communication_us", "exposed_us")},
    }


def _event(e: hlo.Event, exposed: bool) -> dict[str, Any]:
    kept = ("kind", "name", "start", "end", "times", "depth", "direction", "flops")
    own = e.collective
    size = {} if own is None else {"axes": own.axes, "wire_bytes": own.wire_bytes, "exposed": exposed}
    return {**{name: getattr(e, name) for name in kept}, "result": [str(s) for s in e.shapes], **size}
