"""`gtp-jax bench checkpoint`: compares saving and restoring a training state with plain orbax and torch DCP."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

import benchmarks
from gtp_jax.hlo import columns, quantity
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import check_files, whole

from ._arguments import add_file_flags, add_run_flags, check_torch_python, seconds_within

_DESCRIPTION = """\
Saves and restores the float32 parameters and AdamW moments of a Llama on all devices, one contender after another.

  blocks    the time of a save until training can continue
  saved     the time of a save until it is committed and flushed to the disk; also that of gtp_jax's synchronous save
  restored  the time to restore on the mesh that saved, with weights sharded over gtp
  moved     the time to restore on a mesh with half the gtp degree and tp 2, if the number of devices is even

Times are medians of all rounds except the first. gtp_jax and orbax compress, torch DCP does not; only gtp_jax computes
checksums of arrays and files. One such state must fit on the disk.
"""

_EXAMPLES = """\
examples:
  gtp-jax bench checkpoint                          1 B parameters and AdamW's moments on GPUs, 100 M on a CPU
  gtp-jax bench checkpoint --preset 8b --dir /nvme --rounds 1 --within 6 --json run.json --png run.png
  gtp-jax bench checkpoint --contenders gtp_jax orbax --rounds 5
  gtp-jax bench checkpoint --torch-python ~/torch/bin/python

Select contenders by words of their names: gtp_jax, orbax, torch-DCP async, torch-DCP sync. Everything that a contender
has done within its time limit counts, and is written to the JSON at once.
"""

_PRESET = {"gpu": "1b", "cpu": "100m"}


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    parser = topics.add_parser(
        "checkpoint",
        help="saving and restoring, compared with plain orbax and torch DCP",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), help="size of the model (default: 1b on GPUs, 100m on a CPU)"
    )
    parser.add_argument("--num-layers", type=whole, metavar="N", help="number of layers, instead of the preset's")
    parser.add_argument(
        "--rounds", type=whole, default=3, metavar="N", help="number of rounds after the first one (default: 3)"
    )
    parser.add_argument(
        "--devices",
        type=whole,
        default=8,
        metavar="N",
        help="number of virtual devices on a machine without GPUs (default: 8)",
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="directory to write to (default: the current one)"
    )
    parser.add_argument(
        "--contenders", nargs="+", default=[], metavar="WORDS", help="contenders to measure (default: all)"
    )
    add_run_flags(parser, timeout_s=300, one="contender")
    add_file_flags(parser, json="write the seconds of all rounds to this file", png="draw a picture to this file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    chosen = benchmarks.chosen_saving_contenders(args.contenders)
    check_files(args.json, args.png)
    check_torch_python(args.torch_python)
    if not args.dir.is_dir():
        raise ValueError(
            f"`--dir` is {args.dir.absolute()}, which is not a directory. Create it first, or name another."
        )
    environment = benchmarks.environment_of(args.devices)
    device, platform, count = benchmarks.probe(environment)
    preset = args.preset or _PRESET[platform]
    model = (
        PRESETS[preset] if args.num_layers is None else dataclasses.replace(PRESETS[preset], num_layers=args.num_layers)
    )
    state_bytes = benchmarks.float32_bytes(benchmarks.state_shapes(model))
    free = shutil.disk_usage(args.dir).free
    if state_bytes > free:
        raise ValueError(
            f"a checkpoint of {preset} takes {quantity(state_bytes, 'B')}, but {args.dir.absolute()} has "
            f"{quantity(free, 'B')} free. Choose a smaller --preset, fewer --num-layers, or another --dir."
        )
    title = f"{preset}, {quantity(state_bytes, 'B')} of float32 state, on {count} x {device}"
    written: dict[str, benchmarks.CheckpointTimes] = {}
    total = len(chosen) * benchmarks.reports_of(args.rounds)
    with (
        tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-checkpoint-") as name,
        tqdm(total=total, unit="step", file=sys.stderr, disable=None) as progress,
    ):

        def report(times: benchmarks.CheckpointTimes, text: str) -> None:
            written[times.who] = times
            if args.json:
                record = {"device": device, "devices": count, "preset": preset, "layers": model.num_layers}
                times_of_all = [dataclasses.asdict(times) for times in written.values()]
                args.json.write_text(json.dumps({**record, "times": times_of_all}, indent=1))
            progress.set_description(f"{times.who}: {text}")
            progress.update()
            if text == benchmarks.ENDED:
                progress.write(_line(times), file=sys.stderr)

        done = benchmarks.measure_checkpoints(
            chosen,
            model,
            Path(name).resolve(),  # orbax refuses `..`
            rounds=args.rounds,
            devices=count,
            platform=platform,
            environment=environment,
            timeout_s=args.timeout,
            torch_python=args.torch_python,
            within_s=seconds_within(args),
            report=report,
        )
    versions = sorted({f"{k} {v}" for times in done for k, v in times.versions.items()})
    print(f"{title}; {', '.join(versions)}\n")
    print(_table(done))
    failures = [f"  {times.who}: {times.failure}" for times in done if times.failure]
    print("\n".join(["", "did not complete all rounds:", *failures] if failures else []), end="\n" if failures else "")
    print("".join(f"\n{line}" for line in benchmarks.verdicts(done)))
    if args.png:
        benchmarks.draw_checkpoints(done, title, args.png)
    return 0


def _table(done: list[benchmarks.CheckpointTimes]) -> str:
    header = ("", "rounds", "blocks", "saved", "", "restored", "", "moved", "moved / restored")
    rows = []
    for times in done:
        ratio = times.ratio("moved", "restored")
        rates = [_rate(times, what) for what in ("saved", "restored")]
        seconds = [_seconds(times.median(what)) for what in ("blocked", "saved", "restored", "moved")]
        cells = (seconds[0], seconds[1], rates[0], seconds[2], rates[1], seconds[3])
        counted = max(len(times.saved) - 1, 0)
        rows.append((times.who, str(counted or "first"), *cells, "" if ratio is None else f"{ratio:.2f}"))
    return columns(header, rows, right=range(1, len(header)))


def _line(times: benchmarks.CheckpointTimes) -> str:
    """Returns the line to print when a contender ends. The table is printed only after all contenders have ended."""
    medians = {what: times.median(what) for what in ("blocked", "saved", "restored", "moved")}
    figures = [f"{what} {quantity(seconds, 's')}" for what, seconds in medians.items() if seconds is not None]
    return f"{times.who}: {', '.join(figures) or 'nothing done'}" + (f" ({times.failure})" if times.failure else "")


def _seconds(value: float | None) -> str:
    return "" if value is None else quantity(value, "s")


def _rate(times: benchmarks.CheckpointTimes, what: str) -> str:
    value = times.median(what)
    return "" if not value else quantity(times.state_bytes / value, "B/s")
