"""Trains a model with several recipes, each in its own process and one at a time per GPU, and reads the loss curves."""

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
    """The log of a run.

    Attributes:
        variant: the variant that was trained.
        steps: the step numbers of `losses`.
        losses: the training losses in nats per token, each on its step's own batch.
        held_out: the losses on held-out text, by step.
        step_s: the median seconds per step; `None` if the run did not finish.
        settings: the settings of the run; `None` if the log does not contain them.
        failure: why the run ended early; empty if it did not.
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
        """Whether any loss was not finite."""
        return not np.isfinite(self.losses).all()

    def final(self, steps: int) -> float:
        """Returns the mean loss over the last twentieth of `steps`; NaN if the run did not get that far."""
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
    """Trains each variant, and writes its log to `NAME.jsonl` and its output to `NAME.txt` in `folder`.

    Args:
        variants: the variants, in the order in which they start. Existing logs of these variants are removed.
        settings: the settings that all variants share.
        folder: an existing folder.
        environment: the environment of the processes.
        gpus: the names of the GPUs for CUDA_VISIBLE_DEVICES. Each GPU runs one process at a time. If empty, one process
            at a time runs on the CPU.
        within_s: the seconds after which running variants are ended, and others are not started.
        report: called repeatedly with the number of steps made so far by all variants.

    Returns:
        The reasons of the failures, by name of the variants that failed.
    """
    deadline, waiting, stop = time.monotonic() + within_s, list(variants), threading.Event()
    failures: dict[str, str] = {}
    for variant in variants:  # an earlier log would be mistaken for that of a variant that does not start in time
        (folder / f"{variant.name}.jsonl").unlink(missing_ok=True)

    def train(gpu: str) -> None:
        shown = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        while waiting:
            variant, left = waiting.pop(0), deadline - time.monotonic()
            if left <= 0:
                failures[variant.name] = "not started in time"
                continue
            log = folder / f"{variant.name}.jsonl"
            command = [sys.executable, str(_SCRIPT), variant.name, "--log", str(log), *settings.flags]
            with (folder / f"{variant.name}.txt").open("w") as printed:
                code, output = run(command, {**environment, **shown}, left, printed.write, stop)
            if code != 0:
                failures[variant.name] = (
                    f"ended at the time limit of {within_s:.0f} s for all runs"
                    if code is None
                    else reason(code, output)
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
    """Returns a variant's log, as far as it has been written.

    Args:
        variant: the variant.
        folder: the folder of the log, which may be missing.
        failure: why the run ended early; empty if it did not.

    Raises:
        ValueError: if another version wrote the settings in the log.
    """
    path = folder / f"{variant.name}.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the line was truncated when the run was ended
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
    """Returns the settings of the logs in a folder, ignoring the variants in `but`; `None` if there are no other logs.

    Raises:
        ValueError: if two logs have different settings, or if a log does not contain its settings or has those of
            another version.
    """
    settings_by_name: dict[str, CurveSettings] = {}
    for variant in VARIANTS.values():
        if variant not in but and (folder / f"{variant.name}.jsonl").exists():
            settings = read_curve(variant, folder).settings
            if settings is None:
                raise ValueError(
                    f"{folder / variant.name}.jsonl does not contain its settings. Remove it, or choose another --out."
                )
            settings_by_name[variant.name] = settings
    for name, settings in settings_by_name.items():
        first = next(iter(settings_by_name))
        if settings != settings_by_name[first]:
            raise ValueError(
                f"{folder} holds logs with different settings, which cannot be compared: {name}.jsonl has "
                f"{settings.unlike(settings_by_name[first], f'{first}.jsonl')}. Put them into separate folders."
            )
    return next(iter(settings_by_name.values()), None)


def check_comparable(folder: Path, settings: CurveSettings, variants: Sequence[Variant]) -> None:
    """Checks that the logs in a folder have these settings, ignoring the logs of `variants`.

    Raises:
        ValueError: if they do not, or if `settings_in` raises an error. The message names what differs.
    """
    before = settings_in(folder, but=variants)
    if before is not None and before != settings:
        raise ValueError(
            f"{folder} holds logs with other settings, which cannot be compared: this run has "
            f"{settings.unlike(before, 'those')}. Choose another --out."
        )


def slowest_first(variants: Sequence[Variant]) -> list[Variant]:
    """Returns the variants with the slow ones first, which are those with quantized matmuls, so that none of them runs
    alone at the end."""
    return sorted(variants, key=lambda variant: variant.recipe.operands is None)


def gpus_of(environment: Mapping[str, str], platform: str, count: int) -> list[str]:
    """Returns the names of the GPUs for CUDA_VISIBLE_DEVICES; an empty list on a CPU."""
    if platform not in ("gpu", "cuda"):
        return []
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(index) for index in range(count)]
