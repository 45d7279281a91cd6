"""Compares checkpoints of gtp_jax with plain orbax and torch DCP: saving, restoring, and restoring on another mesh.

Except for the first round, measurements are warm: for every contender, programs are compiled and files are in the page
cache. All contenders write to the same directory, which is emptied in between. They flush their files to disk before a
save counts as done. Only gtp_jax computes checksums of arrays and files; torch has only the checksums of its zip
archives. gtp_jax and orbax use one process for all devices and compress (random numbers by 7 %); torch uses one process
per device and does not compress.
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

# The text of the last report about each contender.
ENDED = "ended"


# The goals, both upper limits: the time to restore on another mesh, divided by the time to restore on the same mesh;
# and the fraction of a save that is spent waiting for checksums.
_RESHARD_GOAL, _CHECKSUM_GOAL = 1.2, 0.05


@dataclasses.dataclass(frozen=True)
class SavingContender:
    """A program that saves and restores checkpoints.

    Attributes:
        name: the name shown in tables.
        variant: the variant in the job that the script is given.
        script: the name of the script in the folder `contenders`.
    """

    name: str
    variant: str
    script: str

    def command(self, job: str, devices: int, torch_python: str) -> list[str]:
        """Returns the command line that starts its process or, with PyTorch, one process per device."""
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        return [*(torchrun if self.is_torch else [sys.executable]), str(SCRIPTS / self.script), job]

    @property
    def is_torch(self) -> bool:
        """Whether it runs in PyTorch."""
        return self.script == "saving_torch.py"


SAVING_CONTENDERS = (
    SavingContender("gtp_jax", "gtp_jax", "saving_jax.py"),
    SavingContender("orbax", "orbax", "saving_jax.py"),
    SavingContender("torch-DCP async", "async", "saving_torch.py"),
    SavingContender("torch-DCP sync", "sync", "saving_torch.py"),
)


def chosen_saving_contenders(only: Sequence[str]) -> list[SavingContender]:
    """Returns the contenders of `SAVING_CONTENDERS` whose names contain all the words of one entry of `only`; all
    contenders if `only` is empty.

    Raises:
        ValueError: if no contender matches.
    """
    return by_words(SAVING_CONTENDERS, only, "contender")


@dataclasses.dataclass
class CheckpointTimes:
    """The times of one contender: for each operation, seconds per round, including the first round, which is cold.

    Attributes:
        who: the name of the contender.
        state_bytes: the size of the state's arrays in bytes.
        versions: the versions of the software it runs on.
        failure: why it did not complete all rounds; empty if it did.
        blocked: the seconds from the start of a save until training may continue.
        saved: the seconds from the start of a save until it is committed.
        restored: the seconds of a restore on the mesh that saved.
        moved: the seconds of a restore on another mesh; empty if there is no other mesh.
        save_checksums, restore_checksums: how many of the seconds of `saved` and of `restored` were spent waiting for
            checksums; empty for torch.
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
        """Returns the median seconds of all rounds except the first, or of the first if it is the only one; `None`
        without rounds."""
        seconds = getattr(self, what)
        return statistics.median(seconds[1:] or seconds) if seconds else None

    def ratio(self, what: str, of: str) -> float | None:
        """Returns the median of `what` divided by the median of `of`, over the rounds that have both; the first round
        counts only if it is the only one. Returns `None` without rounds, or if the divisor is 0."""
        part, whole = getattr(self, what), getattr(self, of)
        pairs = list(zip(part, whole, strict=False))
        pairs = pairs[1:] or pairs
        if not pairs:
            return None
        part, whole = (statistics.median(column) for column in zip(*pairs, strict=True))
        return part / whole if whole else None

    def take(self, facts: Mapping[str, Any]) -> None:
        """Records facts that the contender reported."""
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
    """Runs the contenders one after another on all devices. Weights are sharded over gtp. If the number of devices is
    even, states are also restored on another mesh, with half the gtp degree and tp 2.

    Args:
        chosen: the contenders to run.
        model: the model whose parameters and AdamW moments are saved, filled with random numbers.
        directory: the directory for the files, which holds one state at a time.
        rounds: the number of rounds after the first one.
        devices: the number of devices, which is the number of PyTorch's processes.
        platform: `gpu` or `cpu`.
        environment: the environment of the contenders' processes.
        timeout_s: the seconds that one contender may take, including its start and the first round; results up to then
            count.
        torch_python: the interpreter that has PyTorch.
        within_s: the seconds for all contenders together. A contender that is still running then is ended, and those
            after it are not run.
        report: called with a contender's times so far and what it has just done, at most `reports_of(rounds)` times per
            contender.

    Returns:
        The times of each contender, in the order of `chosen`.
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
            times.failure = f"not run: the time limit of {within_s:.0f} s for all contenders had passed"
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
            times.failure = f"timed out after {len(times.saved)} of {rounds + 1} saves in {allowed_s:.0f} s"
        elif code:
            times.failure = reason(code, output)
        report(times, ENDED)
    return done


def reports_of(rounds: int) -> int:
    """Returns the maximum number of reports per contender: its start, its end, and a save, a restore and a move in the
    first round and in each of the `rounds` after it."""
    return 2 + 3 * (rounds + 1)


def state_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the float32 arrays in a model's training state, without starting a JAX backend. Scalars are
    omitted."""
    like = TrainState.create(abstract_model(lambda rngs: build(model, rngs=rngs)), optax.adamw(1e-3))
    return [leaf.shape for leaf in jax.tree.leaves(like) if leaf.shape]


def float32_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """Returns the total size in bytes of float32 arrays of these shapes."""
    return sum(4 * math.prod(shape) for shape in shapes)


def verdicts(done: Sequence[CheckpointTimes]) -> list[str]:
    """Returns lines that compare gtp_jax's times with the goals and with plain orbax; none if gtp_jax did not run."""
    by_name = {times.who: times for times in done}
    ours, orbax = by_name.get("gtp_jax"), by_name.get("orbax")
    lines: list[str] = []
    if ours is None:
        return lines
    ratio, save = ours.ratio("moved", "restored"), ours.ratio("save_checksums", "saved")
    restore = ours.ratio("restore_checksums", "restored")
    if ratio is not None:
        lines.append(f"restoring on another mesh: {ratio:.2f} times the same mesh (goal: at most {_RESHARD_GOAL})")
    if save is not None:
        goal = f"(goal: at most {_CHECKSUM_GOAL:.0%})"
        lines.append(f"waiting for checksums: {save:.1%} of a save {goal}")
    if restore is not None:
        lines[-1] += f"; {restore:.1%} of a restore"
    mine, theirs = ours.median("saved"), orbax and orbax.median("saved")
    if mine and theirs:
        lines.append(f"a save: {mine / theirs:.2f} times plain orbax's, which computes no checksums")
    return lines
