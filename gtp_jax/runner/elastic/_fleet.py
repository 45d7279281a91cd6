"""The processes of a run, one per device, as their supervisor sees them."""

from __future__ import annotations

import dataclasses
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from ..trainer import Activity, Line, Message
from ._child import kill_group, start_child, wait_s
from ._devices import Device
from ._failure import Ended, Failure, how_it_ended
from ._patience import Patience

_CODE = """
from gtp_jax.runner.elastic._worker import work
work(int(sys.argv[1]))
"""

# When a process dies its peers fail too, and their errors may arrive first.
_GRACE_S = 0.5
# A process still alive this long after SIGKILL is stuck in the driver.
_REAP_S = 30.0
# How long processes that have reported the end of the run may take to exit: the first to finish waits for the others.
_CLOSING_S = 120.0

# Causes that would end any new fleet, too.
_REFUSED = ("refused", "diverged")


@dataclasses.dataclass(eq=False)
class Member:
    """A process of a fleet.

    Attributes:
        device: the device that it uses.
        child: the operating system's process.
        line: the connection to it.
        process: its index in the fleet; -1 until it has its order.
        heard: when it was last heard.
        activity: what it is doing; `None` before its first heartbeat.
        step: the number of updates made so far.
        busy_s: how long the current activity had taken at the last heartbeat, in seconds.
        longest_s: the duration of the longest earlier activity of the same kind, in seconds.
        stepping_s: the total duration of its steps except the first, in seconds.
        said: its final message, of kind `failed` or `ended`.
        said_at: when that message arrived.
        code: the exit status, once the process has ended.
    """

    device: Device
    child: subprocess.Popen[bytes]
    line: Line
    process: int = -1
    heard: float = 0.0
    activity: Activity | None = None
    step: int = 0
    busy_s: float = 0.0
    longest_s: float | None = None
    stepping_s: float = 0.0
    said: Message | None = None
    said_at: float = 0.0
    code: int | None = None

    @property
    def name(self) -> str:
        """The name shown to users."""
        return f"process {self.process} ({self.device.name})"


