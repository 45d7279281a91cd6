"""Runs a task from its settings to the report. Finds mistakes before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator

import jax
import numpy as np

from ...checkpoint import Checkpoints
from ...flight_recorder import Recorder as HangRecorder
from ...flight_recorder import active
from ...mesh import of_all_processes
from .._exit_codes import DONE, of_signal, out_of_memory
from ..launch import Launch
from ._account import NEEDS, seconds_by_cause
from ._agreement import Description, check_agreement, check_shared
from ._arenas import limit_arenas
from ._attempt import attempt
from ._curve import draw_curve
from ._directory import RunDirectory
from ._divergence import Diverged
from ._events import EventLog, events_in
from ._interrupt import Interrupt, Stopped
from ._log import Record, read_log
from ._loop import Outcome, run_loop
from ._own_file import replacing
from ._owner import owning
from ._peer_watch import PeerWatch
from ._peers import Peers
from ._progress import Progress
from ._recorder import Recorder
from ._report import report
from ._task import Begin, Task
from ._watch import Supervision


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        outcome: how its loop ended; `None` for a rehearsal.
        records: the records of its log, in the first process; empty in the others.
        text: the report, in the first process; empty in the others.
    """

    outcome: Outcome | None = None
    records: tuple[Record, ...] = ()
    text: str = ""

    @property
    def code(self) -> int:
        """The exit code: 0, or 128 plus the number of the signal that ended the run."""
        signal = None if self.outcome is None else self.outcome.signal
        return DONE if signal is None else of_signal(signal)


def run(task: Task, launch: Launch, begin: Begin, supervision: Supervision | None = None) -> Ended:
    """Runs a task in this process and those launched with it.

    Args:
        task: what to train, and on what.
        launch: the processes of the run.
        begin: how the run begins.
        supervision: the decisions of a supervisor, if one started this process.

    Raises:
        ValueError: if a setting, or what it names, is invalid; raised before anything is compiled.
        Diverged: if the loss is not finite, or jumps, and the settings do not let the run continue.
        Stopped: if a signal ended the run while there was no state to save.
    """
    limit_arenas()
    watch = Recorder(PeerWatch(launch) if supervision is None else supervision.watch)
    interrupt = Interrupt(launch, watch)
    try:
        with interrupt, watch, Peers(launch) as peers:
            return _run(task, launch, begin, supervision, watch, interrupt, peers)
    except Stopped as error:
        error.began = interrupt.owns
        raise


def _run(
    task: Task,
    launch: Launch,
    begin: Begin,
    supervision: Supervision | None,
    watch: Recorder,
    interrupt: Interrupt,
    peers: Peers,
) -> Ended:
    def check() -> tuple[RunDirectory, list[str], Description]:
        directory, changes = task.resolve(begin)
        task.read(launch, watch, begin)
        return directory, changes, task.describe(begin, supervision) if launch.processes > 1 else {}

    directory, changes, description = peers.together(check)
    check_agreement(peers, description)
    watch.doing("join")
    launch.join(watched=True)
    # From here on, all processes compute the same from the same values, so that all of them refuse a mistake or none.
    watch.doing("check")
    task.place(launch, begin, directory, supervision)
    if supervision is not None and supervision.rehearse:
        with task.scope():
            watch.doing("compile")
            task.rehearse()
        return Ended()
    if launch.processes > 1:
        check_shared(peers, directory)
    with owning(directory, supervision, peers) as guard:

        def check_again() -> None:
            before = task.settings
            task.resolve(begin)
            if task.settings != before:
                raise ValueError(f"{directory.config} has changed while this run waited for another. Start it again.")

        peers.together(lambda: check_again() if launch.process == 0 else None)
        events = directory.events if launch.process == 0 else None
        watch.events = EventLog(events, guard=guard, held=not begin.resume, process=launch.process)
        watch.attend(peers, directory)
        interrupt.attend(peers, task.limits.grace)
        if begin.resume:
            interrupt.own(directory)
        peers.listen(watch.heard, interrupt.heard)
        alone = launch.processes == 1 and supervision is None
        with task.scope(), _failures(watch, alone):
            return _train(task, directory, watch, interrupt, alone, guard, begin, changes)


