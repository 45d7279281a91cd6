"""Harms elastic runs at random moments, many at once, and prints what became of them.

    python tests/elastic/kills.py --kills 50 --at-once 10

Each run has two processes on virtual CPU devices, of which a random one is killed, stopped or made to raise at a random
moment. It must end by itself, with the losses of a run that was left alone. A run that ended before it was harmed does
not count, and another takes its place.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where pytest finds the same modules

from elastic.fleets import elastic, events, flags, logged, read_records, train, write_text  # noqa: E402

TOLERANCE = 1e-12
OF_TWO = dict(steps=12, batch=8, gtp=2, eval_every=6, save_every=100, snapshot_interval=2)
HARM = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR2}
PARTS = ("detection_s", "start_s", "restore_s", "compile_s", "step_s", "total_s")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        seed: that it was made from.
        harm: a key of `HARM`.
        harmed: whether it was harmed before its end.
        hung: whether it had not ended in time.
        status: of its end; 0 if it needed nobody.
        error: the largest relative difference of a logged value; infinite if other values were logged.
        recovered: events, one a recovery.
        output: its last lines.
    """

    seed: int
    harm: str
    harmed: bool
    hung: bool
    status: int | None
    error: float
    recovered: Sequence[dict[str, Any]]
    output: str

    @property
    def equal(self) -> bool:
        """Says whether it ended by itself with the losses of a run that was left alone."""
        return self.status == 0 and self.error <= TOLERANCE


def left_alone(text: Path, folder: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the log of such a run in one process, without a supervisor."""
    folder.mkdir(parents=True, exist_ok=True)
    changes = {name: value for name, value in changes.items() if name != "snapshot_interval"}
    with train(flags(text, folder / "run", **changes), folder) as run:
        status = run.wait(600)
    assert status == 0, (folder / "output.txt").read_text()[-4000:]
    return read_records(folder / "run")


def harmed_run(
    seed: int, text: Path, folder: Path, expected: list[dict[str, Any]], timeout_s: float, slot: str | None = None
) -> Outcome:
    """Starts a run, harms it, and waits for its end.

    Args:
        seed: of the moment, the process and the harm.
        text: to train on.
        folder: for what it writes.
        expected: the log of a run that was left alone.
        timeout_s: after which it counts as hung.
        slot: cores that it may use, as `taskset` has them; all by default.
    """
    chance = random.Random(seed)
    name, victim, after = chance.choice(list(HARM)), chance.randrange(2), chance.randrange(OF_TWO["steps"])
    delay_s = chance.uniform(0, 20 if after == 0 else 1)
    folder.mkdir(parents=True, exist_ok=True)
    out, deadline = folder / "run", time.monotonic() + timeout_s
    with elastic(flags(text, out, **OF_TWO), folder) as run:
        if slot is not None:
            os.sched_setaffinity(run.pid, {int(core) for core in slot.split(",")})
        while run.poll() is None and not (events(out, "fleet") if after == 0 else logged(out, after)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        time.sleep(delay_s)
        harmed = run.poll() is None and bool(events(out, "fleet"))
        if harmed:
            try:
                os.kill(events(out, "fleet")[0]["processes"][victim], HARM[name])
            except ProcessLookupError:
                harmed = False
        try:
            status = run.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
    harmed = harmed and (status != 0 or bool(events(out, "failure")))
    output = (folder / "output.txt").read_text()[-4000:]
    return Outcome(
        seed, name, harmed, status is None, status, difference(out, expected), events(out, "recovered"), output
    )


def difference(out: Path, expected: list[dict[str, Any]]) -> float:
    """Returns the largest relative difference of a run's log from another; infinite if they have other entries."""
    found = read_records(out) if (out / "log.jsonl").exists() else []
    if [sorted(record) for record in found] != [sorted(record) for record in expected]:
        return math.inf
    worst = 0.0
    for record, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            error = 0.0 if record[name] == value else abs(record[name] - value) / max(abs(value), 1e-300)
            worst = math.inf if math.isnan(error) else max(worst, error)
    return worst


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns what became of the runs, by harm, and what recoveries took."""
    lines = [f"{'harm':8}{'tried':>7}{'equal':>7}{'hung':>6}{'needed a person':>17}{'steps lost, most':>18}"]
    for name in (*HARM, "all"):
        some = [one for one in outcomes if name in (one.harm, "all")]
        lost = max((event["steps_lost"] for one in some for event in one.recovered), default=0)
        counts = [sum(one.equal for one in some), sum(one.hung for one in some)]
        persons = sum(one.status not in (0, None) for one in some)
        lines.append(f"{name:8}{len(some):7}{counts[0]:7}{counts[1]:6}{persons:17}{lost:18}")
    lines.append("")
    recovered = [event for one in outcomes for event in one.recovered]
    lines.append(f"{'seconds of ' + str(len(recovered)) + ' recoveries':28}{'median':>8}{'most':>8}")
    for part in PARTS if recovered else ():
        seconds = [event[part] for event in recovered]
        lines.append(f"{part.removesuffix('_s'):28}{statistics.median(seconds):8.1f}{max(seconds):8.1f}")
    worst = max((one.error for one in outcomes), default=0.0)
    lines.append(f"\nlargest relative difference of a loss or norm: {worst:.1e}")
    for one in outcomes:
        lost = max((event["steps_lost"] for event in one.recovered), default=0)
        if not one.equal or lost > OF_TWO["snapshot_interval"]:
            found = f"status {one.status}, error {one.error:.1e}, steps lost {lost}"
            lines.append(f"\nseed {one.seed}, {one.harm}: {found}\n{one.output}")
    return "\n".join(lines)


def main() -> int:
    """Returns 0 if all runs ended as they should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="runs to harm (default: 50)")
    parser.add_argument("--at-once", type=int, default=1, metavar="K", help="runs at a time (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first run (default: 0)")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="of a run, in seconds (default: 300)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S", help="start no run after these seconds")
    options = parser.parse_args()
    began = time.monotonic()
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // options.at_once
    # a part of the cores for each run that goes on at the same time: else each starts threads for all
    slots = [",".join(map(str, cores[i * share : (i + 1) * share])) for i in range(options.at_once)] if share else []
    lock, outcomes = threading.Lock(), []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        text = write_text(root / "text")
        expected = left_alone(text, root / "alone", OF_TWO)
        print(f"a run that was left alone took {time.monotonic() - began:.0f} s", flush=True)

        def one(seed: int) -> Outcome:
            with lock:
                slot = slots.pop() if slots else None
            try:
                return harmed_run(seed, text, root / str(seed), expected, options.timeout, slot)
            finally:
                if slot is not None:
                    with lock:
                        slots.append(slot)

        with ThreadPoolExecutor(options.at_once) as pool:
            seed = options.seed + options.kills
            running = {pool.submit(one, each) for each in range(options.seed, seed)}
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    seconds = time.monotonic() - began
                    if outcome.harmed:
                        outcomes.append(outcome)
                        said = "equal" if outcome.equal else "NOT EQUAL"
                        print(
                            f"{seconds:5.0f} s: {len(outcomes)}, seed {outcome.seed}, {outcome.harm}: {said}",
                            flush=True,
                        )
                    elif seconds < options.limit:
                        running.add(pool.submit(one, seed))
                        seed += 1
                if time.monotonic() - began > options.limit:
                    for future in running:
                        future.cancel()
                    running = {future for future in running if not future.cancelled()}
    print(f"\n{table(outcomes)}\n\n{time.monotonic() - began:.0f} s in all")
    return 0 if outcomes and all(one.equal for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
