"""`gtp-jax bench growth`: measures how a step's cost grows with devices, depth, width and sequence."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import benchmarks
from gtp_jax.hlo import Target, columns, parse_target, topology_devices
from gtp_jax.runner.cli import check_files, whole
from gtp_jax.runner.flags import add_flags, from_settings, given

from ._arguments import add_file_flags, add_run_flags, check_torch_python, seconds_within

_DESCRIPTION = """\
Measures steps along five axes. By default, all axes except `strong` include the step that the flags describe, whose
defaults are those of `bench step`.

  weak      devices, from one gtp rank to all; the tokens per device stay the same
  strong    devices, from one gtp rank to all; each step has the tokens of one gtp rank, in proportionally shorter
            sequences
  depth     layers, from half the model's to 4 times the model's
  width     from half the model's to twice the model's; ffn and heads grow with it (reference: ffn 3.5 x width, heads
            width / 128)
  sequence  tokens per sequence, from a quarter of the step's to 4 times; the number of sequences stays the same

`efficiency` is FLOP/s per device, relative to the first point of the axis: 1 if time grows in proportion to the
operations per device. With --target, steps are compiled but not run. Then `modelled` time leaves out launches,
power and what streams cost each other, so it is below that of a step; memory is the planned peak; and compile time is
CPU seconds over all cores.
"""

_EXAMPLES = """\
examples:
  gtp-jax bench growth --json growth.json --png growth.png        all axes on this machine's GPUs
  gtp-jax bench growth --within 6 --steps 6                       ends of each axis first, then more if time is left
  gtp-jax bench growth --axes weak depth=8,64 --scan              two axes; depth also with the layers in a loop
  gtp-jax bench growth --contenders "gtp_jax bf16 regather" "fsdp2 bf16 regather" --axes weak strong
  gtp-jax bench growth --target h200:8 --png growth.png           compiled for 8 H200s, without having them

Select contenders by words of their names, as in `gtp-jax bench step`. Without a GPU and --target, a tiny model runs on
virtual devices. The ends of an axis are measured before its middle, and a step on several axes is measured only once.
"""


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "growth",
        help="growth of a step's time, memory and compile time with devices, depth, width and sequence",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("preset", "axes", "contenders", "scan", "target", "steps", "within", "json", "png"),
    )
    add_flags(topic, benchmarks.StepOptions, but=("dp", "ep"))
    topic.add_argument(
        "--axes",
        nargs="+",
        default=[],
        metavar="AXIS[=VALUE,...]",
        help=f"axes to measure, and values on them: {', '.join(benchmarks.AXES)} (default: all, with the values above)",
    )
    topic.add_argument(
        "--contenders",
        nargs="+",
        default=["gtp_jax bf16 regather"],
        metavar="WORDS",
        help="contenders to measure (default: gtp_jax bf16 regather)",
    )
    topic.add_argument(
        "--scan", action="store_true", help="on the axis `depth`, also measure gtp_jax with its layers in a loop"
    )
    topic.add_argument(
        "--target", metavar="CHIP:DEVICES", help="compile for GPUs that this machine does not have, such as h200:8"
    )
    topic.add_argument(
        "--steps", type=whole, default=12, help="number of timed steps, after 3 warm-up steps (default: %(default)s)"
    )
    add_run_flags(topic, timeout_s=600, one="point")
    add_file_flags(topic, json="write each point to this file when it is done", png="draw the points to this file")
    topic.add_argument("--logs", type=Path, metavar="DIR", help="directory for the output of each point")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    step = from_settings(benchmarks.StepOptions, given(args, benchmarks.StepOptions))
    axes = benchmarks.parse_axes(args.axes)
    contenders = benchmarks.chosen_contenders(args.contenders, tp=step.parallelism.tp or 1)
    check_files(args.json, args.png)
    check_torch_python(args.torch_python)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    environment = benchmarks.environment_of(step.parallelism.virtual_devices(benchmarks.VIRTUAL_DEVICES))
    target = None if args.target is None else parse_target(args.target)
    device, platform, count = _there(target, environment) if target else benchmarks.probe(environment)
    work = step.workload(platform, count, steps=args.steps)
    runs = benchmarks.growth_runs(benchmarks.growth_points(work, axes), contenders, scan=args.scan, target=target)
    if target is not None:
        topology_devices(target)  # raises an error now, before anything runs, if packages are missing
    settings: dict[str, Any] = {"device": device, "target": args.target, "workload": dataclasses.asdict(work)}
    costs: list[benchmarks.Cost] = []
    with tqdm(total=len(runs), unit="point", file=sys.stderr, disable=None) as progress:

        def announce() -> None:
            if len(costs) < len(runs):
                point, contender = runs[len(costs)]
                progress.set_description(f"{point.axis} {point.value}, {contender.name}")

        announce()
        for cost in benchmarks.measure_growth(
            runs,
            environment=environment,
            timeout_s=args.timeout,
            torch_python=args.torch_python,
            within_s=seconds_within(args),
            logs=args.logs,
        ):
            costs.append(cost)
            progress.update()
            announce()
            if args.json:
                args.json.write_text(
                    json.dumps({**settings, "costs": [dataclasses.asdict(c) for c in costs]}, indent=1)
                )
    names = list(dict.fromkeys(c.contender for c in costs))
    costs.sort(key=lambda c: (list(benchmarks.AXES).index(c.axis), names.index(c.contender), c.value))
    title = benchmarks.describe(work, device) + ("; compiled, not run" if target else "")
    print(f"step: {title}\n")
    print(_table(costs, target))
    print("\n" + "\n".join(f"{name}: all points have the same {benchmarks.AXES[name].stays}" for name in axes))
    for failure in dict.fromkeys(c.failure for c in costs if c.failure):
        print(f"\n{failure}")
        print("\n".join(f"  {c.contender}, {c.axis} {c.value}" for c in costs if c.failure == failure))
    if args.png:
        benchmarks.draw_growth(costs, title, args.png, modelled=target is not None)
    return 0


def _there(target: Target, environment: dict[str, str]) -> tuple[str, str, int]:
    """Returns for a target what `probe` returns for this machine, and keeps all processes on the CPU."""
    environment["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_platforms", "cpu")  # the plugin would look for a driver
    return target.chip.upper(), "gpu", target.devices


def _table(costs: list[benchmarks.Cost], target: Target | None) -> str:
    times = "modelled ms" if target else "ms"
    seconds = "compile CPU s" if target else "compile s"
    header = ["axis", "", "value", "devices", times, "x", "tokens/s", "efficiency", "GiB", seconds]
    if target:
        header += ["collectives", ""]
    several = len({c.contender for c in costs}) > 1
    rows = []
    for c in costs:
        first, share = benchmarks.first_of(c, costs), benchmarks.efficiency(c, costs)
        row = [
            c.axis,
            c.contender if several else "",
            f"{c.value}",
            f"{c.devices}",
            _shown(c.step_s, 1e3, ".1f") or "-",
            _shown(c.step_s, 1 / first.step_s if first and first.step_s else 1, ".2f"),
            _shown(c.tokens_rate, 1, ".0f"),
            _shown(share, 1, ".3f"),
            _shown(c.peak_bytes, 2**-30, ".3g"),
            _shown(c.compile_s, 1, ".1f"),
        ]
        if target:
            row += [_shown(c.collectives, 1, ".0f"), "does not fit" * benchmarks.over_memory(c, target.chip)]
        rows.append(row)
    return columns(header, rows, right=range(2, 11))


def _shown(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(value * scale, form)
