"""Formats a plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from .. import hlo
from ..hlo import columns, quantity
from ..runner.flags import PlanOptions
from ._memory_plan import MemoryPlan
from ._placement import Axes, Placement

# The modelled times of the measured steps in `tests/inspect/test_plan.py`, as parts of the measured ones.
MODELLED_OF_MEASURED = (0.78, 1.01)

_SHOWN_MS = 0.05  # the shortest time that is worth words


def plan_text(
    options: PlanOptions,
    placements: Sequence[Placement],
    considered: int,
    smallest: Placement | None,
    memory: MemoryPlan,
) -> str:
    """Returns a table of the placements, the reasons, and the memory of the first one; see `Plan`."""
    machine = options.machine
    hosts = f", {machine.hosts} hosts of {options.gpus_per_host}" if machine.hosts > 1 else ""
    title = (
        f"{options.title}: {options.model.param_count():,} parameters on {options.target}{hosts}; "
        f"{options.sequences} x {options.seq:,} tokens per step"
    )
    if smallest is not None:
        return f"{title}\n\n{_none(options, considered, smallest, memory)}\n\n{memory}"
    best, *others = placements
    peak = options.faster * hlo.fact(machine.chip, "bf16_peak").value
    rows = [
        (
            str(one),
            one.shape.microbatches,
            f"{one.step_ms:.1f}",
            f"{one.shape.flops / (machine.devices * one.step_ms / 1e3 * peak):.0%}",
            f"{one.compute_ms:.1f}",
            ", ".join(f"{_words(axes)} {ms:.1f}" for axes, ms in one.exposed_ms.items() if ms > _SHOWN_MS),
            quantity(one.memory_bytes, "B"),
            ", ".join(map(_words, sorted(one.crossing))),
        )
        for one in placements
    ]
    header = ("placement", "microbatches", "step ms", "MFU", "compute ms", "exposed ms", "memory", "crosses hosts")
    why = [f"{best} is the fastest: {_first(best)}", *(f"{one} is {_slower(one, best)}" for one in others)]
    if options.network is None:
        header, rows = header[:-1], [row[:-1] for row in rows]
    return (
        f"{title}\n\n{columns(header, rows, right=(1, 2, 3, 4, 6))}\n\n"
        + "\n".join(why)
        + f"\n\nflags of train and inspect: {_flags(options, best)}"
        f"\n\n{_assumed(options, considered, best, peak)}\n\n{memory}"
    )


def _flags(options: PlanOptions, best: Placement) -> str:
    """Returns the flags of the step that was planned."""
    values = {
        "preset": options.title,
        **best.shape.degrees,
        "batch": options.sequences,
        "microbatches": best.shape.microbatches,
        "seq": options.seq,
        "grad-reduce": options.grad_reduce,
    }
    words = [f"--{name} {value}" for name, value in values.items()]
    return " ".join([*words, *([] if options.degrees.shard_optimizer else ["--no-shard-optimizer"])])


def _words(axes: Axes) -> str:
    return " x ".join(axes)


def _first(best: Placement) -> str:
    """Returns what the fastest placement sends, and what of it is exposed."""
    sent = [_where(best, axes) for axes, ms in best.traffic_ms.items() if ms > _SHOWN_MS]
    return "; ".join(sent) or "nothing is communicated"


def _where(one: Placement, axes: Axes) -> str:
    """Returns where axes are, and what of their traffic is exposed."""
    exposed, traffic, ranks = one.exposed_ms[axes], one.traffic_ms[axes], one.ranks_per_host(axes)
    where = " stays within a host and" if one.line.network is not None else ""
    if ranks is not None:
        where = f" crosses hosts, with {ranks} of a group's ranks on each, and"
    return f"{one.of(axes)}{where} exposes {exposed:.1f} of {traffic:.1f} ms"


def _slower(one: Placement, best: Placement) -> str:
    """Returns what costs a placement most, compared with the fastest."""
    longer = {axes: ms - best.exposed_ms.get(axes, 0.0) for axes, ms in one.exposed_ms.items()}
    axes = max(longer, key=lambda axes: longer[axes], default=())
    computing = one.compute_ms - best.compute_ms
    slower = f"{one.step_ms - best.step_ms:.1f} ms slower"
    if longer.get(axes, 0.0) > max(computing, _SHOWN_MS):
        return f"{slower}: {_where(one, axes)}"
    if computing > _SHOWN_MS:
        count = one.shape.microbatches
        parts = f", in {count} microbatches" if count > best.shape.microbatches else ""
        return f"{slower}: it computes {computing:.1f} ms longer{parts}"
    return "as fast, by this model"


def _none(options: PlanOptions, considered: int, smallest: Placement, memory: MemoryPlan) -> str:
    """Returns what the smallest placement needs, and of what there is too little."""
    parts = "any number of" if options.microbatches is None else options.microbatches
    state, working = (quantity(size, "B") for size in (smallest.state_bytes, smallest.shape.working_bytes))
    return (
        f"none of {considered} placements fits with {parts} microbatches. The smallest, {smallest} with --microbatches "
        f"{smallest.shape.microbatches}, needs {quantity(smallest.memory_bytes, 'B')}, and JAX may allocate "
        f"{quantity(memory.limit_bytes, 'B')}:\n{state} for weights and AdamW's state, and "
        f"{working}, by an estimate, for activations, gradients, gathered weights and workspace."
    )


def _assumed(options: PlanOptions, considered: int, best: Placement, peak: float) -> str:
    """Returns what the model assumes, and how good it is."""
    line, (low, high) = best.line, MODELLED_OF_MEASURED
    facts = {**line.rates, "NVLink": line.link_rate, "each array of a collective": line.link_latency}
    network = (
        f"  network at {quantity(line.network.rate, 'B/s')} per GPU, as --network-rate says; latencies and congestion "
        "between hosts are left out, and nothing has run there\n"
        if line.network
        else ""
    )
    return (
        f"Modelled from shapes: the best of {considered} placements, and the best with each axis. Nothing was compiled "
        "or run.\n"
        f"Steps that were measured, on 1 to 4 GPUs of a host, are modelled at {low} to {high} of their time, least "
        "with experts.\n\n"
        + "".join(f"  {what} at {quantity(one.value, one.unit)}: {one.source}\n" for what, one in facts.items())
        + network
        + f"  MFU is of {quantity(peak, 'FLOP/s')}, as --peak says or the chip's datasheet, without masked scores\n"
        f"  memory per GPU: the state, and an estimate of the rest; `gtp-jax inspect` compiles a step and counts\n"
        f"  bf16 weights and activations, --remat matmuls, --grad-reduce {options.grad_reduce}, experts evenly "
        "loaded"
    )
