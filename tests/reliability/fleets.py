"""Runs of two processes to which something happens, and what became of them."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gtp_jax
from gtp_jax.checkpoint import Checkpoints

ROOT = Path(gtp_jax.__file__).parents[1]

# What ends a process from inside native code.
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}

# A run of seconds: one virtual device a process.
USUAL = ["--preset=tiny", "--gtp=2", "--seq=32", "--batch=4", "--eval-batches=1", "--local-devices=1"]


class Pair:
    """Two processes of `gtp-jax train`.

    Attributes:
        folder: of the run's text, its output and what the processes print.
        out: the directory of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "run"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._runs: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, flags: list[str], environment: Mapping[str, str]) -> None:
        """Starts one of the two."""
        joined = [f"--coordinator=127.0.0.1:{self.port}", "--num-processes=2", f"--process-id={number}"]
        with (self.folder / f"process{number}.txt").open("wb") as output:
            self._runs[number] = subprocess.Popen(
                [sys.executable, "-m", "gtp_jax", "train", *joined, *USUAL, f"--out={self.out}", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment},
                cwd=self.folder,
            )

    def send(self, number: int, what: signal.Signals) -> None:
        """Sends a signal to one of the two."""
        self._runs[number].send_signal(what)

    def printed(self, number: int) -> str:
        """What one of the two has printed so far."""
        file = self.folder / f"process{number}.txt"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, pattern: str, number: int = 0, seconds: float = 120) -> None:
        """Waits until one of the two has printed something."""
        self._wait(lambda: re.search(pattern, self.printed(number)), f"print {pattern!r}", [number], seconds)

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        """Waits until a step has been logged."""
        log, said = self.out / "log.jsonl", f'"step": {step}, "loss"'
        self._wait(lambda: log.exists() and said in log.read_text(), f"log step {step}", self._runs, seconds)

    def wait_for_checkpoint(self, seconds: float = 120) -> None:
        """Waits until a checkpoint is complete, which is written while steps go on."""
        path = self.out / "checkpoints"

        def is_there() -> bool:
            return path.exists() and Checkpoints(path, read_only=True).latest() is not None

        self._wait(is_there, "complete a checkpoint", self._runs, seconds)

    def _wait(self, condition: Callable[[], Any], what: str, numbers: Iterable[int], seconds: float) -> None:
        """Waits for a condition.

        Raises:
            TimeoutError: if it does not hold in time, or one of these processes ends before.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or any(self._runs[number].poll() is not None for number in numbers):
                raise TimeoutError(f"the run did not {what}: {self.printed(0)[-2000:]}")
            time.sleep(0.05)

    def codes(self, seconds: float) -> dict[int, int | None]:
        """Waits for both; returns their exit codes, `None` of one that goes on for longer."""
        deadline = time.monotonic() + seconds
        while any(run.poll() is None for run in self._runs.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return {number: run.poll() for number, run in self._runs.items()}

    def end(self) -> None:
        """Kills what is left."""
        for run in self._runs.values():
            run.kill()
            run.wait()


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that goes wrong in a run of two processes.

    Attributes:
        name: in words.
        says: what one of the two must print, a regular expression; empty if the run must end as if nothing had been.
        flags: of both.
        other: more flags of process 1.
        environment: of process 1.
        first: what happens before they start.
        then: what happens while they run.
        victim: the process to which it happens, whose own exit code and output do not count.
        seconds: in which both must have ended, from the time when `then` has returned.
    """

    name: str
    says: str
    flags: tuple[str, ...] = ("--steps=4", "--save-every=2", "--eval-every=2")
    other: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    first: Callable[[Pair], None] = lambda pair: None
    then: Callable[[Pair], None] = lambda pair: None
    victim: int | None = None
    seconds: float = 120


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
        verdict: `found`, `went on`, or what must not be: `silent`, `unexplained`, `crash`, `raw traceback`, `hang`.
        codes: exit codes of the two.
        seconds: from the fault to the end of both.
        printed: by the two.
    """

    verdict: str
    codes: tuple[int | None, ...]
    seconds: float
    printed: str

    @property
    def good(self) -> bool:
        """Whether it is one of the two verdicts that are promised."""
        return self.verdict in ("found", "went on")


def suffer(fault: Fault, folder: Path) -> Outcome:
    """Lets a run suffer a fault."""
    folder.mkdir(parents=True)
    text = folder / "text"
    text.mkdir()
    for i in range(4):
        (text / f"{i}.txt").write_text(" ".join(str((i + 7) * k * k % 977) for k in range(1500)))
    pair = Pair(folder)
    try:
        fault.first(pair)
        for number in (0, 1):
            more = [*fault.flags, *(fault.other if number else ())]
            given = any(flag.startswith("--data") for flag in more)
            pair.start(
                number, [*more, *([] if given else [f"--data={text}"])], dict(fault.environment) if number else {}
            )
        fault.then(pair)
        began = time.monotonic()
        codes = pair.codes(fault.seconds)
        took = time.monotonic() - began
        time.sleep(2 if fault.victim is not None else 0)  # the last word may come from a guard that outlives a process
    finally:
        pair.end()
    others = [n for n in codes if n != fault.victim]
    printed = "".join(f"--- process {n}\n{pair.printed(n)}" for n in (others if fault.victim is not None else codes))
    return Outcome(_verdict(fault, [codes[n] for n in others], printed), tuple(codes.values()), took, printed)


def _verdict(fault: Fault, codes: list[int | None], printed: str) -> str:
    if None in codes:
        return "hang"
    if CRASHES & set(codes):
        return "crash"
    if "Traceback (most recent call last)" in printed:
        return "raw traceback"
    if not fault.says:
        return "went on" if set(codes) == {0} else "unexplained"
    if set(codes) == {0}:
        return "silent"
    return "found" if re.search(fault.says, printed) else "unexplained"