@contextlib.contextmanager
def _failures(watch: Recorder, alone: bool) -> Iterator[None]:
    """Ends the process immediately on an error, before any clean-up can wait for other processes.

    Without other processes and a supervisor, records the error and raises it.
    """
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if not alone:
            watch.give_up(error, reason)
        watch.end("failed", reason)
        if out_of_memory(error):
            raise ValueError(reason) from error
        raise


def _train(
    task: Task,
    directory: RunDirectory,
    watch: Recorder,
    interrupt: Interrupt,
    alone: bool,
    guard: Callable[[], None],
    begin: Begin,
    changes: list[str],
) -> Ended:
    speaks, limits = jax.process_index() == 0, task.limits
    say = print if speaks else lambda *_, **__: None
    say(task.heading(), flush=True)
    opened = Checkpoints(directory.checkpoints, keep=limits.keep, keep_best=limits.keep_best, guard=guard)
    recorded = limits.recorder and active() is None
    recorder = HangRecorder(directory.root / "recorder") if recorded else contextlib.nullcontext()
    # With other processes, one that fails ends before it closes its checkpoints, which would wait for them.
    failures = contextlib.nullcontext() if alone else _failures(watch, alone)
    with opened as checkpoints, failures, recorder:
        first = "resume" if begin.resume else "start"
        watch.write(first, **attempt(task.program), settings=task.settings, seeds=task.seeds, changes=changes)
        job, state, set_aside = task.prepare(checkpoints, watch, begin)
        made = job.place.step
        # Up to here, no file has been changed. From here on, nothing can be refused.
        if speaks:
            guard()
            directory.prepare(task.settings, keep=begin.resume)
        of_all_processes(np.int32(0))  # no process makes a step before the directory is this run's
        interrupt.own(directory)
        watch.events.release()
        set_aside()
        if changes:
            say(f"changed {', '.join(changes)}: the run goes on, but not as if never stopped", flush=True)
        say(f"{'resumed at step ' + str(made) if made else 'ready'}; compiled in {job.compile_s:.1f} s", flush=True)
        watch.write("ready", step=made, position=job.place.position)
        with Progress(job, directory.log, made, guard, interrupt.end_unheard) as progress:
            outcome = run_loop(job, state, checkpoints, watch, progress, interrupt)
    watch.end(Ended(outcome).code)
    if not speaks:
        return Ended(outcome)
    guard()
    records = read_log(directory.log)
    causes = seconds_by_cause(events_in(directory.events, NEEDS))
    draw_curve(records, task.baseline, task.loss_unit, task.title, directory.curve)
    text = report(causes, job.memory, task.results(job, outcome, records), outcome)
    with replacing(directory.report) as file:
        file.write(f"{text}\n".encode())
    say(f"\n{text}\n\nin {directory.root}: checkpoints, log.jsonl, events.jsonl, loss.png, report.txt", flush=True)
    if outcome.signal is not None:
        why = "" if interrupt.saves else "; saving would take longer than --grace, so nothing was saved"
        say(f"stopped by a signal after step {outcome.step}{why}. {directory.how_to_resume()}", flush=True)
    elif words := task.next_steps():
        say(words, flush=True)
    return Ended(outcome, tuple(records), text)


def _reason(error: Exception) -> str:
    """Returns why a run failed and what to do about it, in plain words."""
    first = (str(error).splitlines() or [""])[0]
    if out_of_memory(error):
        return (
            f"a device is out of memory ({first}). Use a smaller --batch, more --microbatches, a higher --gtp, which "
            "shards weights further, or --offload; `gtp-jax inspect` shows what uses the memory"
        )
    if isinstance(error, jax.errors.JaxRuntimeError):
        return f"communication failed, most likely because another process died ({first})"
    if not isinstance(error, (ValueError, OSError, Diverged)):
        traceback.print_exception(error)
    return str(error).removesuffix(".") or repr(error)
