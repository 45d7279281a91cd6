"""Shows and logs the progress of a run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax
from tqdm import tqdm

from ._job import Evaluation, Job
from ._log import Log
from ._tracker import open_trackers


class Progress:
    """The progress bar, the lines above it and the log. A context manager. Silent in all processes but the first.

    Args:
        job: the run.
        log: the path of the log.
        begin: the number of updates made before.
        guard: called before each write to the log; raises an error if the log no longer belongs to this run.
        stop: called if standard output or standard error cannot be written, to end the run after a step, with a
            checkpoint. The context manager then raises the error.
    """

    def __init__(
        self,
        job: Job,
        log: Path,
        begin: int,
        guard: Callable[[], None],
        stop: Callable[[], None],
    ) -> None:
        self._job = job
        self._speaks = jax.process_index() == 0
        tracked = job.limits.log_to if self._speaks else ()
        trackers = open_trackers(tracked, log.parent, begin, job.settings)
        self._log = Log(log if self._speaks else None, begin, guard, trackers)
        self._pace = _Pace(job.per_step[0])
        self._shown = dict(job.shown)
        kind, every = (_Bar, 0.2) if sys.stderr.isatty() else (_Lines, 30)  # in seconds
        self._bar = kind(
            total=job.limits.steps,
            initial=begin,
            unit="step",
            disable=not self._speaks,
            dynamic_ncols=True,
            mininterval=every,
            miniters=0,  # otherwise tqdm's own thread prints a second time within the interval
        )
        self._begun = False
        self._stop, self._unheard = stop, None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        with self._printing():
            self._bar.close()
        self._log.close()
        if kind is None and self._unheard is not None:
            raise self._unheard

    @contextlib.contextmanager
    def _printing(self) -> Iterator[None]:
        """Asks the run to stop if what this context prints cannot be written. From then on, prints nothing."""
        try:
            yield
        except OSError as error:
            if self._unheard is None:
                self._unheard, self._speaks, self._bar.disable = error, False, True
                self._stop()

    @property
    def speed(self) -> float:
        """The work per second of all devices together, in units of `Job.per_step`, excluding the first step and
        `paused` time; 0 if unknown."""
        return self._pace.per_s

    def step(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Shows and logs a step that has ended."""
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        self._pace.step()
        extra = {"expert_load": float(metrics["expert_load"])} if "expert_load" in metrics else {}
        if self._job.learning_rate is not None:
            extra["learning_rate"] = self._job.learning_rate(step - 1)
        speed, unit = self._pace.per_s, self._job.per_step[1]
        self._log.write(step, loss=loss, grad_norm=norm, **extra, **{f"{unit}_per_s": round(speed, 1)})
        self._shown |= {"loss": f"{loss:.3f}", f"{unit}/s": f"{speed:,.0f}"}
        self._bar.set_postfix(self._shown, refresh=False)
        with self._printing():
            if self._begun:
                self._bar.update(1)
            else:
                self._begin(step)

    def _begin(self, step: int) -> None:
        """Starts the bar's clock: the time until the first step has ended, which compiles, says nothing of the rest."""
        self._begun = True
        self._bar.initial = self._bar.n = self._bar.last_print_n = step
        self._bar.start_t = self._bar.last_print_t = time.monotonic()
        self._bar.refresh()

    def rewind(self, step: int) -> None:
        """Shows and logs that the run continues from an earlier step."""
        self._log.rewind(step)
        self._bar.n = step
        with self._printing():
            self._bar.refresh()

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._speaks:
            with self._printing():
                self._bar.write(line, file=sys.stdout)
                sys.stdout.flush()

    def evaluated(self, step: int, found: Evaluation) -> None:
        """Shows and logs an evaluation."""
        self._log.write(step, **found.values)
        self._shown |= found.shown
        self._bar.set_postfix(self._shown, refresh=False)
        self.say(f"step {step:>6}   {found.text}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time within this context from the speed."""
        began = time.perf_counter()
        yield
        self._pace.skip(time.perf_counter() - began)


class _Bar(tqdm):
    """A bar that goes by the monotonic clock. By the wall clock, which is tqdm's, it would stand still for an hour
    if that is set back by one."""

    _time = property(lambda self: time.monotonic, lambda self, clock: None)


class _Lines(_Bar):
    """The progress as whole lines, for output that is not a terminal: a bar would run into the text around it."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Prints the current state as a line."""
        print(self, file=self.fp, flush=True)

    def close(self) -> None:
        """Prints the last state."""
        self.refresh()
        self.disable = True

    @classmethod
    def write(cls, s: str, file: Any = None, end: str = "\n", nolock: bool = False) -> None:
        """Prints text without repeating the state after it."""
        print(s, file=file, end=end)


class _Pace:
    """Measures work per second from the end of the first step, which includes warm-up work."""

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._ends: tuple[float, float] | None = None  # when the first and the last step ended
        self._steps = 0

    @property
    def per_s(self) -> float:
        if self._ends is None or not self._steps:
            return 0.0
        return self._steps * self._per_step / (self._ends[1] - self._ends[0])

    def step(self) -> None:
        now = time.perf_counter()
        if self._ends is None:
            self._ends = now, now
        else:
            self._ends = self._ends[0], now
            self._steps += 1

    def skip(self, seconds: float) -> None:
        if self._ends is not None:
            self._ends = self._ends[0] + seconds, self._ends[1] + seconds
