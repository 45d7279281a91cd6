"""`gtp-jax bench checkpoint`: saving and restoring a training state beside plain orbax and torch DCP."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from .. import bench
from ..models import PRESETS
from ..plan import columns, quantity
from ._devices import choose_devices, on_gpu

_DESCRIPTION = """\
Saves and restores a Llama's parameters and AdamW moments, in rounds with the rivals in turn, after one round that is
not counted. `blocks`: until training may go on; `saved`: until the step is committed; `restored`: onto the mesh that
saved, weights cut over gtp; `moved`: onto half the gtp and tp 2. torch DCP, a process a device, joins in where torch
is installed. Three such states must fit on the disk.
"""

_EXAMPLES = """\
examples:
  gtp-jax bench checkpoint                          1 B parameters and AdamW's moments on GPUs, 100 M on a CPU
  gtp-jax bench checkpoint --preset 8b --dir /nvme  where there is room for three
  gtp-jax bench checkpoint --rounds 5 --json checkpoint.json
"""

_RESHARD_GOAL, _CHECKSUM_GOAL = 1.2, 0.05
_DEFAULT = {True: "1b", False: "100m"}


def add_parser(topics: Any) -> None:
    """Adds the topic."""
    parser = topics.add_parser(
        "checkpoint",
        help="saving and restoring beside plain orbax and torch DCP",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--preset", choices=list(PRESETS), help="size of the model (default: 1b on GPUs, 100m on a CPU)"
    )
    parser.add_argument("--layers", type=int, metavar="N", help="of the model, to measure less of it")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="that count (default: 3)")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="virtual ones, without GPUs (default: 8)")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="where to write (default: here)")
    parser.add_argument("--no-torch", action="store_true", help="leave torch DCP out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of all rounds there too")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    for name, value in (("rounds", args.rounds), ("devices", args.devices), ("layers", args.layers)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}; it is a whole number of at least 1.")
    for path in (args.dir.absolute(), *((args.json.absolute().parent,) if args.json else ())):
        if not path.is_dir():
            raise ValueError(f"{path} is no directory; create it first, or name another.")
    choose_devices(args.devices)
    preset = args.preset or _DEFAULT[on_gpu()]
    model = PRESETS[preset] if args.layers is None else dataclasses.replace(PRESETS[preset], layers=args.layers)
    shapes = bench.state_shapes(model)
    needed, free = 3 * bench.float32_bytes(shapes), shutil.disk_usage(args.dir).free
    if needed > free:
        raise ValueError(
            f"three checkpoints of {preset} take {quantity(needed, 'B')}, but {args.dir.absolute()} has "
            f"{quantity(free, 'B')} free. Choose a smaller --preset, fewer --layers, or another --dir."
        )
    total = bench.steps_of(args.rounds)
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench-checkpoint-") as name:
        with tqdm(total=total, unit="round", file=sys.stderr, disable=None) as progress:

            def report(text: str) -> None:
                progress.set_description(text)
                progress.update()

            done = bench.measure_checkpoints(model, Path(name).absolute(), rounds=args.rounds, report=report)
        note = ""
        if not args.no_torch:
            done, note = _with_torch(done, shapes, Path(name).absolute(), args.rounds)
    device = jax.devices()[0].device_kind
    size = quantity(done[0].state_bytes, "B")
    print(f"{preset}, {size} of float32 state, on {jax.device_count()} x {device}, jax {jax.__version__}\n")
    print(_table(done))
    print("\n" + _verdict(done[0]) + note)
    if args.json:
        records = [dataclasses.asdict(times) for times in done]
        args.json.write_text(json.dumps({"device": device, "preset": preset, "times": records}, indent=1))
    return 0


def _with_torch(
    done: list[bench.CheckpointTimes], shapes: list[tuple[int, ...]], directory: Path, rounds: int
) -> tuple[list[bench.CheckpointTimes], str]:
    if not bench.has_torch():
        return done, "\ntorch is not installed: torch DCP was left out"
    print("torch DCP ...", file=sys.stderr)
    try:
        seconds = bench.measure_torch(
            shapes, directory, rounds=rounds, processes=jax.device_count(), device="cuda" if on_gpu() else "cpu"
        )
    except RuntimeError as error:
        return done, f"\ntorch DCP failed:\n{error}"
    return [*done, bench.CheckpointTimes("torch DCP", bench.float32_bytes(shapes), **seconds)], ""


def _table(done: list[bench.CheckpointTimes]) -> str:
    header = ("", "blocks", "saved", "", "restored", "", "moved", "moved / restored")
    rows = []
    for times in done:
        ratio = times.ratio("moved", "restored")
        rates = [_rate(times, what) for what in ("saved", "restored")]
        seconds = [_seconds(times.median(what)) for what in ("blocked", "saved", "restored", "moved")]
        cells = (seconds[0], seconds[1], rates[0], seconds[2], rates[1], seconds[3])
        rows.append((times.who, *cells, "" if ratio is None else f"{ratio:.2f}"))
    return columns(header, rows, right=range(1, len(header)))


def _verdict(ours: bench.CheckpointTimes) -> str:
    lines = []
    ratio = ours.ratio("moved", "restored")
    if ratio is not None:
        lines.append(f"another mesh: {ratio:.2f} times the same one (goal: at most {_RESHARD_GOAL})")
    save, restore = ours.ratio("save_checksums", "saved"), ours.ratio("restore_checksums", "restored")
    assert save is not None and restore is not None
    lines.append(f"checksums: {save:.1%} of a save, {restore:.1%} of a restore (goal: at most {_CHECKSUM_GOAL:.0%})")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "" if value is None else quantity(value, "s")


def _rate(times: bench.CheckpointTimes, what: str) -> str:
    value = times.median(what)
    return "" if not value else quantity(times.state_bytes / value, "B/s")
