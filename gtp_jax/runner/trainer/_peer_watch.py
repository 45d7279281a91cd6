"""Ends a process that cannot continue, because a collective would wait forever for peers that are gone or stuck.

Every second, a thread of each process sends the process's activity to process 0, which informs the others. This needs
neither collectives nor a shared clock, so it works while the devices hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

from ...checkpoint import Checkpoints
from ...flight_recorder import active
from .._exit_codes import RETRY, of_error
from ..launch import Launch
from ._clock import LIMITS_S, TICK_S, PhaseClock
from ._directory import RunDirectory
from ._guard import FROZEN_S, Guard, last_words, say_last
from ._json_socket import Message
from ._peers import Peers, several
from ._slow import Stopwatch, slow
from ._watch import Activity, Watch

_SLOW_EVERY_S = 10.0

# After this share of the silence that ends the process, the recorder asks who holds up the step: it takes up to 7 s to
# say so, and steps may usually take longer than the silence.
_ASK_AT = 1 / 3

# How long process 0 waits for the others to end before it ends. JAX's coordinator ends with process 0, and JAX then
# aborts the others, perhaps before they have reported why they end.
_OTHERS_END_S = 1.0


class PeerWatch(Watch):
    """Watches this process from its start, and the other processes once they are connected. A context manager.

    Args:
        launch: the processes of the run.
        clock: the clock of this process.
        frozen_s: the seconds without running any Python after which this process is ended.
    """

    def __init__(self, launch: Launch, *, clock: PhaseClock | None = None, frozen_s: float = FROZEN_S) -> None:
        self._process = launch.process
        limits_s: dict[Activity, float] = {**LIMITS_S, "start": LIMITS_S["start"] + launch.join_timeout_s}
        self._clock = PhaseClock(limits_s=limits_s) if clock is None else clock
        self._frozen_s = frozen_s
        self._clock_lock = threading.Lock()
        self._stopwatch = Stopwatch()
        self._said: dict[int, Message] = {}  # the last beat of each process
        self._left: set[int] = set()  # the processes that have ended normally
        self._gone: set[int] = set()  # the processes whose connection has ended
        self._behind = ""  # the processes that process 0 considers to be behind
        self._slow: list[str] = []
        self._slow_checked = time.monotonic()
        self._peers: Peers | None = None
        self._directory: RunDirectory | None = None
        self._guard: Guard | None = None
        self._trouble: tuple[str, int] | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()  # something has happened before the next tick
        self._last_words = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Self:
        if not faulthandler.is_enabled():
            faulthandler.enable()  # shows all stacks when the guard sends SIGABRT
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join()
        if self._guard is not None:
            self._guard.dismiss()

    def attend(self, peers: Peers, directory: RunDirectory) -> None:
        """Begins to watch the other processes, and starts a child that reports why this process ended if the process
        cannot do so itself.

        Args:
            peers: the connections to the other processes, whose messages must be passed to `heard`.
            directory: the directory of the run.
        """
        self._peers, self._directory = peers, directory
        self._guard = Guard(directory, self._process, frozen_s=self._frozen_s)
        with self._clock_lock:
            self._clock.expect(peers.connected)

    def doing(self, activity: Activity, step: int = 0) -> None:
        """Records that the process begins an activity, which has a time limit."""
        with self._clock_lock:
            before, elapsed_s = (self._clock.activity, self._clock.step), self._clock.elapsed_s
            self._clock.begin(activity, step)
        if before == (activity, step - 1) and activity == "step":
            self._stopwatch.add("step", elapsed_s)

    def timed(self, what: str, seconds: float) -> None:
        """Records a duration, from which process 0 finds slow processes."""
        self._stopwatch.add(what, seconds)

    def source(self, checkpoints: Checkpoints, state_like: Any) -> Checkpoints:
        """Returns the checkpoints of the run."""
        del state_like
        return checkpoints

    def stepped(self, step: int, state: Any, save: Callable[[Checkpoints], bool]) -> None:
        """Does nothing, because there are no snapshots without a supervisor."""

    def give_up(self, error: Exception, reason: str) -> NoReturn:
        """Prints the reason and how to resume, and ends the process immediately."""
        self._end(reason, of_error(error))

    def leave(self, reason: str, code: int) -> None:
        """Informs the other processes, lets them end first, and ends the child silently."""
        self._stop.set()  # what the others do from now on does not matter
        if self._peers is not None:
            self._peers.tell({"failed": reason, "code": code})
            deadline = time.monotonic() + _OTHERS_END_S
            while self._process == 0 and set(self._peers.connected) - self._gone and time.monotonic() < deadline:
                time.sleep(0.02)
        if self._guard is not None:
            self._guard.dismiss()

    def heard(self, process: int, message: Message | None) -> None:
        """Handles a message from another process; `None` if that process is gone."""
        with self._clock_lock:
            self._clock.heard(process)
            if message is None or "bye" in message:
                self._clock.forget(process)
        if message is None:
            self._gone.add(process)
            if process not in self._left:
                self._end_by(f"{self._named([process])} has ended without giving a reason", RETRY)
        elif "bye" in message:
            self._said.pop(process, None)
            self._left.add(process)
        elif "failed" in message:
            who = self._named([process])
            reason = f"{who} cannot continue either, for the reason in its own output: {message['failed']}"
            self._end_by(reason, int(message["code"]))
        elif "beat" in message:
            self._said[process] = message["beat"]
            self._behind = message.get("behind", self._behind)

    def _named(self, processes: Sequence[int]) -> str:
        return several("process", processes) if self._peers is None else self._peers.named(processes)

    def _end_by(self, reason: str, code: int) -> None:
        """Makes the watch end the process; if called several times, the first reason counts."""
        self._trouble = self._trouble or (reason, code)
        self._wake.set()

    def _end(self, reason: str, code: int, *, stacks: bool = False) -> NoReturn:
        if not self._last_words.acquire(blocking=False):
            time.sleep(60)  # another thread is already ending the process
        if stacks:
            faulthandler.dump_traceback(all_threads=True)
        if self._directory is None:
            words = f"\ngtp-jax: process {self._process} cannot go on: {reason}."
        else:
            words = last_words(self._directory, self._process, reason)
        say_last(words)
        self.leave(reason, code)
        os._exit(code)

    def _run(self) -> None:
        while True:
            self._wake.wait(TICK_S)
            self._wake.clear()
            if self._stop.is_set():
                return
            try:
                self._tick()
            except Exception:
                # A watch that ends silently would be worse than one that has missed a beat.
                with contextlib.suppress(OSError, ValueError):
                    traceback.print_exc()

    def _tick(self) -> None:
        with self._clock_lock:
            suspended_s = self._clock.tick()
            silent, over = self._clock.silent(), self._clock.elapsed_s > self._clock.limit_s
            alarm = bool(self._clock.silent(_ASK_AT))
            silence_s, elapsed_s, limit_s = self._clock.silence_s, self._clock.elapsed_s, self._clock.limit_s
            activity, step = self._clock.activity, self._clock.step
        if self._trouble is not None:
            self._end(*self._trouble)
        if suspended_s:
            print(f"gtp-jax: process {self._process} was suspended for {suspended_s:.0f} s", file=sys.stderr)
        if (recorder := active()) is not None:
            recorder.alarm = alarm
        if self._guard is not None:
            self._guard.beat()
        self._beat({"step": step, "activity": activity, "for_s": round(elapsed_s, 1)})
        if silent:
            self._end(f"{self._named(silent)} gave no sign of life for {silence_s:.0f} s{_where()}", RETRY)
        if over:
            reason = f"it has been in `{activity}` at step {step} for {elapsed_s:.0f} s; the limit is {limit_s:.0f} s"
            behind = f". Behind: {self._behind}" if self._behind else ""
            self._end(f"{reason}{_where()}; the stacks above say where{behind}", RETRY, stacks=True)

    def _beat(self, beat: Message) -> None:
        if self._peers is None:
            return
        beat["times"] = self._stopwatch.medians()
        if self._process != 0:
            self._peers.tell({"beat": beat})
            return
        self._said[0] = beat
        said = dict(self._said)
        self._behind = behind(said, self._named)
        self._peers.tell({"beat": {}, "behind": self._behind})
        if time.monotonic() - self._slow_checked > _SLOW_EVERY_S:
            self._slow_checked = time.monotonic()
            times = {process: each.get("times", {}) for process, each in said.items()}
            before, self._slow = self._slow, slow(times, self._named)
            who = {line.partition(" takes")[0] for line in before}
            for line in self._slow:
                if line.partition(" takes")[0] not in who:
                    print(f"gtp-jax: slow: {line}", file=sys.stderr, flush=True)


def _where() -> str:
    """Returns where the devices of this process are in a step, for messages; an empty string if nothing is recorded."""
    recorder = active()
    return f"; this process is {recorder.where}" if recorder is not None and recorder.steps.in_flight else ""


def behind(said: dict[int, Message], named: Callable[[Sequence[int]], str]) -> str:
    """Describes the processes that have made the fewest steps (all, if they have made the same number).

    Args:
        said: the last beat of each process.
        named: returns processes for messages.
    """
    least = min((each["step"] for each in said.values()), default=0)
    those = sorted(process for process, each in said.items() if each["step"] == least)
    lines = [
        f"{named([process])} (step {said[process]['step']}, {said[process]['activity']} for "
        f"{said[process]['for_s']:.0f} s)"
        for process in those[:8]
    ]
    return ", ".join(lines) + (f" and {len(those) - 8} more" if len(those) > 8 else "")
