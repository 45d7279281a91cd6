"""Loss curves of several recipes: a process each, one a GPU at a time."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from ._curve_settings import CurveSettings
from ._process import reason, run
from ._variants import VARIANTS, Variant

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
        settings: what it is of; `None` if the log does not say.
        failure: why there is no more, or empty.
    """

    variant: Variant
    steps: np.ndarray
    losses: np.ndarray
    held_out: dict[int, float]
    step_s: float | None
    settings: CurveSettings | None = None
    failure: str = ""

    @property
    def diverged(self) -> bool:
        """Returns whether a loss was no finite number."""
        return not np.isfinite(self.losses).all()

    def final(self, steps: int) -> float:
        """Returns the mean loss over the last twentieth of `steps`; NaN if the run did not come so far."""
        last = self.losses[(self.steps > steps * (1 - _TAIL)) & (self.steps <= steps)]
        return float(last.mean()) if len(self.steps) and self.steps[-1] >= steps else float("nan")


def run_curves(
    variants: Sequence[Variant],
    settings: CurveSettings,
    folder: Path,
    *,
    environment: Mapping[str, str],
    gpus: Sequence[str],
    within_s: float,
    report: Callable[[int], object],
) -> dict[str, str]:
    """Trains with each variant; what they log lies in `folder` as `NAME.jsonl`, what they print as `NAME.txt`.

    Args:
        variants: in the order in which they start. Logs of theirs that lie there are removed.
        settings: the same for all.
        folder: exists.
        environment: of the processes.
        gpus: names for CUDA_VISIBLE_DEVICES; a process each at a time. None: one process, on the CPU.
        within_s: seconds after which all are ended, wherever they are.
        report: called with the number of steps made by all so far.

    Returns:
        By name of those that failed, why.
    """
    deadline, waiting, stop = time.monotonic() + within_s, list(variants), threading.Event()
    failures: dict[str, str] = {}
    for variant in variants:  # of an earlier run, which would be taken for those of one that is not begun in time
        (folder / f"{variant.name}.jsonl").unlink(missing_ok=True)

    def train(gpu: str) -> None:
        shown = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        while waiting:
            variant, left = waiting.pop(0), deadline - time.monotonic()
            if left <= 0:
                failures[variant.name] = "not begun in time"
                continue
            log = folder / f"{variant.name}.jsonl"
            command = [sys.executable, str(_SCRIPT), variant.name, "--log", str(log), *settings.flags]
            with (folder / f"{variant.name}.txt").open("w") as printed:
                code, output = run(command, {**environment, **shown}, left, printed.write, stop)
            if code != 0:
                failures[variant.name] = (
                    f"ended after {within_s:.0f} s for all" if code is None else reason(code, output)
                )

    places = list(gpus) or [""]
    with ThreadPoolExecutor(len(places)) as pool:
        runs = [pool.submit(train, place) for place in places]
        try:
            while wait(runs, _POLL_S).not_done:
                report(sum(len(read_curve(v, folder).steps) for v in variants))
        except BaseException:
            waiting.clear()
            stop.set()
            raise
    for one in runs:
        one.result()
    report(sum(len(read_curve(v, folder).steps) for v in variants))
    return failures


def read_curve(variant: Variant, folder: Path, failure: str = "") -> Curve:
    """Returns a variant's log as far as it goes."""
    path = folder / f"{variant.name}.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # cut off when the run was ended
    losses = [(r["step"], r["loss"]) for r in records if "loss" in r]
    return Curve(
        variant,
        np.array([step for step, _ in losses], int),
        np.array([loss for _, loss in losses], float),
        {r["step"]: r["held_out"] for r in records if "held_out" in r},
        next((r["step_s"] for r in records if "step_s" in r), None),
        next((CurveSettings.of(r["settings"]) for r in records if "settings" in r), None),
        failure,
    )


def settings_in(folder: Path, but: Sequence[Variant] = ()) -> CurveSettings | None:
    """Returns what the logs in a folder are of, without those of some variants; `None` if there are no others.

    Raises:
        ValueError: if they are of different settings, naming two; or one does not say of which.
    """
    settings_by_name: dict[str, CurveSettings] = {}
    for variant in VARIANTS.values():
        if variant not in but and (folder / f"{variant.name}.jsonl").exists():
            settings = read_curve(variant, folder).settings
            if settings is None:
                raise ValueError(
                    f"{folder / variant.name}.jsonl does not say of which settings it is. Remove it, or choose another "
                    "--out."
                )
            settings_by_name[variant.name] = settings
    for name, settings in settings_by_name.items():
        first = next(iter(settings_by_name))
        if settings != settings_by_name[first]:
            raise ValueError(
                f"{folder} holds logs of different settings, which are not to be compared: {name}.jsonl is of "
                f"{settings.unlike(settings_by_name[first], f'{first}.jsonl')}. Put them into folders of their own."
            )
    return next(iter(settings_by_name.values()), None)


def check_comparable(folder: Path, settings: CurveSettings, variants: Sequence[Variant]) -> None:
    """Checks that the logs in a folder, but for those of some variants, are of these settings.

    Raises:
        ValueError: naming what differs.
    """
    before = settings_in(folder, but=variants)
    if before is not None and before != settings:
        raise ValueError(
            f"{folder} holds logs of other settings, which are not to be compared: this is "
            f"{settings.unlike(before, 'those')}. Choose another --out."
        )


def slowest_first(variants: Sequence[Variant]) -> list[Variant]:
    """Returns variants in an order in which no GPU is left alone with a slow one at the end."""
    return sorted(variants, key=lambda variant: variant.recipe.operands is None)


def gpus_of(environment: Mapping[str, str], platform: str, count: int) -> list[str]:
    """Returns the names of the GPUs for CUDA_VISIBLE_DEVICES, none on a CPU."""
    if platform not in ("gpu", "cuda"):
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(count)]
