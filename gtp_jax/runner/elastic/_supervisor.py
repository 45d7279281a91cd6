"""The supervisor: starts the processes of a run, watches them, and restarts them when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...checkpoint import Checkpoints
from .._exit_codes import RETRY, of_signal
from ..launch import LaunchOptions, find_launch
from ..trainer import (
    EventLog,
    Lock,
    LostLock,
    Ownership,
    RunDirectory,
    TrainConfig,
    resolve,
)
from ._account import Account
from ._devices import Device, find_devices, uses_gpus
from ._failure import SUSPECTS, Ended, Failure
from ._fleet import Fleet, free_port
from ._memory import Memory
from ._options import ElasticOptions
from ._plan import FleetPlan, plan_fleet
from ._probe import Probe, probe
from ._rehearsal import Rehearsal
from ._requests import take_rejoins

_POLL_S = 0.2
# A device that has failed this often is not used again, even if it passes its probe.
_STRIKES = 2
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# While no process is in one of these activities, there is no state worth saving yet.
_TRAINING = ("step", "evaluate", "save", "snapshot")


def supervise(
    settings: Mapping[str, Any],
    launch: LaunchOptions,
    options: ElasticOptions,
    *,
    resume: bool,
    force: bool,
    at: int | None = None,
) -> int:
    """Trains like `trainer.start`, but in one process per device, and continues when a process or device fails.

    This process does not use the devices. When it ends, the processes it has started end too.

    Args:
        settings: the settings of the run, by name.
        launch: the multi-process launch options; must describe a single process.
        options: the options of the supervisor.
        resume: whether to continue the run in its directory.
        force: whether to replace the run in its directory.
        at: the step to resume from; by default, the latest that is not damaged.

    Returns:
        The exit status of the run; 75 if it could not continue; 128 plus the number of the signal that ended it.

    Raises:
        ValueError: if the settings are invalid.
        LostLock: if another run has taken over the directory.
    """
    if at is not None and not resume:
        raise ValueError("`--step` selects the step to resume from. Add --resume, or remove --step.")
    if launch != LaunchOptions() or find_launch(launch).processes > 1:
        raise ValueError(
            "`--elastic` starts the processes of one host itself. Remove --coordinator, --num-processes, "
            "--process-id, --local-devices and --join-timeout, and start it once, without srun or mpirun."
        )
    config, directory, _ = resolve(settings, resume=resume, force=force)
    if config.model_ is not None:
        raise ValueError("`--elastic` applies only to models of gtp_jax. Remove --elastic, or --model.")
    if config.execution.offloaded is not None:
        raise ValueError(
            f"`offload` is {config.execution.offload!r}, but with `--elastic` replicas may continue at unequal "
            "degrees, whose step updates a state on the devices. Remove --elastic, or pass `--offload none`."
        )
    if config.faults.any:
        raise ValueError(
            "`--elastic` detects lost devices itself. Remove --failed-devices and --replica-batches; if the run was "
            "started with them, resume it with --failed-devices and no number."
        )
    devices = find_devices(config.virtual_devices(1))
    degrees = config.degrees(len(devices), virtual=not uses_gpus())
    waited = Lock(directory.lock, note=lambda text: print(f"gtp-jax train: {text}", file=sys.stderr, flush=True))
    with waited.acquire() as lock, Memory(Path(options.snapshot_dir)) as memory:
        if resolve(settings, resume=resume, force=force)[0] != config:
            raise ValueError(
                f"{directory.config} changed while this run waited for another run to end. Start this run again."
            )
        if not resume and not directory.is_of_run:  # events of a refused start; `resolve` has checked the directory
            directory.events.unlink(missing_ok=True)
        run = Supervisor(dict(settings), config, directory, devices, degrees, options, memory, lock.ownership)
        return run.run(resume=resume, at=at)


class Supervisor:
    """Implements `supervise`.

    Args:
        settings: the settings that the user gave.
        config: the configuration of the run.
        directory: the directory of the run.
        devices: all devices of this machine.
        degrees: the degrees of the mesh of all devices, by axis.
        options: the options of the supervisor.
        memory: the in-memory directory for the snapshots.
        ownership: the supervisor's ownership of the directory, which its lock grants.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        config: TrainConfig,
        directory: RunDirectory,
        devices: list[Device],
        degrees: dict[str, int],
        options: ElasticOptions,
        memory: Memory,
        ownership: Ownership,
    ) -> None:
        self._settings, self._config, self._directory = settings, config, directory
        self._devices, self._degrees, self._options, self._memory = devices, degrees, options, memory
        self._ownership = ownership
        self._events = EventLog(
            directory.events,
            lambda text: print(f"gtp-jax elastic: {text}", flush=True),
            ownership.check,
            held=directory.is_of_run,  # the earlier run's record is kept until this run is certain to replace it
        )
        self._account = Account(self._events)
        self._checkpoints = Checkpoints(directory.checkpoints, read_only=True)
        self._lost: set[int] = set()
        self._strikes: Counter[int] = Counter()
        self._cadence: dict[str, int] | None = None
        self._signal: int | None = None
        self._begun = False
        self._unequal = True
        self._rehearsed: set[int] = set()
        self._returning: dict[int, Probe] = {}
        self._sound: set[int] = set()

    def run(self, *, resume: bool, at: int | None = None) -> int:
        """Trains until the run has ended or cannot continue, and returns its exit status."""
        self._resume, self._at = resume, at
        if resume:
            self._events.release()
        self._directory.elastic.mkdir(exist_ok=True)  # requests are stored here
        plan = self._plan(self._lost)
        interval = self._options.snapshot_interval
        most = "" if interval is None else f"; a failure costs at most {interval} steps"
        self._events.write(
            "start",
            f"{len(self._devices)} processes; snapshots in {self._memory.snapshots.parent}{most}",
            devices=[device.name for device in self._devices],
            degrees=self._degrees,
            freed=[str(path) for path in self._memory.freed],
        )
        without_progress = 0
        fleet: Fleet | None = None
        with self._signals():
            while True:
                fleet = self._launch(plan, fleet)
                try:
                    outcome = self._attend(fleet, plan)
                except LostLock:
                    fleet.kill()
                    raise
                if isinstance(outcome, Ended):
                    if not (outcome.reason and plan.failed and fleet.first_step_at is None):
                        return self._finish(fleet, outcome)
                    outcome = self._without_replicas(fleet, outcome)
                progressed = self._account.end_fleet(fleet, self._kept_step())
                standby = None
                if isinstance(outcome, Failure):
                    without_progress = 0 if progressed else without_progress + 1
                    standby = self._after_failure(fleet, outcome)
                else:
                    standby = outcome
                    self._account.rejoined(fleet.step)
                    fleet.kill()
                self._memory.sweep()
                if self._signal is not None:
                    return self._give_up(standby, "a signal asked it to end", of_signal(self._signal))
                if without_progress > self._options.retries:
                    reason = f"{without_progress} failures in a row without a new snapshot (--retries)"
                    return self._give_up(standby, reason, RETRY)
                try:
                    plan = self._plan(self._lost)
                except ValueError as error:
                    return self._give_up(standby, str(error), RETRY)
                fleet = standby

    def _plan(self, lost: Collection[int]) -> FleetPlan:
        microbatches = self._config.execution.microbatches
        return plan_fleet(
            self._degrees, lost, batch=self._config.batch, microbatches=microbatches, unequal=self._unequal
        )

    def _launch(self, plan: FleetPlan, fleet: Fleet | None) -> Fleet:
        """Sends a fleet its order, after starting it unless `fleet` has already been started."""
        if fleet is None:
            fleet = Fleet([self._devices[number] for number in plan.devices], self._environment())
        port = free_port()
        fleet.order(plan.devices, lambda process: self._order(plan, process, port))
        self._events.write(
            "fleet",
            f"{plan.describe()}; processes {' '.join(str(member.child.pid) for member in fleet.members)}",
            devices=plan.devices,
            degrees=plan.degrees,
            processes=[member.child.pid for member in fleet.members],
        )
        return fleet

    def _order(self, plan: FleetPlan, process: int, port: int, *, rehearse: bool = False) -> dict[str, Any]:
        settings = self._settings
        if self._begun:
            settings = {name: value for name, value in settings.items() if name != "from_"}
        return {
            "settings": settings,
            "processes": len(plan.devices),
            "process": process,
            "coordinator": f"127.0.0.1:{port}",
            "degrees": plan.degrees,
            "failed": plan.failed,
            "resume": self._resume or self._begun,
            # the directory has been checked already, and an ended fleet may have begun the run without reporting it
            "force": not (self._resume or self._begun),
            "virtual": not uses_gpus(),
            "snapshots": str(self._memory.snapshots),
            "interval": self._options.snapshot_interval,
            "cadence": self._cadence,
            "rehearse": rehearse,
            "token": self._ownership.token,
            # once the run has begun at this step, later checkpoints have been set aside
            "at": None if self._begun else self._at,
        }

    def _environment(self) -> dict[str, str]:
        """Returns the environment variables of all processes, which configure the persistent compilation cache."""
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(self._directory.compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        return {name: os.environ.get(name, value) for name, value in cache.items()}

    def _attend(self, fleet: Fleet, plan: FleetPlan) -> Ended | Failure | Fleet:
        """Watches a fleet until it ends, or until a larger fleet is ready to replace it.

        Returns:
            How the run ended, the failure, or the larger fleet, which waits for its order.
        """
        sent: int | None = None
        committed = self._memory.latest()
        rehearsal: Rehearsal | None = None
        larger: Fleet | None = None
        returning: set[int] = set()
        try:
            while True:
                fleet.poll(_POLL_S)
                self._ownership.check()
                if not self._begun and "step" in fleet.marks:
                    self._begun = True
                    self._events.release()
                if self._signal is not None and sent is None:
                    sent = self._signal
                    if all(member.activity not in _TRAINING for member in fleet.members):
                        return Ended(of_signal(sent))
                    fleet.forward(sent)
                self._account.follow(fleet)
                for report in fleet.reports:
                    self._note(report)
                fleet.reports.clear()
                latest = self._memory.latest()
                if latest is not None and latest != committed:
                    committed = latest
                    self._account.commit(fleet, latest)
                    if rehearsal is None and sent is None:
                        rehearsal = self._rehearse(plan)
                    if larger is not None and larger.imported and sent is None:
                        self._lost -= returning
                        self._sound -= returning
                        for number in returning:
                            self._strikes[number] = 0
                        larger, taken = None, larger
                        return taken
                if rehearsal is not None:
                    rehearsal.poll()
                self._ask_returning()
                if larger is not None:
                    larger.poll(0.0)
                elif self._sound:
                    returning = set(self._sound)
                    larger = self._standby(self._lost - returning)
                if (ended := fleet.ended()) is not None:
                    return ended
                if (failure := fleet.failure()) is not None:
                    return failure
        finally:
            if rehearsal is not None and not rehearsal.end():
                self._rehearsed.add(rehearsal.size)
            if larger is not None:
                larger.kill()

    def _note(self, report: dict[str, Any]) -> None:
        self._cadence = {name: report[name] for name in ("every", "committed_after")}
        share = report["blocked_s"] / (report["every"] * report["step_s"])
        self._events.write(
            "cadence",
            f"a snapshot every {report['every']} steps takes {report['blocked_s']:.2f} s, {share:.1%} of the time, and "
            f"is committed after {report['written_s']:.2f} s; a failure costs at most "
            f"{report['every'] + report['committed_after']} steps",
            **{name: value for name, value in report.items() if name != "kind"},
        )

    def _rehearse(self, plan: FleetPlan) -> Rehearsal | None:
        """Starts compiling the step for one device fewer, if this is enabled and has not been done yet."""
        wanted = uses_gpus() if self._options.rehearse is None else self._options.rehearse
        try:
            smaller = self._plan({*self._lost, plan.devices[-1]})
        except ValueError:
            return None
        if not wanted or len(smaller.devices) in self._rehearsed:
            return None
        devices = [self._devices[number] for number in smaller.devices]
        port = free_port()
        return Rehearsal(
            devices,
            self._environment(),
            lambda process: self._order(smaller, process, port, rehearse=True),
            self._events,
        )

    def _ask_returning(self) -> None:
        """Probes the devices whose return has been requested."""
        for number in take_rejoins(self._directory.elastic):
            if number not in self._lost:
                self._events.write("rejoin refused", f"device {number} is not lost", device=number)
            elif number not in self._returning:
                self._returning[number] = Probe(self._devices[number], self._options.probe_timeout)
        for number, asked in list(self._returning.items()):
            if (finding := asked.result()) is None:
                continue
            del self._returning[number]
            if finding.trouble:
                text = f"{finding.device.name} cannot be used again: {finding.trouble}"
                self._events.write("rejoin refused", text, device=number)
            else:
                self._sound.add(number)
                text = f"{finding.device.name} computes again and will be used from the next snapshot on"
                self._events.write("rejoin", text, device=number)

    def _after_failure(self, fleet: Fleet, failure: Failure) -> Fleet:
        """Ends a fleet, probes which devices are healthy, and returns a new fleet that waits for its order."""
        self._events.write(
            "failure",
            f"{failure.reason}, in step {failure.step + 1} ({failure.activity or 'start'})",
            kind=failure.kind,
            device=failure.device,
            step=failure.step,
            last_sign=time.time() - (time.monotonic() - failure.last_sign),
        )
        if failure.kind == "damaged":
            self._memory.drop_latest()
        fleet.kill()
        reaped = time.monotonic()
        standby = self._standby(self._lost)
        left = [device for device in self._devices if device.number not in self._lost]
        findings = probe(left, self._options.probe_timeout, lambda: standby.poll(_POLL_S))
        stuck = fleet.stuck
        for finding in findings:
            if finding.trouble:
                self._drop(finding.device, finding.trouble)
            elif finding.device.number in stuck:
                self._drop(finding.device, "its process cannot be killed")
        if failure.device is not None and failure.kind in SUSPECTS and failure.device not in self._lost:
            self._strikes[failure.device] += 1
            if self._strikes[failure.device] >= _STRIKES:
                self._drop(self._devices[failure.device], f"its process has failed {_STRIKES} times")
        self._account.failed(failure, reaped=reaped)
        return standby

    def _without_replicas(self, fleet: Fleet, ended: Ended) -> Fleet:
        """Falls back to a mesh, because replicas of unequal tp were refused, and returns a fleet that waits for its
        order.
        """
        self._unequal = False
        self._events.write("refused", f"this run cannot use replicas of unequal tp: {ended.reason}", step=fleet.step)
        return self._standby(self._lost)

    def _standby(self, lost: Collection[int]) -> Fleet:
        """Starts processes on all devices except `lost`. They import what they need and wait for their order."""
        return Fleet([device for device in self._devices if device.number not in lost], self._environment())

    def _drop(self, device: Device, reason: str) -> None:
        self._lost.add(device.number)
        self._events.write("lost", f"{device.name} is no longer used: {reason}", device=device.number)

    def _kept_step(self) -> int:
        """Returns the step from which the next fleet continues."""
        saved = self._checkpoints.latest() if self._resume or self._begun else None  # otherwise another run's
        return max(self._memory.latest() or 0, saved or 0)

    def _finish(self, fleet: Fleet, ended: Ended) -> int:
        """Records the end of a run that ended without a failure, and returns its exit status."""
        stepping_s = max((member.stepping_s for member in fleet.members), default=0.0)
        fleet.kill()
        if ended.reason:
            print(f"gtp-jax train: error: {ended.reason}", file=sys.stderr)
        self._account.finish(ended.status, stepping_s, fleet.step)
        return ended.status if self._signal is None else of_signal(self._signal)

    def _give_up(self, standby: Fleet | None, reason: str, status: int) -> int:
        if standby is not None:
            standby.kill()
        self._account.finish(status, 0.0, self._kept_step())
        print(
            f"gtp-jax train: the run cannot go on: {reason}.\n{self._directory.how_to_resume()}"
            + (" --elastic" if self._directory.is_of_run else ""),
            file=sys.stderr,
        )
        return status

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Records signals, so that they can be forwarded to the fleet. A signal that comes twice ends this process."""

        def note(number: int, frame: Any) -> None:
            del frame
            self._signal = number
            signal.signal(number, before[number])

        before: dict[int, Any] = {number: signal.signal(number, note) for number in _FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
