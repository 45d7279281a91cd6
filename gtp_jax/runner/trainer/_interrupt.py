"""Ends a run on a signal.

Before the training loop, the run ends at once; in the loop, it ends after a step, with a checkpoint if there is time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn, Self

from .._exit_codes import of_signal
from ..launch import Launch
from ._directory import RunDirectory
from ._guard import say_last
from ._json_socket import Message
from ._peers import Peers
from ._watch import Watch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# How long Python may take, in seconds, to run a signal's handler where there is no state to save. During a compilation,
# it runs none.
_NOTICE_S = 3.0


class Stopped(BaseException):
    """Raised by a signal that comes while there is no state to save.

    Args:
        number: the number of the signal.

    Attributes:
        number: the number of the signal.
        began: whether the run owned its directory by then.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}")
        self.number, self.began = number, False
        self.exit_code = of_signal(number)


class Interrupt:
    """Handles SIGINT, SIGTERM and SIGUSR1 from the start of a process. A context manager, for the main thread.

    Python runs its signal handlers between two bytecode instructions, so they wait until a compilation has ended. A
    thread, however, learns of each signal at once, through a pipe.

    In the loop, all processes stop after the same step, whichever process receives the signal: each tells process 0
    the last step that it has launched, and launches no other until process 0 has announced the last step of all of
    them. A second Ctrl-C ends the process at once.

    Args:
        launch: the processes of the run.
        watch: the watch, which is told when a signal ends the process at once.
    """

    def __init__(self, launch: Launch, watch: Watch) -> None:
        self.signal: int | None = None
        self.saves = True
        self._process, self._processes, self._watch = launch.process, launch.processes, watch
        self._grace_s: float | None = None
        self._peers: Peers | None = None
        self._directory: RunDirectory | None = None
        self._looping = False
        self._asked = -1  # the latest step that this process was allowed to launch
        self._before: int | None = None  # the first step that no process may launch
        self._holding = False
        self._launched: dict[int, tuple[int, float]] = {}
        self._save_s = 0.0
        self._ctrl_c = 0
        self._lock = threading.Condition()
        self._handlers: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._old_pipe = -1
        self._old_hook = sys.unraisablehook
        self._ended = False

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # whoever started this thread handles signals
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._old_hook, sys.unraisablehook = sys.unraisablehook, self._pass_over
        self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        threading.Thread(target=self._take, args=(self._pipe[0],), name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        self._ended = True
        sys.unraisablehook = self._old_hook
        signal.set_wakeup_fd(self._old_pipe)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])

    def attend(self, peers: Peers, grace_s: float | None) -> None:
        """Agrees with the other processes from now on. Their messages must be passed to `heard`.

        Args:
            peers: the other processes.
            grace_s: the seconds from a signal to the forced end of the process, within which the state must be saved;
                `None` for no limit.
        """
        self._peers, self._grace_s = peers, grace_s

    def own(self, directory: RunDirectory) -> None:
        """Is called with the run's directory once the run owns it."""
        self._directory = directory

    @property
    def owns(self) -> bool:
        """Whether the run owns its directory yet."""
        return self._directory is not None

    @contextlib.contextmanager
    def loop(self) -> Iterator[None]:
        """Makes signals wait for the end of a step."""
        self._looping = True
        try:
            yield
        finally:
            self._looping = False

    def saved(self, seconds: float) -> None:
        """Records how long a save took, in seconds, to tell whether another one fits into the grace period."""
        self._save_s = max(self._save_s, seconds)

    def requested(self, step: int) -> bool:
        """Returns whether to stop before this step. Every process must call this before every step."""
        with self._lock:
            self._lock.wait_for(lambda: not self._holding or self._before is not None)
            if self._before is not None and step >= self._before:
                return True
            self._asked = step
            return False

    def end_unheard(self) -> None:
        """Ends the run as a signal does, because what it prints reaches nobody."""
        self._request(signal.SIGPIPE)

    def heard(self, process: int, message: Message | None) -> None:
        """Handles a message from another process."""
        match message:
            case {"stop": int(number)}:
                self._hold(number)
            case {"hold": int(number)}:
                self._arm(number)
                with self._lock:
                    self._holding = True
                    launched = {"launched": self._asked, "save_s": self._save_s}
                assert self._peers is not None
                self._peers.tell(launched, process)
            case {"launched": int(step), "save_s": float(save_s) | int(save_s)}:
                self._settle(process, step, save_s)
            case {"before": int(before), "saves": bool(saves)}:
                self._decide(before, saves)
            case _:
                pass

    def _request(self, number: int) -> None:
        """Asks all processes to stop."""
        if self._process == 0 or self._peers is None:
            self._hold(number)
        else:
            self._arm(number)
            self._peers.tell({"stop": number})

    def _hold(self, number: int) -> None:
        """In process 0: asks all processes which step they have launched last."""
        with self._lock:
            if self._holding:
                return
            self._holding = True
            mine = self._asked, self._save_s
        self._arm(number)
        if self._peers is not None:
            self._peers.tell({"hold": number})
        self._settle(0, *mine)

    def _settle(self, process: int, step: int, save_s: float) -> None:
        """In process 0: records the last step that a process has launched. Once all have answered, the highest of these
        steps becomes the last step of all processes."""
        self._launched[process] = step, save_s
        if len(self._launched) < (self._processes if self._peers is not None else 1):
            return
        before = max(step for step, _ in self._launched.values()) + 1
        saves = self._grace_s is None or max(save_s for _, save_s in self._launched.values()) < self._grace_s
        if self._peers is not None:
            self._peers.tell({"before": before, "saves": saves})
        self._decide(before, saves)

    def _decide(self, before: int, saves: bool) -> None:
        with self._lock:
            self._before, self.saves = before, saves
            self._lock.notify_all()

    def _arm(self, number: int) -> None:
        """Records the signal, and starts a timer that ends the process after the grace period."""
        if self.signal is not None:
            return
        self.signal = number
        if self._grace_s is not None:
            alarm = threading.Timer(
                self._grace_s, self._end, (number, f"the state was not saved within the {self._grace_s:g} s of --grace")
            )
            alarm.daemon = True
            alarm.start()

    def _note(self, number: int, frame: Any) -> None:
        """Handles a signal in the main thread."""
        del frame
        if not self._looping:
            raise Stopped(number)

    def _pass_over(self, unraisable: Any) -> None:
        """Shows an exception that Python cannot raise, unless it is `Stopped`.

        Python cannot raise `Stopped` if the signal arrives during a callback of garbage collection, such as JAX's. The
        thread that reads signals then ends the process soon.
        """
        if not isinstance(unraisable.exc_value, Stopped):
            self._old_hook(unraisable)

    def _take(self, pipe: int) -> None:
        """Runs in a thread, which learns of each signal at once."""
        with open(pipe, "rb", buffering=0) as signals:
            while received := signals.read(1):
                number = received[0]
                if number not in SIGNALS:
                    continue
                self._ctrl_c += number == signal.SIGINT
                if self._ctrl_c > 1:
                    self._end(number, "Ctrl-C was pressed a second time")
                if not self._looping:
                    time.sleep(_NOTICE_S)
                if self._ended:
                    return
                if not self._looping:
                    self._end(number, f"nothing else ended it within {_NOTICE_S:g} s")
                self._request(number)

    def _end(self, number: int, reason: str) -> NoReturn:
        said = f"was ended by {signal.Signals(number).name}: {reason}"
        where = "" if self._directory is None else f"\n{self._directory.how_to_resume()}"
        say_last(f"\ngtp-jax: process {self._process} {said}.{where}")
        self._watch.leave(said, of_signal(number))
        os._exit(of_signal(number))