class Fleet:
    """A group of processes that start and end together. Must be used in the main thread.

    The processes import what they need and wait for `order`, so they can be started before it is known which of them
    will be used.

    Args:
        devices: the devices; one process is started for each.
        environment: the environment variables set in all processes.
        now: the monotonic clock.
    """

    def __init__(
        self, devices: Sequence[Device], environment: Mapping[str, str], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self.began = now()
        self.marks: dict[str, float] = {}  # when the last member began each activity
        self.reports: list[Message] = []
        self.begin_step: int | None = None
        self.first_step_at: float | None = None
        self._selector = selectors.DefaultSelector()
        self._patience = Patience()
        self._polled = self.began
        self.members = [self._start(device, environment) for device in devices]

    def _start(self, device: Device, environment: Mapping[str, str]) -> Member:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            child = start_child(_CODE, [str(descriptor)], {**environment, **device.environment}, keep=[descriptor])
        member = Member(device, child, Line(ours), heard=self.began)
        self._selector.register(member.line, selectors.EVENT_READ, member)
        return member

    @property
    def step(self) -> int:
        """The number of updates that the fleet has made."""
        return max((member.step for member in self.members), default=0)

    @property
    def imported(self) -> bool:
        """Whether all processes are waiting for their order or have received it."""
        return all(member.activity is not None for member in self.members)

    def order(self, devices: Sequence[int], order: Callable[[int], Message]) -> None:
        """Sends the processes of the given devices their orders and ends the others.

        Args:
            devices: the device numbers, in the order of the processes.
            order: returns the message for a process, given its index.
        """
        chosen = {number: process for process, number in enumerate(devices)}
        for member in self.members:
            if member.device.number not in chosen:
                kill_group(member.child)
                self._forget(member)
                wait_s(member.child, _REAP_S)
        self.members = sorted(
            (m for m in self.members if m.device.number in chosen), key=lambda m: chosen[m.device.number]
        )
        for process, member in enumerate(self.members):
            member.process = process
            member.line.send(order(process))

    def poll(self, timeout_s: float) -> None:
        """Receives messages from the processes for at most `timeout_s`, and notes which processes have ended."""
        ready = self._selector.select(timeout_s)
        now = self._now()
        late = now - self._polled - timeout_s
        if late > 1.0:  # this process was suspended or busy and could not have heard them
            for member in self.members:
                member.heard = min(now, member.heard + late)
        self._polled = now
        for key, _ in ready:
            self._hear(key.data, now)
        for member in self.members:
            if member.code is None and (code := member.child.poll()) is not None:
                while key_of(self._selector, member.line):  # messages it sent before it ended
                    self._hear(member, now)
                member.code = code

    def _hear(self, member: Member, now: float) -> None:
        messages = member.line.receive()
        if messages is None:
            self._forget(member)
            if wait_s(member.child, 1.0):
                member.code = member.child.returncode
            return
        for message in messages:
            if message["kind"] == "beat":
                self._beat(member, message, now)
            elif message["kind"] in ("failed", "ended"):
                member.said, member.said_at = message, now
            else:
                self.reports.append(message)
        member.heard = now

    def _beat(self, member: Member, message: Message, now: float) -> None:
        if member.activity is None:
            self._patience.started(now - member.heard)
        elif self.first_step_at is not None:
            self._patience.beat(now - member.heard)
        changed = member.activity != message["activity"]
        member.activity, member.step = message["activity"], message["step"]
        member.busy_s, member.longest_s = message["busy_s"], message["longest_s"]
        member.stepping_s = message["stepping_s"]
        if changed:
            self.marks.setdefault(f"first {member.activity}", now)
            self.marks[str(member.activity)] = now
        if member.activity == "step" and self.begin_step is None:
            self.begin_step = member.step
        if self.begin_step is not None and self.first_step_at is None and member.step > self.begin_step:
            self.first_step_at = now

    @property
    def state_began(self) -> float | None:
        """When the last member began to restore or initialize the state; `None` if none has begun."""
        return self.marks.get("restore", self.marks.get("initialize"))

    def _forget(self, member: Member) -> None:
        if key_of(self._selector, member.line):
            self._selector.unregister(member.line)
            member.line.close()

    def ended(self) -> Ended | None:
        """Returns how the run ended, if all processes ended without failures or one refused to go on."""
        now = self._now()
        failed = [m for m in self.members if m.said is not None and m.said["kind"] == "failed"]
        refused = [m for m in failed if m.said is not None and m.said["cause"] in _REFUSED]
        # an earlier death or failure of another process may have caused the refusal, which then need not recur
        before = min((m.said_at for m in refused), default=0.0)
        others = [m for m in failed if m not in refused and m.said_at < before]
        if refused and not others and not any(m.said is None and m.code is not None for m in self.members):
            if now - min(m.said_at for m in refused) < _GRACE_S:
                return None
            first = min(refused, key=lambda m: ("refused to start" in _reason(m), m.said_at))
            return Ended(first.said["code"], _reason(first))  # pyright: ignore[reportOptionalSubscript]
        done = [m for m in self.members if m.said is not None and m.said["kind"] == "ended"]
        if len(done) == len(self.members):
            late = [m for m in done if m.code is None]
            if not late or now - max(m.said_at for m in done) > _CLOSING_S:
                return Ended(done[0].said["status"])  # pyright: ignore[reportOptionalSubscript]
        return None

    def failure(self) -> Failure | None:
        """Returns the first failure, if there is one.

        Processes that died take precedence over those that reported an error, because a death makes the others report
        errors. Silent processes come next, then those busy for too long.
        """
        now = self._now()
        vanished = [m for m in self.members if m.code is not None and m.said is None]
        if vanished:
            first = min(vanished, key=lambda m: m.heard)
            return self._failed(first, "killed", f"{first.name} {how_it_ended(first.code or 0)}", now)
        failed = [m for m in self.members if m.said is not None and m.said["kind"] == "failed"]
        if failed:
            first = min(failed, key=lambda m: m.said_at)
            if now - first.said_at < _GRACE_S:
                return None
            cause = first.said["cause"]  # pyright: ignore[reportOptionalSubscript]
            return self._failed(first, cause, f"{first.name}: {_reason(first)}", now)
        running = [m for m in self.members if m.said is None]
        silent = [m for m in running if now - m.heard > self._silence_s(m)]
        if silent:
            first = min(silent, key=lambda m: m.heard)
            return self._failed(first, "silent", f"{first.name} was silent for {now - first.heard:.1f} s", now)
        busy = [m for m in running if m.busy_s + now - m.heard > self._patience.busy_s(m.longest_s)]
        if busy:
            first = max(busy, key=lambda m: m.busy_s)
            reason = f"{first.name} was busy with one {first.activity} for {first.busy_s:.0f} s; all heartbeats arrived"
            return dataclasses.replace(self._failed(first, "stalled", reason, now), device=None)
        return None

    def _silence_s(self, member: Member) -> float:
        return self._patience.silence_s(member.activity, stepped=self.first_step_at is not None)

    def _failed(self, member: Member, kind, reason: str, now: float) -> Failure:
        return Failure(kind, member.device.number, reason, self.step, member.activity, member.heard, now)

    def forward(self, number: int) -> None:
        """Sends a signal to every process."""
        for member in self.members:
            if member.code is None:
                member.child.send_signal(number)

    def kill(self) -> None:
        """Kills all processes and everything they started; afterwards `stuck` lists those that have not ended.

        Does not send SIGTERM first: it asks a run to save, which needs all processes.
        """
        for member in self.members:
            kill_group(member.child)
        deadline = time.monotonic() + _REAP_S
        for member in self.members:
            wait_s(member.child, deadline - time.monotonic())
            self._forget(member)
        self._selector.close()

    @property
    def stuck(self) -> set[int]:
        """The numbers of the devices whose processes are still alive."""
        return {member.device.number for member in self.members if member.child.poll() is None}


def key_of(selector: selectors.BaseSelector, line: Line) -> bool:
    """Returns whether the selector listens to this line."""
    return any(key.fileobj is line for key in selector.get_map().values())


def _reason(member: Member) -> str:
    return str((member.said or {}).get("reason", ""))


def free_port() -> int:
    """Returns a TCP port that is currently free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
