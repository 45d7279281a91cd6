"""Formats a plan as text."""

from __future__ import annotations

from .. import hlo
from ..hlo import columns, quantity
from ._placement import Axes, Placement
from ._plan import Plan

# The modelled time of the measured steps in `tests/inspect/test_plan.py`, as a part of the measured one.
MODELLED_OF_MEASURED = (0.77, 1.02)

_SHOWN_MS = 0.05  # the shortest time that a sentence is about


def plan_text(plan: Plan) -> str:
    """Returns a table of the placements, the reasons, and the memory of the first one."""
    options, machine = plan.options, plan.options.machine
    tokens = options.sequences * options.seq
    hosts = f", {machine.hosts} hosts of {options.gpus_per_host}" if machine.hosts > 1 else ""
    title = (
        f"{options.title}: {options.model.param_count():,} parameters on {options.target}{hosts}; a step has "  # pyright: ignore
        f"{options.sequences} sequences of {options.seq:,} tokens"
    )
    if not plan.placements:
        return f"{title}\n\n{_none(plan)}\n\n{plan.memory}"
    best, *others = plan.placements
    peak = options.faster * hlo.fact(machine.chip, "bf16_peak").value
    over = list(dict.fromkeys(axes for one in plan.placements for axes in one.exposed_ms))
    rows = [
        (
            str(one),
            one.shape.microbatches,
            f"{one.step_ms:.1f}",
            f"{one.shape.flops / (machine.devices * one.step_ms / 1e3 * peak):.0%}",
            f"{one.compute_ms:.1f}",
            *(f"{one.exposed_ms[axes]:.1f}" if axes in one.exposed_ms else "" for axes in over),
            f"{one.memory_bytes / 2**30:.0f}",
            ", ".join(map("x".join, sorted(one.crossing))),
        )
        for one in plan.placements
    ]
    header = ("placement", "microbatches", "step ms", "MFU", "compute ms")
    header += (*(f"exposed over {'x'.join(axes)}" for axes in over), "GiB per GPU", "crosses hosts")
    numbers = range(1, len(header) - 1)
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    why = [f"{best}: {_first(best)}", *(f"{one}: {_behind(one, best)}" for one in others)]
    return (
        f"{title}: {tokens:,}\n\n{columns(header, rows, right=numbers)}\n\n"
        + "\n".join(why)
        + f"\n\n{_assumed(plan, best, peak)}\n\n{plan.memory}"
    )


def _first(best: Placement) -> str:
    """Returns why a placement is the fastest."""
    found = [_where(best, axes) for axes, ms in best.traffic_ms.items() if ms > _SHOWN_MS]
    return f"fastest: {'; '.join(found)}" if found else "fastest: nothing is communicated"


def _where(one: Placement, axes: Axes) -> str:
    exposed, traffic = one.exposed_ms[axes], one.traffic_ms[axes]
    network = one.line.network is not None
    where = " crosses hosts and" if axes in one.crossing else " stays within a host and" if network else ""
    return f"{one.of(axes)}{where} exposes {exposed:.1f} of {traffic:.1f} ms"


def _behind(one: Placement, best: Placement) -> str:
    """Returns what costs a placement most, compared with the fastest."""
    longer = {axes: ms - best.exposed_ms.get(axes, 0.0) for axes, ms in one.exposed_ms.items()}
    axes = max(longer, key=lambda axes: longer[axes], default=())
    computing = one.compute_ms - best.compute_ms
    behind = f"{one.step_ms - best.step_ms:.1f} ms behind"
    if longer.get(axes, 0.0) > max(computing, _SHOWN_MS):
        return f"{behind}: {_where(one, axes)}"
    if computing > _SHOWN_MS:
        count = one.shape.microbatches
        parts = f", in {count} microbatches" if count > best.shape.microbatches else ""
        return f"{behind}: computes {computing:.1f} ms longer{parts}"
    return "as fast, by this model"


def _none(plan: Plan) -> str:
    if plan.options.microbatches is None:
        return f"none of {plan.considered} placements fits, with any number of microbatches"
    return f"none of {plan.considered} placements fits with {plan.options.microbatches} microbatches"


def _assumed(plan: Plan, best: Placement, peak: float) -> str:
    """Returns what the model assumes, and how good it is."""
    options, line = plan.options, best.line
    low, high = MODELLED_OF_MEASURED
    facts = {**line.rates, "NVLink": line.link_rate, "each array of a collective": line.link_latency}
    network = (
        f"  network at {quantity(line.network.rate, 'B/s')} per GPU (--network-rate); nothing has run between hosts\n"
        if line.network
        else ""
    )
    return (
        f"modelled from shapes, the best of {plan.considered} placements and one of each kind; nothing was compiled or "
        f"run. Of steps measured on 1 to 4\nGPUs of a host, the model has {low} to {high} times the time, least for "
        "experts.\n\n"
        + "".join(f"  {what} at {quantity(one.value, one.unit)}: {one.source}\n" for what, one in facts.items())
        + network
        + f"  MFU of {quantity(peak, 'FLOP/s')} (--peak); bf16 weights, AdamW, remat matmuls, --grad-reduce "
        f"{options.grad_reduce}\n"
        f"  GiB of state and of an estimate of the rest, which `gtp-jax inspect` compiles"
    )
