"""Formats a plan after failures as tables."""

from __future__ import annotations

import collections
import dataclasses
from fractions import Fraction

from ..hlo import columns, fact, quantity
from ._faults import FaultReport


def fault_text(report: FaultReport, chip: str = "h200") -> str:
    """Returns tables of the replicas that continue, transfers, times, memory, owners of units and the best throughput.

    Args:
        report: the report of the plan.
        chip: the chip whose rates set the times.
    """
    plan = report.plan
    parts = [_replicas(report), _transfers(report), _times(report, chip), _memory(report), _owners(report)]
    rows = [
        ("this plan", _percent(plan.throughput)),
        ("leave out hurt replicas", _percent(plan.throughput_if_dropped)),
        ("all replicas at the lowest degree", _percent(plan.throughput_if_lowered)),
        ("devices that compute", _percent(Fraction(len(plan.active), plan.slots))),
    ]
    header = ("throughput, relative to the healthy run, if all time is spent computing", "")
    return "\n\n".join([*parts, columns(header, rows, right=(1,))])


def _replicas(report: FaultReport) -> str:
    plan = report.plan
    rows = []
    for replica in plan.replicas:
        own = range(replica.number * plan.gtp * plan.tp, (replica.number + 1) * plan.gtp * plan.tp)
        lists = ([slot for row in replica.slots for slot in row], [slot for row in replica.core for slot in row])
        out = [[slot for slot in slots if slot in own] for slots in (plan.idle, plan.failed)]
        rows.append((replica.number, replica.tp, replica.batch, *map(_slots, (*lists, *out))))
    left_out = sorted(set(range(plan.dp)) - {replica.number for replica in plan.replicas})
    text = columns(("replica", "tp", "sequences", "devices", "core devices", "idle", "failed"), rows, right=(1, 2))
    return text + (f"\nleft out: replicas {_slots(left_out)}" if left_out else "")


def _transfers(report: FaultReport) -> str:
    rows = []
    for name, moves in (("unfold", report.unfold), ("fold", report.fold)):
        for replica, one in zip(report.plan.replicas, moves, strict=True):
            most = [max(end.values(), default=0) for end in (one.sent(), one.received())]
            sizes = (one.bytes_needed, one.bytes_moved, *most, one.bytes_in_turn)
            rows.append((f"{name} {replica.number}", len(one.rounds), *(quantity(n, "B") for n in sizes)))
    header = ("transfer", "rounds", "needed", "with padding", "most sent", "most received", "in turn")
    return columns(header, rows, right=range(1, 7))


def _times(report: FaultReport, chip: str) -> str:
    link, memory = fact(chip, "link_ceiling").value, fact(chip, "memory_rate").value
    sizes = dataclasses.asdict(report.transferred)
    seconds = {name: size / (memory if name == "copies" else link) for name, size in sizes.items()}
    names = {
        "gather": "weights, gathered over replicas",
        "unfold": "weights, unfolded",
        "fold": "gradients, folded",
        "reduction": "gradients, summed over replicas",
        "copies": "copies within a device, before and after these",
    }
    rows = [(text, quantity(sizes[name], "B"), f"{1000 * seconds[name]:.1f} ms") for name, text in names.items()]
    header = (f"transfers of a step, one after another, on {chip}", "bytes", "predicted")
    return columns(header, [*rows, ("in total", "", f"{1000 * sum(seconds.values()):.1f} ms")], right=(1, 2))


def _memory(report: FaultReport) -> str:
    rows = []
    for replica, uses in zip(report.plan.replicas, report.memory, strict=True):
        slots = [slot for row in replica.slots for slot in row]
        alike = collections.defaultdict(list)
        for slot, use in zip(slots, uses, strict=True):
            alike[use].append(slot)
        for use, some in alike.items():
            sizes = (use.masters, use.weights, use.gradients, use.transfer, use.activations, use.total)
            rows.append((_slots(some), *(quantity(n, "B") for n in sizes)))
    header = ("memory of devices", "masters, AdamW", "weights", "gradients", "transfer", "activations", "in total")
    own = max(use.masters for uses in report.memory for use in uses)
    even = f"{quantity(report.even_masters, 'B')} ({own / report.even_masters - 1:+.1%})"
    return columns(header, rows, right=range(1, 7)) + f"\nan even share of masters and AdamW's state is {even}"


def _owners(report: FaultReport) -> str:
    degrees = sorted({replica.tp for replica in report.plan.replicas}, reverse=True)
    rows = [(name, *(_runs(of.get(tp, ())) for tp in degrees)) for name, of in report.owners.items()]
    return columns(("owners of units", *(f"tp {tp}" for tp in degrees)), rows)


def _runs(owners: tuple[int, ...]) -> str:
    return " ".join(map(str, owners)) if len(set(owners)) > 1 else f"{owners[0]} each" if owners else ""


def _slots(slots: list[int]) -> str:
    """Returns numbers as text; runs of at least three are written as `3-7`."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def _percent(share: Fraction) -> str:
    return f"{100 * float(share):.1f} %"
