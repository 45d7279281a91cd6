"""Runs training from the settings to the report. Finds mistakes before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from ...checkpoint import Checkpoints
from ...layout import even_shares
from ...mesh import check_degrees, choose_devices, device_memory, of_all_processes, on_gpu, use_roles
from ...models import ModelConfig, build
from .._compiled import keep_compiled
from .._exit_codes import DONE, of_signal, out_of_memory
from ..data import Corpus, unigram_entropy
from ..flags import Faults, from_settings, knobs, settings_of
from ..launch import Launch, LaunchOptions, find_launch
from ._account import NEEDS, seconds_by_cause
from ._agreement import Description, check_agreement, check_devices, check_shared, describe
from ._arenas import limit_arenas
from ._attempt import attempt
from ._corpus import read_corpus
from ._curve import draw_curve
from ._directory import NOT_BEGUN, RunDirectory
from ._divergence import Diverged
from ._events import EventLog, events_in
from ._held import Held, check_held_fits, held_of
from ._interrupt import Interrupt, Stopped
from ._job import abstract_state, compile_step, prepare
from ._log import read_log
from ._loop import run_loop
from ._loss_chunk import choose_loss_chunk
from ._meshes import Meshes, make_meshes, without_sequence_parallelism
from ._own_file import replacing
from ._owner import owning
from ._peer_watch import PeerWatch
from ._peers import Peers
from ._progress import Progress
from ._recorder import Recorder
from ._report import heading, next_commands, report
from ._start import (
    check_fits,
    check_same_adapters,
    check_same_model,
    check_same_optimizer,
    check_terms,
    started_from,
    vocab_size_of,
)
from ._tracker import check_trackers
from ._train_flags import TrainConfig
from ._watch import Supervision


def start(
    settings: Mapping[str, Any],
    options: LaunchOptions,
    *,
    resume: bool = False,
    force: bool = False,
    at: int | None = None,
    supervision: Supervision | None = None,
) -> int:
    """Trains a model, from the text to the report, in this process and those launched with it.

    Args:
        settings: the fields of `TrainConfig` and of its pieces, by name. A resumed run keeps its earlier values of
            fields that are not given.
        options: how the processes find each other.
        resume: whether to continue the run in `out`.
        force: whether to replace the run in `out`.
        at: the step to resume from; by default, the latest that is not damaged.
        supervision: the decisions of a supervisor, if one started this process.

    Returns:
        The exit code: 0, or 128 plus the number of the signal that ended the run.

    Raises:
        ValueError: if a setting, or what it names, is invalid; raised before anything is compiled.
        Diverged: if the loss is not finite, or jumps, and the settings do not let the run continue.
    """
    if at is not None and not resume:
        raise ValueError("`--step` selects the step to resume from. Add --resume, or remove --step.")
    limit_arenas()
    launch = find_launch(options)
    watch = Recorder(PeerWatch(launch) if supervision is None else supervision.watch)
    interrupt = Interrupt(launch, watch)
    try:
        with interrupt, watch, Peers(launch) as peers:
            return _start(
                settings, launch, watch, interrupt, peers, resume=resume, force=force, at=at, supervision=supervision
            )
    except Stopped as error:
        directory = RunDirectory.of(settings.get("out", TrainConfig.out))
        known = resume and directory.is_of_run or interrupt.owns
        where = directory.how_to_resume() if known else NOT_BEGUN
        print(f"gtp-jax: process {launch.process} was {error}. {where}", file=sys.stderr, flush=True)
        if launch.processes > 1 and supervision is None:
            os._exit(error.exit_code)  # at its exit, JAX would wait for the other processes
        return error.exit_code


def _start(
    settings: Mapping[str, Any],
    launch: Launch,
    watch: Recorder,
    interrupt: Interrupt,
    peers: Peers,
    *,
    resume: bool,
    force: bool,
    at: int | None,
    supervision: Supervision | None,
) -> int:
    def check() -> tuple[TrainConfig, RunDirectory, list[str], Corpus, Description]:
        config, directory, changes = resolve(settings, resume=resume, force=force)
        choose_devices(config.virtual_devices(launch.processes), processes=launch.processes, local=launch.local_devices)
        watch.doing("check")
        corpus = read_corpus(config, resume=resume)
        description: Description = {}
        if launch.processes > 1:
            order = {} if supervision is None else supervision.order
            description = describe(config, corpus, resume=resume, force=force, at=at, order=order)
        return config, directory, changes, corpus, description

    config, directory, changes, corpus, description = peers.together(check)
    check_agreement(peers, description)
    watch.doing("join")
    launch.join()
    if launch.processes == 1 and (kept := keep_compiled()):
        print(kept, flush=True)
    # From here on, all processes compute the same from the same values, so that all of them refuse a mistake or none.
    planned = config if supervision is None else dataclasses.replace(config, faults=supervision.faults)
    check_devices(equally_many=not planned.faults.any)
    watch.doing("check")
    degrees = _degrees(config, supervision)
    vocab_size = vocab_size_of(config, corpus, directory.checkpoints if resume else None)
    model = config.model(vocab_size, dtype="bfloat16" if on_gpu() else "float32")
    memory = device_memory()
    chunk, why = choose_loss_chunk(config, model, degrees, memory and memory.limit)
    model = dataclasses.replace(model, loss_chunk=chunk)
    if why and launch.process == 0:
        print(why, flush=True)
    if without_sequence_parallelism(planned, degrees):
        model = dataclasses.replace(model, sequence_parallel=False)
    with use_roles(config.parallelism.roles), even_shares():
        meshes = make_meshes(planned, degrees, lambda rngs: config.adapt(build(model, rngs=rngs), rngs))
    check_terms(model, corpus)
    with even_shares():
        check_fits(config, model, meshes.mesh)
    with jax.set_mesh(meshes.mesh), use_roles(config.parallelism.roles), even_shares():
        held = held_of(abstract_state(config, model)[0], meshes.mesh)
    check_held_fits(held)
    if supervision is not None and supervision.rehearse:
        with jax.set_mesh(meshes.mesh), use_roles(config.parallelism.roles), even_shares():
            watch.doing("compile")
            compile_step(config, model, meshes, corpus, *abstract_state(config, model))
        return 0
    if launch.processes > 1:
        check_shared(peers, directory)
    with owning(directory, supervision, peers) as guard:

        def check_again() -> None:
            if resolve(settings, resume=resume, force=force)[0] != config:
                raise ValueError(f"{directory.config} has changed while this run waited for another. Start it again.")

        peers.together(lambda: check_again() if launch.process == 0 else None)
        events = directory.events if launch.process == 0 else None
        watch.events = EventLog(events, guard=guard, held=not resume, process=launch.process)
        watch.attend(peers, directory)
        interrupt.attend(peers, config.grace)
        if resume:
            interrupt.own(directory)
        peers.listen(watch.heard, interrupt.heard)
        alone = launch.processes == 1 and supervision is None
        roles = config.parallelism.roles
        with jax.set_mesh(meshes.mesh), use_roles(roles), even_shares(), _failures(watch, alone):
            return _train(
                config,
                model,
                meshes,
                held,
                corpus,
                directory,
                watch,
                interrupt,
                alone,
                guard,
                resume=resume,
                at=at,
                changes=changes,
                samples=supervision is None,
            )


def resolve(settings: Mapping[str, Any], *, resume: bool, force: bool) -> tuple[TrainConfig, RunDirectory, list[str]]:
    """Returns the configuration of a run, its directory, and the changes of a resumed run's configuration.

    Raises:
        ValueError: if a setting is invalid, or the directory does not allow such a run.
    """
    out = settings.get("out", TrainConfig.out)
    if not out:  # as of `--out "$UNSET"`; it would be the working directory
        raise ValueError("`out` is empty. Give a directory; the working directory is `.`.")
    directory = RunDirectory.of(out)
    directory.check(resume=resume, force=force)
    directory.check_writable()
    directory = directory if resume else directory.replacing()
    changes: list[str] = []
    if resume:
        before = TrainConfig.load(directory.config)
        if settings.get("from_", before.from_) != before.from_:
            raise ValueError(
                "`from` applies only to a new run; a resumed run has its own parameters. Remove --from or --resume."
            )
        config = from_settings(TrainConfig, {**settings_of(before), **settings, "out": out})
        check_same_model(before, config, settings)
        check_same_optimizer(before, config)
        check_same_adapters(before, config)
        changes = config.changes(before)
    else:
        config = from_settings(TrainConfig, started_from(settings))
    check_trackers(config.log_to)
    if not config.faults.any:
        names = {field.name for field in knobs(Faults)}
        from_settings(Faults, {name: settings[name] for name in names & settings.keys()}).check_healthy()
    return config, directory, changes


@contextlib.contextmanager
def _failures(watch: Recorder, alone: bool) -> Iterator[None]:
    """Ends the process immediately on an error, before any clean-up can wait for other processes.

    Without other processes and a supervisor, records the error and raises it.
    """
    try:
        yield
    except Exception as error:
        if not alone:
            watch.give_up(error, _reason(error))
        watch.end("failed", _reason(error))
        if out_of_memory(error):
            raise ValueError(_reason(error)) from error
        raise


def _degrees(config: TrainConfig, supervision: Supervision | None) -> dict[str, int]:
    """Returns the degrees of the mesh, after checking them against the number of devices."""
    if supervision is None:
        degrees = config.degrees(jax.device_count(), virtual=not on_gpu())
    else:
        degrees = dict(supervision.degrees)
        if not supervision.faults.any:
            check_degrees(degrees, jax.device_count())
    if config.dtype == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "`dtype` is 'float64', which requires JAX_ENABLE_X64=1 in the environment. Set it, or use another --dtype."
        )
    return degrees


def _train(
    config: TrainConfig,
    model: ModelConfig,
    meshes: Meshes,
    held: Held,
    corpus: Corpus,
    directory: RunDirectory,
    watch: Recorder,
    interrupt: Interrupt,
    alone: bool,
    guard: Callable[[], None],
    *,
    resume: bool,
    at: int | None,
    changes: list[str],
    samples: bool,
) -> int:
    unigram = unigram_entropy(
        [one.counted for one in corpus.train], [one.counted for one in corpus.held_out], corpus.vocab_size
    )
    speaks = jax.process_index() == 0
    say = print if speaks else lambda *_, **__: None
    say(heading(config, model, meshes, held, corpus, unigram), flush=True)
    opened = Checkpoints(directory.checkpoints, keep=config.keep, keep_best=config.keep_best, guard=guard)
    with opened as checkpoints, _failures(watch, alone):
        settings, seeds = settings_of(config), {"weights": config.seed, "data": config.seed, "rounding": config.seed}
        watch.write("resume" if resume else "start", **attempt(), settings=settings, seeds=seeds, changes=changes)
        job, state, set_aside = prepare(config, model, meshes, corpus, checkpoints, watch, resume=resume, at=at)
        begin = job.place.step
        # Up to here, no file has been changed. From here on, nothing can be refused.
        if speaks:
            guard()
            directory.prepare(config, keep=resume)
        of_all_processes(np.int32(0))  # no process makes a step before the directory is this run's
        interrupt.own(directory)
        watch.events.release()
        set_aside()
        if changes:
            say(f"changed {', '.join(changes)}: the run goes on, but not as if never stopped", flush=True)
        say(f"{'resumed at step ' + str(begin) if begin else 'ready'}; compiled in {job.compile_s:.1f} s", flush=True)
        watch.write("ready", step=begin, position=job.place.position)
        with Progress(job, unigram, directory.log, begin, guard, interrupt.end_unheard) as progress:
            outcome = run_loop(job, state, checkpoints, watch, progress, interrupt, samples=samples)
    watch.end(DONE if outcome.signal is None else of_signal(outcome.signal))
    if speaks:
        guard()
        records = read_log(directory.log)
        causes = seconds_by_cause(events_in(directory.events, NEEDS))
        title = f"{config.title}, {config.batch} x {config.seq} tokens per step, on {corpus.name}"
        draw_curve(records, unigram, title, directory.curve)
        text = report(job, outcome, records, unigram, causes)
        with replacing(directory.report) as file:
            file.write(f"{text}\n".encode())
        say(f"\n{text}\n\nin {directory.root}: checkpoints, log.jsonl, events.jsonl, loss.png, report.txt", flush=True)
        if outcome.signal is not None:
            why = "" if interrupt.saves else "; saving would take longer than --grace, so nothing was saved"
            say(f"stopped by a signal after step {outcome.step}{why}. {directory.how_to_resume()}", flush=True)
        else:
            say(next_commands(directory.root, config, model, meshes.mesh, chats=corpus.chat is not None), flush=True)
    return DONE if outcome.signal is None else of_signal(outcome.signal)


def _reason(error: Exception) -> str:
    """Returns why a run failed and what to do about it, in plain words."""
    first = (str(error).splitlines() or [""])[0]
    if out_of_memory(error):
        return (
            f"a device is out of memory ({first}). Use a smaller --batch, more --microbatches, or a higher --gtp, "
            "which shards weights further; `gtp-jax inspect` shows what uses the memory"
        )
    if isinstance(error, jax.errors.JaxRuntimeError):
        return f"communication failed, most likely because another process died ({first})"
    if not isinstance(error, (ValueError, OSError, Diverged)):
        traceback.print_exception(error)
    return str(error).removesuffix(".") or repr(error)
