"""`gtp-jax train`: from text to a trained model."""

from __future__ import annotations

import argparse
import dataclasses
import traceback
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from .._flags import add_flag
from ..checkpoint import Checkpoints
from ..data import BYTES, Corpus, load_corpus, load_tokenizer, read_text, unigram_entropy
from ..mesh import choose_devices, make_mesh, on_gpu
from ..trainer import (
    Diverged,
    Progress,
    RunDirectory,
    TrainConfig,
    Watch,
    barrier,
    check_recipe_fits,
    check_same,
    check_start,
    draw_curve,
    find_launch,
    heading,
    prepare,
    read_log,
    report,
    run_loop,
    together,
)
from ..trainer import add_arguments as add_distributed_arguments

_DESCRIPTION = """\
Trains a Llama on text, its weights cut over the mesh. Without arguments: a small one, on the source of the Python
standard library, on the machine's GPUs or else on 8 virtual CPU devices, in some 3 minutes.

It prints the held-out loss beside the unigram entropy, which is the loss of the best guess that ignores context: below
it, the model has learned something. It ends with a report and leaves in --out: checkpoints, log.jsonl, loss.png,
report.txt. Ctrl-C or SIGTERM end it after the step, with a checkpoint.
"""

_EXAMPLES = """\
examples:
  gtp-jax train                                   see it work
  gtp-jax train --data books/ notes.txt           on text of your own
  gtp-jax train --resume                          go on as if never stopped, data order included
  gtp-jax train --gtp 2 --tp 2 --microbatches 4   on 4 devices
  gtp-jax train --preset 1b --steps 500 --seq 2048 --out runs/1b
  gtp-jax train --recipe nvfp4-matmuls --keep-last 2 --override mlp.down=mxfp8-matmuls
                                                  multiply in NVFP4, but for the last layers and some modules
  srun gtp-jax train --preset 8b --tokenizer tokenizer.json --data /data/text --out /shared/8b
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand: a flag for each field of `TrainConfig`, and what concerns a single start."""
    parser = subparsers.add_parser(
        "train",
        help="train a Llama on text",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # only what was given, so that a resumed run keeps the rest
    )
    names = ("model", "recipe", "text", "training", "mesh", "output")
    groups: dict[str, Any] = {name: parser.add_argument_group(name) for name in names}
    for field in dataclasses.fields(TrainConfig):
        add_flag(groups[field.metadata["group"]], field)
    output = groups["output"].add_mutually_exclusive_group()
    output.add_argument("--resume", action="store_true", default=False, help="go on with the run in --out")
    output.add_argument("--force", action="store_true", default=False, help="replace the run in --out")
    add_distributed_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: on a mistake in the arguments or in what they name, before anything is compiled.
    """
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    config = TrainConfig(**given)
    directory = RunDirectory(Path(config.out).expanduser().absolute())
    directory.check(resume=args.resume, force=args.force)
    changes: list[str] = []
    if args.resume:
        if "from_" in given:
            raise ValueError("`from` is for a new run; a resumed one has its parameters. Leave out --from or --resume.")
        before = TrainConfig.load(directory.config)
        config = dataclasses.replace(before, **{**given, "out": config.out})
        changes = config.changes(before)
    launch = find_launch(args)
    choose_devices(config.virtual_devices, processes=launch.processes, local=launch.local_devices)
    launch.join()
    degrees, corpus = together(lambda: _check(config))
    together(lambda: check_same(corpus.fingerprint))
    if config.from_ is not None and not args.resume:
        start = Path(config.from_)
        together(lambda: check_start(start, config.model(corpus.vocab, dtype="float32")))
    mesh = make_mesh(**degrees)
    together(lambda: check_recipe_fits(config, config.model(corpus.vocab, dtype="float32"), mesh))
    if jax.process_index() == 0:
        directory.prepare(config, keep=args.resume)
    barrier("the run directory is ready")
    with jax.set_mesh(mesh), Watch(directory, launch) as watch:
        try:
            return _train(config, mesh, corpus, directory, watch, resume=args.resume, changes=changes)
        except Exception as error:
            if launch.processes > 1:
                watch.give_up(_reason(error))
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
                raise ValueError(_reason(error)) from error
            raise


def _check(config: TrainConfig) -> tuple[dict[str, int], Corpus]:
    """Finds what can be wrong with a run before anything is compiled."""
    degrees = config.degrees(jax.device_count(), virtual=not on_gpu())
    config.check_degrees(**degrees)
    tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else BYTES
    corpus = load_corpus(read_text(config.data), tokenizer)
    corpus.check(batch=config.batch, seq=config.seq)
    return degrees, corpus


def _train(
    config: TrainConfig,
    mesh: Mesh,
    corpus: Corpus,
    directory: RunDirectory,
    watch: Watch,
    *,
    resume: bool,
    changes: list[str],
) -> int:
    model = config.model(corpus.vocab, dtype="bfloat16" if on_gpu() else "float32")
    unigram = unigram_entropy(corpus.train, corpus.held_out, corpus.vocab)
    speaks = jax.process_index() == 0
    say = print if speaks else lambda *_, **__: None
    say(heading(config, model, mesh, corpus, unigram), flush=True)
    with Checkpoints(directory.checkpoints, keep=config.keep, keep_best=config.keep_best) as checkpoints:
        job, state = prepare(config, model, mesh, corpus, checkpoints, resume=resume)
        begin = int(state.step)
        if begin > config.steps:
            raise ValueError(
                f"`steps` is {config.steps}, but the run in {directory.root} has made {begin} already. Ask for more, "
                "or start another run with another --out."
            )
        if changes:
            say(f"changed {', '.join(changes)}: the run goes on, but not as if never stopped", flush=True)
        say(f"{'resumed at step ' + str(begin) if begin else 'ready'}; compiled in {job.compile_s:.1f} s", flush=True)
        if speaks:
            config.save(directory.config)
        with Progress(job, unigram, directory.log, begin) as progress:
            outcome = run_loop(job, state, checkpoints, watch, progress)
    if speaks:
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
    """An error in words that help."""
    first = (str(error).splitlines() or [""])[0]
    if isinstance(error, jax.errors.JaxRuntimeError):
        if "RESOURCE_EXHAUSTED" in str(error):
            return (
                f"a device is out of memory ({first}). Take a smaller --batch, more --microbatches, or cut the "
                "weights further with --gtp; `gtp-jax inspect` shows what takes how much"
            )
        return f"communication failed, most likely because another process died ({first})"
    if not isinstance(error, (ValueError, OSError, Diverged)):
        traceback.print_exception(error)
    return str(error).removesuffix(".") or repr(error)
