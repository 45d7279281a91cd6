"""Checkpoints of a model's training state beside plain orbax and torch DCP: saving, restoring, moving to another mesh.

Measurements are warm: for every contender, programs are compiled and files are in the page cache. All of them write to
one directory, which is emptied in between, and flush what they have written to the disk before they call it saved.
Only gtp_jax makes checksums of arrays and files; torch's are those of its zip archives. gtp_jax and orbax, one process
for all devices, compress (random numbers by 7 %); torch, a process a device, does not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax

from gtp_jax.models import ModelConfig, build
from gtp_jax.nn import abstract_model
from gtp_jax.train import TrainState

from ._choice import by_words
from ._contenders import SCRIPTS
from ._process import reason, run
from .contenders.workload import MARK

# The last thing that is reported of a contender.
ENDED = "ended"


# Goals: moving to another mesh, in restores onto the same mesh; and waiting for checksums, as a share of a save.
_RESHARD_GOAL, _CHECKSUM_GOAL = 1.2, 0.05


@dataclasses.dataclass(frozen=True)
class SavingContender:
    """A program that saves and restores.

    Attributes:
        name: for tables.
        variant: passed to its script.
        script: file in the folder `contenders`.
    """

    name: str
    variant: str
    script: str

    def command(self, job: str, devices: int, torch_python: str) -> list[str]:
        """Returns the command line of its process; with PyTorch, of one process a device."""
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        return [*(torchrun if self.is_torch else [sys.executable]), str(SCRIPTS / self.script), job]

    @property
    def is_torch(self) -> bool:
        """Returns whether it runs in PyTorch."""
        return self.script == "saving_torch.py"


SAVING_CONTENDERS = (
    SavingContender("gtp_jax", "gtp_jax", "saving_jax.py"),
    SavingContender("orbax", "orbax", "saving_jax.py"),
    SavingContender("torch-DCP async", "async", "saving_torch.py"),
    SavingContender("torch-DCP sync", "sync", "saving_torch.py"),
)


def chosen_saving_contenders(only: Sequence[str]) -> list[SavingContender]:
    """Returns those of `SAVING_CONTENDERS` whose name has all the words of one of `only`; all of them if `only` is
    empty.

    Raises:
        ValueError: if none has.
    """
    return by_words(SAVING_CONTENDERS, only, "contender")


@dataclasses.dataclass
class CheckpointTimes:
    """Seconds of each round, by what was done; the first round, in which all is cold, included.

    Attributes:
        who: name of the contender.
        state_bytes: of the arrays.
        versions: of what it runs on.
        failure: why it did not do all rounds; empty if it did.
        blocked: until training may go on after a save began.
        saved: until the save is committed.
        restored: onto the mesh that saved.
        moved: onto another mesh; empty if there is none.
        save_checksums, restore_checksums: what of `saved` and of `restored` was waiting for checksums.
    """

    who: str
    state_bytes: int = 0
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    failure: str = ""
    blocked: list[float] = dataclasses.field(default_factory=list)
    saved: list[float] = dataclasses.field(default_factory=list)
    restored: list[float] = dataclasses.field(default_factory=list)
    moved: list[float] = dataclasses.field(default_factory=list)
    save_checksums: list[float] = dataclasses.field(default_factory=list)
    restore_checksums: list[float] = dataclasses.field(default_factory=list)

    def median(self, what: str) -> float | None:
        """Returns seconds, of the rounds after the first; of the first if there is no other; `None` if there is
        none."""
        seconds = getattr(self, what)
        return statistics.median(seconds[1:] or seconds) if seconds else None

    def ratio(self, what: str, of: str) -> float | None:
        """Returns the median of `what` as a share of that of another, of rounds that have both, the first only if no
        other."""
        part, whole = getattr(self, what), getattr(self, of)
        pairs = list(zip(part, whole, strict=False))
        pairs = pairs[1:] or pairs
        if not pairs:
            return None
        part, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
        return part / whole if whole else None

    def take(self, facts: Mapping[str, Any]) -> None:
        """Records what the contender has reported."""
        for name, value in facts.items():
            if isinstance(getattr(self, name), list):
                getattr(self, name).append(value)
            else:
                setattr(self, name, value)


def measure_checkpoints(
    chosen: Sequence[SavingContender],
    model: ModelConfig,
    directory: Path,
    *,
    rounds: int,
    devices: int,
    platform: str,
    environment: Mapping[str, str],
    timeout_s: float,
    torch_python: str = sys.executable,
    within_s: float = math.inf,
    report: Callable[[CheckpointTimes, str], None],
) -> list[CheckpointTimes]:
    """Runs contenders one after another on all devices: weights sharded over gtp, then moved to half the gtp and tp 2.

    Args:
        chosen: which.
        model: whose parameters and AdamW moments are saved, filled with random numbers.
        directory: for the files, one state at a time.
        rounds: after a first one.
        devices: how many there are.
        platform: `gpu` or `cpu`.
        environment: of their processes.
        timeout_s: for one contender, its start and the first round included; what it did until then counts.
        torch_python: the interpreter that has PyTorch.
        within_s: for all of them; those that come too late are not run.
        report: told what a contender's times are now and what it has done, `reports_of(rounds)` times or less each.
    """
    deadline = time.monotonic() + within_s
    shapes = [list(shape) for shape in state_shapes(model)]
    given = {"rounds": rounds, "model": dataclasses.asdict(model), "shapes": shapes, "platform": platform}
    done = []
    for contender in chosen:
        times = CheckpointTimes(contender.name)
        done.append(times)
        allowed_s = min(timeout_s, deadline - time.monotonic())
        if allowed_s <= 0:
            times.failure = f"not run: {within_s:.0f} s for all contenders were over"
            report(times, ENDED)
            continue

        def hear(line: str, times: CheckpointTimes = times) -> None:
            if line.startswith(MARK):
                facts = json.loads(line[len(MARK) :])
                times.take(facts)
                report(times, ", ".join(f"{k} {v:.3g} s" for k, v in facts.items() if isinstance(v, float)))

        job = json.dumps({**given, "variant": contender.variant, "directory": str(directory / "checkpoint")})
        try:
            command = contender.command(job, devices, torch_python)
            code, output = run(command, environment, allowed_s, hear)
        finally:
            shutil.rmtree(directory / "checkpoint", ignore_errors=True)
        if code is None:
            times.failure = f"{len(times.saved)} of {rounds + 1} saves in {allowed_s:.0f} s, then ended"
        elif code:
            times.failure = reason(code, output)
        report(times, ENDED)
    return done


def reports_of(rounds: int) -> int:
    """Returns how many reports of each contender there are at most: its start, save, restore and move a round, its
    end."""
    return 2 + 3 * (rounds + 1)


def state_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the float32 arrays of a model's training state. Starts no backend."""
    like = TrainState.create(abstract_model(lambda rngs: build(model, rngs=rngs)), optax.adamw(1e-3))
    return [leaf.shape for leaf in jax.tree.leaves(like) if leaf.shape]


def float32_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """Returns the bytes of all arrays together."""
    return sum(4 * math.prod(shape) for shape in shapes)


def verdicts(done: Sequence[CheckpointTimes]) -> list[str]:
    """Says what the times mean for gtp_jax: another mesh, checksums, plain orbax; nothing without its own times."""
    by_name = {times.who: times for times in done}
    ours, orbax = by_name.get("gtp_jax"), by_name.get("orbax")
    lines: list[str] = []
    if ours is None:
        return lines
    ratio, save = ours.ratio("moved", "restored"), ours.ratio("save_checksums", "saved")
    restore = ours.ratio("restore_checksums", "restored")
    if ratio is not None:
        lines.append(f"another mesh: {ratio:.2f} times the same one (goal: at most {_RESHARD_GOAL})")
    if save is not None:
        goal = f"(goal: at most {_CHECKSUM_GOAL:.0%})"
        lines.append(f"checksums: {save:.1%} of a save is waiting for them {goal}")
    if restore is not None:
        lines[-1] += f"; {restore:.1%} of a restore"
    mine, theirs = ours.median("saved"), orbax and orbax.median("saved")
    if mine and theirs:
        lines.append(f"a save: {mine / theirs:.2f} times plain orbax's, which makes no checksums")
    return lines
