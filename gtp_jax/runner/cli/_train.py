"""`gtp-jax train`: trains a model of ours on text, or any NNX model.

Its flags are the fields of `TrainConfig` (`trainer/_train_flags.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ... import __version__
from ..elastic import GROUP, ElasticOptions
from ..flags import add_flags, from_settings, given, knobs, read_settings, settings_of, write_settings
from ..launch import LAUNCH_GROUP, LaunchOptions, find_launch
from ..trainer import TrainConfig
from ._parser import AddParser

_DESCRIPTION = """\
Trains a Llama, Mistral, Mixtral or Qwen on text, with its weights sharded over the mesh: a new model of any size, or an
imported one (--from); or any NNX model (--model). Without arguments, trains a small Llama on the source of the Python
standard library, on the machine's GPUs or otherwise on 8 virtual CPU devices, in about 3 minutes.

Prints the held-out loss next to the unigram entropy, the loss of the best prediction that ignores context: a model with
a lower loss has learned something. Ends with a report, and leaves checkpoints, log.jsonl, loss.png and report.txt in
--out. Ctrl-C, SIGTERM and SIGUSR1 end the run after the current step, with a checkpoint.
"""

_EXAMPLES = """\
examples:
  gtp-jax train                                   see it work
  gtp-jax train --data books/ notes.txt           on your own text
  gtp-jax train --data books:0.7 posts.jsonl:0.3  rows of text and of JSON lines, mixed
  gtp-jax train --resume                          continue as if never stopped, with the same order of data
  gtp-jax train --resume=auto --out /shared/run   the same command for the first start and every restart
  gtp-jax train --resume --step 100               continue from an earlier step; later ones are set aside
  gtp-jax train --gtp 2 --tp 2 --microbatches 4   on 4 devices
  gtp-jax train --preset 1b --steps 500 --seq 2048 --out runs/1b
  gtp-jax train --preset 1b --num-layers 12       any size is a flag
  gtp-jax train --from llama --data books/        go on training a model that `gtp-jax convert import` made
  gtp-jax train --from llama --lora 8             adapters of rank 8, beside the model as it is
  gtp-jax train --model my_models:Model --data books/
                                                  any NNX model, of a module of your own
  gtp-jax train --recipe nvfp4-matmuls --high-precision-last 2 --override mlp.down=mxfp8-matmuls
                                                  multiply in NVFP4, except in the last layers and some modules
  gtp-jax train --config run.yaml --lr 0.001      settings from a file, except for one
  gtp-jax train --elastic                         continue with the remaining devices when one fails
  srun gtp-jax train --preset 8b --tokenizer tokenizer.json --data /data/text --out /shared/8b
"""


# what `--help` shows
_MAIN = (
    "preset",
    "from",
    "model",
    "data",
    "tokenizer",
    "seq",
    "steps",
    "batch",
    "lr",
    "microbatches",
    "recipe",
    "lora",
    "dp",
)
_MAIN += ("gtp", "tp", "cp", "out", "resume", "config")

_ELASTIC = """\
With --elastic, the run continues when a process or a device fails: a supervisor starts one process per device on this
host, keeps snapshots of the state in memory, and continues from the last one with the remaining devices."""

_PROCESSES = """\
Under srun (SLURM) or mpirun (Open MPI), none of these is needed. Elsewhere, start the same command in every process,
each with its own --process-id. For one process per GPU, set CUDA_VISIBLE_DEVICES for each. All share --out."""


_FILES = """\
A key is a flag without its dashes, such as `save_every: 50`. A flag on the command line overrides the file. The
config.json of a run is also such a file. Flags that apply to one start (--resume, --force, --step) are not allowed."""

_KINDS = (TrainConfig, ElasticOptions, LaunchOptions)
_OF_ONE_START = ("resume", "force", "step", "config", "save_config")


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand: a flag for each field of `TrainConfig`, and flags that apply to one start."""
    parser = add(
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=_MAIN,
    )
    groups = add_flags(parser, TrainConfig)
    groups["sizes"].description = "Sizes that are not given come from the preset, or from the model of --from."
    output = groups["output"].add_mutually_exclusive_group()
    output.add_argument(
        "--resume",
        nargs="?",
        const="always",
        choices=("always", "auto"),
        help="continue the run in --out; with `auto`, begin it if there is none",
    )
    output.add_argument("--force", action="store_true", help="replace the run in --out")
    groups["output"].add_argument("--step", type=int, metavar="N", help="with --resume: continue from this step")
    add_flags(parser, ElasticOptions)[GROUP].description = _ELASTIC
    add_flags(parser, LaunchOptions)[LAUNCH_GROUP].description = _PROCESSES
    files = parser.add_argument_group("settings files", _FILES)
    files.add_argument("--config", type=Path, metavar="PATH", help="read settings from a YAML file")
    files.add_argument("--save-config", type=Path, metavar="PATH", help="write this run's settings to a YAML file")
    parser.set_defaults(check=check, run=run)
    return parser


def check(args: argparse.Namespace) -> None:
    """Adds the settings of a file to the arguments, and checks them as far as the devices and the model do not matter.

    Raises:
        ValueError: if an argument is invalid.
    """
    if args.config is not None:
        every = [field for kind in _KINDS for field in knobs(kind)]
        for name, value in read_settings(args.config, every, _OF_ONE_START).items():
            if not hasattr(args, name):
                setattr(args, name, value)
    elastic = given(args, ElasticOptions)
    ElasticOptions(**elastic)
    if elastic and "elastic" not in elastic:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in elastic)
        raise ValueError(f"{flags}: this applies only to a run under a supervisor. Add --elastic.")
    settings = given(args, TrainConfig)
    if not args.resume and settings.get("from_") is None:  # otherwise, settings that are not given come from there
        from_settings(TrainConfig, settings)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: if an argument, or what it names, is invalid; raised before anything is compiled.
    """
    from ..elastic import supervise
    from ..trainer import RunDirectory, start

    launch = LaunchOptions(**given(args, LaunchOptions))
    settings, options = given(args, TrainConfig), ElasticOptions(**given(args, ElasticOptions))
    directory = RunDirectory.of(settings.get("out", TrainConfig.out))
    args.resume = args.resume == "always" or (args.resume == "auto" and directory.is_of_run)
    if args.save_config is not None and find_launch(launch).process == 0:
        _save(args, settings)
    if options.elastic:
        return supervise(settings, launch, options, resume=args.resume, force=args.force, at=args.step)
    return start(settings, launch, resume=args.resume, force=args.force, at=args.step)


def _save(args: argparse.Namespace, settings: dict[str, Any]) -> None:
    """Writes the settings of a run once they are checked: all of `TrainConfig`, and the other flags that are given."""
    from ..trainer import resolve

    config, _, _ = resolve(settings, resume=args.resume, force=args.force)
    if config.from_ is not None and not args.resume:  # omits what the model determines, so that --from may change
        training = {field.name: settings.get(field.name, field.default) for field in knobs(TrainConfig)}
    else:
        training = settings_of(config)
    own = {**given(args, ElasticOptions), **given(args, LaunchOptions)}
    own.pop("process_id", None)  # the same file may be given to all processes
    write_settings(args.save_config.expanduser(), {**training, **own}, __version__)
