"""Starts and stops the recorder of a process: a thread that watches the steps, and one that tells the other processes
where this one is.

[Note: recorder]
Each device writes a stamp to the host's memory where a layer begins and where it has been computed (`_places.py`). The
program is the same on all devices, so the number of stamps says which device is behind, and the id of the last one
where. Every second, a process writes a report for the others (`_report.py`), to the coordinator or to a folder
(`_meeting.py`). If a step takes too long, the process asks all others for their records. The first of the processes
that wait compares the reports; a process whose reports end is stopped or gone. Its last stamps can still be read on the
same host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, get_args

import jax

from ._meeting import AtCoordinator, InFolder, Meeting
from ._memory import Stamps, own_stamps
from ._places import PLACES
from ._report import RECENT, Report, sentence
from ._steps import Steps

Meet = Literal["coordinator", "folder"]

_TICK_S = 0.1
_LATE_S = 4.0  # if a tick is this late, the process was suspended
_BEAT_S = 1.0
_SILENT_BEATS = 4  # a process whose report does not change for this many beats is silent
_FIRST = 6.0  # how many times `at_least` the steps may take until one has ended: they set up communication
_COMPARING = 4  # the number of processes, from the first, that compare reports

# Environment variables that name the files in which NCCL records what it does.
_NCCL_FILES = ("NCCL_DEBUG_FILE", "NCCL_INSPECTOR_DUMP_DIR", "NCCL_PROFILE_DUMP_FILE")


class Recorder:
    """The recorder of this process, a context manager; see `recorder`.

    Args:
        folder: as in `recorder`.
        factor: as in `recorder`.
        at_least: as in `recorder`.
        meet: as in `recorder`.

    Attributes:
        said: the sentences that this process has printed.
        alarm: whether a process is known to be silent, so that a step takes too long whatever the others took.
    """

    def __init__(
        self, folder: Path | None, factor: float = 3.0, at_least: float = 10.0, meet: Meet = "coordinator"
    ) -> None:
        global _active
        if _active is not None:
            raise ValueError("a recorder runs already in this process. Call its `close()` before you start another.")
        self._process, self._processes = jax.process_index(), jax.process_count()
        self._factor, self._at_least_s = factor, at_least
        self._folder = folder
        self._meeting = _meeting(folder if meet == "folder" else None, self._processes)
        self._stamps = own_stamps()
        self.steps, self.said, self.alarm = Steps(), list[str](), False
        self._beats, self._answered = 0, time.monotonic()
        self._host_of_first = ""  # ` on` its name, once it is known
        self._over, self._reported = 0, 0  # the step that takes too long, and the last one that was reported
        self._late = False  # whether a step has exceeded the limit; otherwise, it takes too long by an alarm
        self._seen: tuple[int, dict[int, int], float] | None = None  # a step, and the beats of all at a time
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="gtp recorder", daemon=True)]
        if self._meeting is not None:
            self._threads.append(threading.Thread(target=self._report, name="gtp recorder, reports", daemon=True))
        PLACES.stamping = self._stamps is not None
        _active = self
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the recorder. Programs that have stamps keep them."""
        global _active
        PLACES.stamping = False
        _active = None if _active is self else _active
        self._stop.set()
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join(_BEAT_S)  # the coordinator may not answer any more

    def step(self, result: Any) -> None:
        """Records that a step of one's own was launched; those of `gtp_jax.train_step` are recorded anyway.

        Args:
            result: a result of the step, a pytree of arrays that are not donated to a later program.
        """
        with step_recorded() as record:
            record(result)

    @property
    def where(self) -> str:
        """Where this process is, for messages."""
        recent = self._recent()
        return recent[-1][1] if recent else f"in its Python code, {self.steps.python()}"

    def _limit_s(self) -> float:
        median_s = self.steps.median_s
        return self._at_least_s * _FIRST if median_s is None else max(self._at_least_s, self._factor * median_s)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(_TICK_S):
            now = time.monotonic()
            late_s, looked = now - looked - _TICK_S, now
            took_s = self.steps.look(late_s if late_s > _LATE_S else 0.0)
            oldest = self.steps.begun - self.steps.in_flight + 1
            self._late = took_s > self._limit_s()
            if not self._late and not (took_s and self.alarm):
                if self._over and (not took_s or oldest > self._over or self._reported != self._over):
                    self._over = 0
                continue
            if self._over != oldest:
                self._over = oldest
                self._write()
                if self._meeting is None:
                    self._say(sentence([self._own()], silent={}))
            elif self._reported != oldest and now - self._answered > 2 * _SILENT_BEATS * _BEAT_S:
                first, who = f"process 0{self._host_of_first}", f"process {self._process} on {socket.gethostname()}"
                silent = f"{first}, which holds JAX's coordinator, does not answer"
                self._say(f"step {oldest} hangs: {silent}; {who} waits {self.where}")

    def _say(self, text: str) -> None:
        self._reported = self._over
        median_s = self.steps.median_s
        usual = f"; steps took {median_s:.3g} s before" if median_s else ""
        self.said.append(f"{text}{usual}. Record: {self._path}")
        print(f"gtp recorder: {self.said[-1]}", file=sys.stderr, flush=True)

    def _recent(self) -> tuple[tuple[int, str], ...]:
        """Returns the last stamps of the local device that has executed the fewest."""
        if self._stamps is None:
            return ()
        return _recent(map(self._stamps[1].of, jax.local_devices()))

    def _own(self) -> Report:
        path = str(self._stamps[0]) if self._stamps else ""
        return Report(
            self._process,
            socket.gethostname(),
            self._beats,
            self.steps.begun,
            self.steps.in_flight > 0,
            bool(self._over),
            self._recent(),
            self.steps.python(),
            path,
            PLACES.digest(),
            self._stop.is_set(),
            self.steps.compiles,
        )

    def _report(self) -> None:
        assert self._meeting is not None
        question, fails = self._meeting.get("question"), False
        while not self._stop.wait(_BEAT_S):
            try:
                self._beats += 1
                self._meeting.put(str(self._process), dataclasses.asdict(self._own()))
                if not self._host_of_first and (first := self._meeting.get("0")) is not None:
                    self._host_of_first = f" on {first['host']}"
                asked = self._meeting.get("question")
                if asked != question:
                    question = asked
                    self._write()
                if self._over and self._reported != self._over:
                    self._compare(self._meeting)
                self._answered, fails = time.monotonic(), False
            except Exception:  # a process that has ended takes the coordinator with it, or a disk is full
                if self._stop.is_set():
                    return
                if not fails:  # once, not every second
                    traceback.print_exc()
                fails = True
        with contextlib.suppress(Exception):
            self._meeting.put(str(self._process), dataclasses.asdict(self._own()))

    def _compare(self, meeting: Meeting) -> None:
        """Reads the reports of all processes twice, and prints the sentence if this is the first process that waits."""
        over = self._over
        if self._seen is None or self._seen[0] != over:
            meeting.put("question", {"by": self._process, "step": over, "beat": self._beats})
            self._seen = over, _beats(self._read(meeting)), time.monotonic()
            return
        before_s = time.monotonic() - self._seen[2]
        if self._process >= _COMPARING or before_s < _SILENT_BEATS * _BEAT_S:
            return
        reports = self._read(meeting)
        beats = _beats(reports)
        silent = {process: before_s for process, beat in beats.items() if beat == self._seen[1].get(process)}
        silent.pop(self._process, None)
        if any(r.over and r.process not in silent and r.process < self._process for r in reports):
            self._reported = over  # by that process
            return
        missing = sorted({*range(self._processes)} - set(beats))
        if not (self._late or silent or missing):
            return  # the process that was silent is back
        self._say(
            sentence([self._exact(r) if r.process in silent else r for r in reports], silent=silent, missing=missing)
        )

    def _read(self, meeting: Meeting) -> list[Report]:
        each = (meeting.get(str(process)) for process in range(self._processes if self._process < _COMPARING else 0))
        return [Report.of_json(values) for values in each if values is not None]

    def _exact(self, report: Report) -> Report:
        """Returns the report of a silent process with its last stamps, if it is on this host and ids mean the same."""
        path = Path(report.stamps)
        if report.host != socket.gethostname() or report.places != PLACES.digest() or not path.is_file():
            return report
        return dataclasses.replace(report, recent=_recent(Stamps(path).each()) or report.recent)

    @property
    def _path(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="gtp-recorder-"))
        return self._folder / f"record-{self._process}.txt"

    def _write(self) -> None:
        """Writes where this process is: its devices' last stamps, and the stacks of its threads."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "w") as file:
            print(f"process {self._process} on {socket.gethostname()}, step {self.steps.begun}", file=file)
            for device in jax.local_devices() if self._stamps else ():
                print(f"\n{device}, last stamps:", file=file)
                for number, id in self._stamps[1].of(device) if self._stamps else ():
                    print(f"  {number:8d} {PLACES.text(id)}", file=file)
            for name in _NCCL_FILES:
                if name in os.environ:
                    print(f"\nNCCL writes to {name}={os.environ[name]}", file=file)
            print("\nPython threads:", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)


def recorder(
    folder: str | os.PathLike[str] | None = None,
    *,
    factor: float = 3.0,
    at_least: float = 10.0,
    meet: Meet = "coordinator",
) -> Recorder:
    """Starts a recorder: if a step hangs, one sentence says which process the others wait for, and in which layer.

        gtp_jax.distributed()
        gtp_jax.recorder()                # once, before the first step
        ...

    Call it in every process, after the processes are connected and before any program is traced: programs that are
    traced from then on tell the host which layer each device has come to. Their results are the same. Without kernels
    for the platform, only steps are recorded.

    If a step takes too long, each process writes its record: the last places of its devices, and the stacks of its
    Python threads. The processes compare where they are, over JAX's coordinator or the folder, and one of them prints
    the sentence to stderr. Nothing is ended.

    Args:
        folder: a folder for the records; by default, a temporary one, which the sentence names.
        factor: how many times the median of the last steps a step may take.
        at_least: the seconds that a step may take in any case; six times as many until a step has ended. Compilation
            does not count.
        meet: where the processes compare: at JAX's `"coordinator"`, which does not answer if process 0 is stopped; or
            in the `"folder"`, which all processes must share.

    Returns:
        The recorder. As a context manager, it stops at the end.

    Raises:
        ValueError: if a number is out of range, `folder` is not a folder, `meet` is an unknown name or needs a folder,
            or a recorder runs already.
    """
    for name, value, least in (("factor", factor, 1.0), ("at_least", at_least, 0.0)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not least < value < float("inf"):
            raise ValueError(f"`{name}` is {value!r}; it must be a finite number above {least:g}.")
    path = None if folder is None else Path(folder)
    if path is not None and not path.is_dir():
        raise ValueError(
            f"`folder` is {str(path)!r}, which is not a folder. Make it first, where all processes see it."
        )
    if meet not in get_args(Meet):
        raise ValueError(f"`meet` is {meet!r}; it must be one of {', '.join(map(repr, get_args(Meet)))}.")
    if meet == "folder" and path is None:
        raise ValueError("`meet` is 'folder', but there is no `folder`. Name one that all processes share.")
    return Recorder(path, float(factor), float(at_least), meet)


_active: Recorder | None = None


def active() -> Recorder | None:
    """Returns the recorder of this process, or `None` if there is none."""
    return _active


@contextlib.contextmanager
def step_recorded() -> Iterator[Callable[[Any], None]]:
    """Returns a context in which a step is called. It yields a function that must be called with the result, or with a
    part that is not donated to a later program. Does nothing if no recorder runs."""
    if _active is None:
        yield lambda result: None
        return
    steps, results = _active.steps, list[Any]()
    steps.begin()
    try:
        yield results.append
    finally:
        steps.launched(results)


def _meeting(folder: Path | None, processes: int) -> Meeting | None:
    if processes == 1:
        return None
    return AtCoordinator("gtp_jax_recorder") if folder is None else InFolder(folder)


def _recent(each: Iterable[Sequence[tuple[int, int]]]) -> tuple[tuple[int, str], ...]:
    """Returns the last stamps of the device that has executed the fewest, with the texts of their places."""
    slowest = min(each, key=lambda own: own[-1][0] if own else 0, default=[])
    return tuple((number, PLACES.text(id)) for number, id in slowest[-RECENT:])


def _beats(reports: list[Report]) -> dict[int, int]:
    return {report.process: report.beat for report in reports}
