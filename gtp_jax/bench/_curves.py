"""Loss curves of several recipes: a process each, one a GPU at a time."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ._process import reason
from ._variants import Variant

_SCRIPT = Path(__file__).parent / "contenders" / "curve.py"
_POLL_S = 0.5
_TAIL = 0.05


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a run has logged.

    Attributes:
        variant: what was trained.
        steps: numbers of the steps that `losses` are of.
        losses: nats a token, of the step's own batch.
        held_out: loss on held-out text by step.
        step_s: median seconds of a step; `None` if the run did not end.
        failure: why there is no more, or empty.
    """

    variant: Variant
    steps: np.ndarray
    losses: np.ndarray
    held_out: dict[int, float]
    step_s: float | None
    failure: str = ""

    @property
    def diverged(self) -> bool:
        """Whether a loss was no finite number."""
        return not np.isfinite(self.losses).all()

    def final(self, steps: int) -> float:
        """Mean loss over the last twentieth of `steps`; NaN if the run did not come so far."""
        last = self.losses[(self.steps > steps * (1 - _TAIL)) & (self.steps <= steps)]
        return float(last.mean()) if len(self.steps) and self.steps[-1] >= steps else float("nan")


def run_curves(
    variants: Sequence[Variant],
    flags: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str],
    gpus: Sequence[str],
    within_s: float,
    report: Callable[[int], None],
) -> dict[str, str]:
    """Trains with each variant; what they log lies in `folder` as `NAME.jsonl`, what they print as `NAME.txt`.

    Args:
        variants: in the order in which they start. Logs of theirs that lie there are removed.
        flags: of `contenders/curve.py`, the same for all.
        folder: exists.
        environment: of the processes.
        gpus: names for CUDA_VISIBLE_DEVICES; a process each at a time. None: one process, on the CPU.
        within_s: seconds after which all are ended, wherever they are.
        report: called with the number of steps made by all so far.

    Returns:
        By name of those that failed, why.
    """
    deadline, waiting, failures = time.monotonic() + within_s, list(variants), {}
    running: dict[str, tuple[Variant, subprocess.Popen[bytes]]] = {}
    places = list(gpus) or [""]
    for variant in variants:  # of an earlier run, which would be taken for those of one that is not begun in time
        (folder / f"{variant.name}.jsonl").unlink(missing_ok=True)
    try:
        while (waiting or running) and time.monotonic() < deadline:
            for place in places:
                if place not in running and waiting:
                    running[place] = (waiting[0], _start(waiting.pop(0), flags, folder, environment, place))
                if place in running and running[place][1].poll() is not None:
                    variant, process = running.pop(place)
                    if process.returncode:
                        printed = (folder / f"{variant.name}.txt").read_text()
                        failures[variant.name] = reason(process.returncode, printed)
            report(sum(len(read_curve(v, folder).steps) for v in variants))
            time.sleep(_POLL_S)
    finally:
        for variant, process in running.values():
            process.kill()
            process.wait()
            failures[variant.name] = f"ended after {within_s:.0f} s for all"
    return {**failures, **{variant.name: "not begun in time" for variant in waiting}}


def read_curve(variant: Variant, folder: Path, failure: str = "") -> Curve:
    """A variant's log as far as it goes."""
    path = folder / f"{variant.name}.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            break  # cut off when the run was ended
    losses = [(r["step"], r["loss"]) for r in found if "loss" in r]
    return Curve(
        variant,
        np.array([step for step, _ in losses], int),
        np.array([loss for _, loss in losses], float),
        {r["step"]: r["held_out"] for r in found if "held_out" in r},
        next((r["step_s"] for r in found if "step_s" in r), None),
        failure,
    )


def _start(
    variant: Variant, flags: Sequence[str], folder: Path, environment: Mapping[str, str], gpu: str
) -> subprocess.Popen[bytes]:
    log = folder / f"{variant.name}.jsonl"
    shown = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    with (folder / f"{variant.name}.txt").open("wb") as printed:
        command = [sys.executable, str(_SCRIPT), variant.name, "--log", str(log), *flags]
        return subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**environment, **shown}
        )
