"""An inspection as text and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import plan
from .._flags import settings_of
from ..plan import columns, quantity
from ._inspection import Inspection
from ._timeline import seconds


def as_text(found: Inspection) -> str:
    """Sections of tables, for people."""
    sections = [
        _heading(found),
        _parameters(found),
        f"how weights travel, recipe {found.options.quantization.summary}\n\n{found.wire}",
        found.memory.table() + _capacity(found),
        "collectives of one step\n\n" + plan.table(found.collectives),
    ]
    if found.schedule is not None:
        sections += ["order of launches\n\n" + plan.render(found.schedule), _overlap(found)]
    return "\n\n".join(sections)


def as_json(found: Inspection) -> dict[str, Any]:
    """Everything that the text shows, as plain values."""
    result: dict[str, Any] = {
        "options": settings_of(found.options),
        "mesh": found.degrees,
        "batch": found.batch,
        "param_count": found.param_count,
        "flops_per_step": found.flops,
        "compile_s": found.compile_s,
        "parameters": [dataclasses.asdict(p) for p in found.parameters],
        "wire": [dataclasses.asdict(fact) for fact in found.wire.facts],
        "untouched": list(found.wire.untouched),
        "memory": {**dataclasses.asdict(found.memory), "peak_bytes": found.memory.peak_bytes},
        "collectives": [{"count": count, **_collective(c)} for c, count in plan.summary(found.collectives)],
    }
    if found.schedule is not None and found.timeline is not None:
        exposed = {e.name for e in found.schedule.exposed()}
        line = found.timeline
        result["schedule"] = [_event(e, e.name in exposed) for e in found.schedule.events]
        result["modelled"] = {
            **{f.name: getattr(line, f.name)._asdict() for f in dataclasses.fields(line) if f.name != "spans"},
            **{k: getattr(line, k) for k in ("total_us", "compute_us", "communication_us", "exposed_us")},
        }
    return result


def _heading(found: Inspection) -> str:
    o = found.options
    where = o.target or f"{_devices(found)} virtual CPU devices"
    mesh = " x ".join(f"{axis} {size}" for axis, size in found.degrees.items())
    return (
        f"{o.preset}: {found.param_count:,} parameters on {where}, {mesh}\n"
        f"a step: {found.batch} sequences of {o.seq} tokens in {o.execution.microbatches} microbatch(es), "
        f"{quantity(found.flops / _devices(found), 'FLOP')} a device; compiled in {found.compile_s:.1f} s"
    )


def _parameters(found: Inspection) -> str:
    rows = []
    for p in found.parameters:
        padded = "" if p.logical_shape == p.stored_shape else f"stored as {_shape(p.stored_shape)}"
        axes = (a if isinstance(a, str) else "-" if a is None else "*".join(a) for a in p.partition)
        rows.append(
            (p.path, p.dtype, _shape(p.logical_shape), ", ".join(axes), quantity(p.bytes_per_device, "B"), padded)
        )
    return columns(("parameter", "dtype", "shape", "cut over", "a device", ""), rows, right=(4,))


def _capacity(found: Inspection) -> str:
    if found.options.target is None:
        return ""
    chip = plan.parse_target(found.options.target).chip
    held = plan.fact(chip, "memory").value
    return f"\n{found.memory.peak_bytes / held:.0%} of the {quantity(held, 'B')} of an {chip}, by XLA's forecast"


def _overlap(found: Inspection) -> str:
    assert found.schedule is not None and found.timeline is not None
    rows = []
    for kind in dict.fromkeys(e.kind for e in found.schedule.collectives()):
        events, exposed = found.schedule.collectives(kind), found.schedule.exposed(kind)
        asynchronous = sum(e.end > e.start for e in events)
        sent = sum(e.times * e.collective.wire_bytes for e in exposed if e.collective)
        rows.append((kind, len(events), asynchronous, len(exposed), quantity(sent, "B")))
    line = found.timeline
    return (
        "what is exposed: nothing to compute while it is in flight\n\n"
        + columns(("kind", "launches", "async", "exposed", "sent exposed"), rows, right=(1, 2, 3, 4))
        + f"\n\nmodelled: compute {seconds(line.compute_us)}, communication {seconds(line.communication_us)}, "
        f"of which exposed {seconds(line.exposed_us)}\n"
        f"  matmuls and attention at {quantity(line.flop_rate.value, line.flop_rate.unit)}: {line.flop_rate.source}\n"
        f"  collectives at {quantity(line.link_rate.value, line.link_rate.unit)}: {line.link_rate.source}\n"
        "  elementwise work, launches, contention and slower links between hosts are left out: compare schedules with "
        "it, predict no step time"
    )


def _devices(found: Inspection) -> int:
    count = 1
    for size in found.degrees.values():
        count *= size
    return count


def _shape(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims)) or "scalar"


def _collective(c: plan.Collective) -> dict[str, Any]:
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


def _event(e: plan.Event, exposed: bool) -> dict[str, Any]:
    kept = ("kind", "name", "start", "end", "times", "depth", "direction", "flops")
    size = {} if e.collective is None else {"wire_bytes": e.collective.wire_bytes, "exposed": exposed}
    return {**{name: getattr(e, name) for name in kept}, "result": [str(s) for s in e.shapes], **size}
