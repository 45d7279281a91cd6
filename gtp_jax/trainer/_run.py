"""A run from its settings to its report: everything that can be wrong is found before anything is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from .._flags import from_settings, settings_of
from ..checkpoint import Checkpoints
from ..data import BYTES, Corpus, load_corpus, load_tokenizer, read_text, unigram_entropy
from ..mesh import check_degrees, choose_devices, on_gpu, use_roles
from ..models import ModelConfig, build
from ._config import TrainConfig
from ._curve import draw_curve
from ._directory import RunDirectory
from ._distributed import LaunchOptions, barrier, check_same, find_launch, together
from ._fleet import Fleet, fingerprint, make_fleet, without_sequence_parallelism
from ._job import abstract_state, compile_step, prepare
from ._log import read_log
from ._loop import run_loop
from ._owner import owning
from ._peer_watch import PeerWatch
from ._progress import Diverged, Progress
from ._report import heading, report
from ._start import check_recipe_fits, check_start
from ._watch import Supervision, Watch


def start(
    settings: Mapping[str, Any],
    options: LaunchOptions,
    *,
    resume: bool = False,
    force: bool = False,
    at: int | None = None,
    supervision: Supervision | None = None,
) -> int:
    """Trains from text to a report, in this process and those launched with it.

    Args:
        settings: fields of `TrainConfig` and of its pieces, by name; a resumed run keeps the others as they were.
        options: how the processes find each other.
        resume: go on with the run in `out`.
        force: replace the run in `out`.
        at: the step to resume from; the latest that is not damaged by default.
        supervision: of a process that a supervisor has started.

    Returns:
        0; 128 and the number of the signal that ended the run.

    Raises:
        ValueError: on a mistake in the settings or in what they name, before anything is compiled.
        Diverged: if the loss is not finite.
    """
    if at is not None and not resume:
        raise ValueError("`--step` says where a run goes on. Give --resume too, or leave it out.")
    config, directory, changes = resolve(settings, resume=resume, force=force)
    launch = find_launch(options)
    choose_devices(config.virtual_devices(launch.processes), processes=launch.processes, local=launch.local_devices)
    launch.join()
    if supervision is not None:
        supervision.watch.doing("check")
    degrees, corpus = together(lambda: _check(config, supervision))
    remedy = "Give all of them the same files with --data; the standard libraries of two Python versions differ."
    together(lambda: check_same(corpus.fingerprint, "read other text", remedy))
    if config.from_ is not None and not resume:
        source = Path(config.from_)
        together(lambda: check_start(source, config.model(corpus.vocab_size, dtype="float32")))
    planned = config if supervision is None else dataclasses.replace(config, faults=supervision.faults)
    model = config.model(corpus.vocab_size, dtype="bfloat16" if on_gpu() else "float32")
    if without_sequence_parallelism(planned, degrees):
        model = dataclasses.replace(model, sequence_parallel=False)
    with use_roles(config.parallelism.roles):
        fleet = together(lambda: make_fleet(planned, degrees, lambda rngs: build(model, rngs=rngs)))
    same = "Give all of them the same flags, and the same version of gtp_jax."
    together(lambda: check_same(fingerprint(fleet), "use the devices otherwise", same))
    together(lambda: check_recipe_fits(config.quantization, model, fleet.mesh))
    if supervision is not None and supervision.rehearse:
        with jax.set_mesh(fleet.mesh), use_roles(config.parallelism.roles), supervision.watch as watch:
            compile_step(config, model, fleet, corpus, watch, *abstract_state(config, model))
        return 0
    with owning(directory, supervision) as guard:
        if jax.process_index() == 0:
            if resolve(settings, resume=resume, force=force)[0] != config:
                raise ValueError(f"{directory.config} has changed while this run waited for another. Start it again.")
            directory.prepare(config, keep=resume)
        barrier("the run directory is ready")
        roles = use_roles(config.parallelism.roles)
        attending = PeerWatch(directory, launch) if supervision is None else supervision.watch
        alone = launch.processes == 1 and supervision is None
        with jax.set_mesh(fleet.mesh), roles, attending as watch, _failures(watch, alone):
            return _train(
                config, model, fleet, corpus, directory, watch, alone, guard, resume=resume, at=at, changes=changes
            )


def resolve(settings: Mapping[str, Any], *, resume: bool, force: bool) -> tuple[TrainConfig, RunDirectory, list[str]]:
    """Returns the configuration of a run, its directory, and how a resumed run differs from what it was.

    Raises:
        ValueError: on a mistake in the settings, or if the directory does not allow it.
    """
    config = from_settings(TrainConfig, settings)
    directory = RunDirectory(Path(config.out).expanduser().absolute())
    directory.check(resume=resume, force=force)
    if not resume:
        return config, directory, []
    if "from_" in settings:
        raise ValueError("`from` is for a new run; a resumed one has its parameters. Leave out --from or --resume.")
    before = TrainConfig.load(directory.config)
    config = from_settings(TrainConfig, {**settings_of(before), **settings, "out": config.out})
    return config, directory, config.changes(before)


@contextlib.contextmanager
def _failures(watch: Watch, alone: bool) -> Iterator[None]:
    """Ends the process at once on an error, before anything on the way out waits for peers; raises it if there are
    none."""
    try:
        yield
    except Exception as error:
        if not alone:
            watch.give_up(error, _reason(error))
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise ValueError(_reason(error)) from error
        raise


def _check(config: TrainConfig, supervision: Supervision | None) -> tuple[dict[str, int], Corpus]:
    """Returns the degrees of the mesh and the text, after checking both."""
    if supervision is None:
        degrees = config.degrees(jax.device_count(), virtual=not on_gpu())
    else:
        degrees = dict(supervision.degrees)
        if not supervision.faults.any:
            check_degrees(degrees, jax.device_count())
    if config.dtype == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            "`dtype` is 'float64', for which JAX must be started with JAX_ENABLE_X64=1 in the environment."
        )
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else BYTES
    corpus = load_corpus(read_text(config.data), tokenizer)
    corpus.check(batch=config.batch, seq=config.seq)
    return degrees, corpus


def _train(
    config: TrainConfig,
    model: ModelConfig,
    fleet: Fleet,
    corpus: Corpus,
    directory: RunDirectory,
    watch: Watch,
    alone: bool,
    guard: Callable[[], None],
    *,
    resume: bool,
    at: int | None,
    changes: list[str],
) -> int:
    unigram = unigram_entropy(corpus.train, corpus.held_out, corpus.vocab_size)
    speaks = jax.process_index() == 0
    say = print if speaks else lambda *_, **__: None
    say(heading(config, model, fleet, corpus, unigram), flush=True)
    opened = Checkpoints(directory.checkpoints, keep=config.keep, keep_best=config.keep_best, guard=guard)
    with opened as checkpoints, _failures(watch, alone):
        job, state = prepare(config, model, fleet, corpus, checkpoints, watch, resume=resume, at=at)
        begin = job.begin
        if begin > config.steps:
            raise ValueError(
                f"`steps` is {config.steps}, but the run in {directory.root} has made {begin} already. Ask for more, "
                "or start another run with another --out."
            )
        if changes:
            say(f"changed {', '.join(changes)}: the run goes on, but not as if never stopped", flush=True)
        say(f"{'resumed at step ' + str(begin) if begin else 'ready'}; compiled in {job.compile_s:.1f} s", flush=True)
        if speaks:
            guard()
            config.save(directory.config)
        with Progress(job, unigram, directory.log, begin, guard) as progress:
            outcome = run_loop(job, state, checkpoints, watch, progress)
    if speaks:
        guard()
        records = read_log(directory.log)
        title = f"{config.preset}, {config.batch} x {config.seq} tokens a step, on {corpus.name}"
        draw_curve(records, unigram, title, directory.curve)
        text = report(job, outcome, records, unigram)
        directory.report.write_text(text + "\n")
        say(f"\n{text}\n\nin {directory.root}: checkpoints, log.jsonl, loss.png, report.txt", flush=True)
        if outcome.signal is not None:
            say(f"stopped by a signal after step {outcome.step}. {directory.how_to_resume()}", flush=True)
    return 0 if outcome.signal is None else 128 + outcome.signal


def _reason(error: Exception) -> str:
    """Says in plain words why a run failed, and what to do about it."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, jax.errors.JaxRuntimeError):
        if "RESOURCE_EXHAUSTED" in str(error):
            return (
                f"a device is out of memory ({first}). Take a smaller --batch, more --microbatches, or shard the "
                "weights further with --gtp; `gtp-jax inspect` shows what takes how much"
            )
        return f"communication failed, most likely because another process died ({first})"
    if not isinstance(error, (ValueError, OSError, Diverged)):
        traceback.print_exception(error)
    return str(error).removesuffix(".") or repr(error)
