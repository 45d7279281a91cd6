"""`gtp-jax bench suite`: times a table of training steps with gtp_jax and its rivals, in rounds on one machine."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import benchmarks
from gtp_jax.hlo import columns
from gtp_jax.runner.cli import check_files, positive, whole

from ._arguments import add_file_flags, add_run_flags, check_torch_python, seconds_within

_DESCRIPTION = """\
Runs a table of training steps (workloads), each with gtp_jax and its rivals, such as XLA's partitioner and PyTorch
FSDP2. The contenders of a workload take turns, in rounds on one machine. The time of a contender is the median of its
rounds' medians, with the smallest and the largest of them. The partitioner runs with and without combined collectives,
and with XLA's default options and gtp_jax's. Ratios compare the same work: the same matmul formats, the same policy of
gathering weights (any policy if none are gathered), and only those variants of the partitioner that compute the norm of
all gradients and guard the update (`grad-norm`), as gtp_jax does. A goal counts as reached if it is missed by at most
0.5 %.
"""

_EXAMPLES = """\
examples:
  gtp-jax bench suite --list                                       workloads, contenders and goals; nothing runs
  gtp-jax bench suite --json suite.json --png suite.png            everything that this machine has GPUs for
  gtp-jax bench suite --json suite.json --within 9                 9 minutes of it; the same command again continues
  gtp-jax bench suite --devices 2 --workloads reference-gtp2 --json suite.json --contenders "gtp_jax regather" \\
      "grad-norm regather" "fsdp2 regather" --slower 3             one workload with some of its contenders
  gtp-jax bench suite --workloads "qwen3*" --rounds 1 --steps 4    a first look
  gtp-jax bench suite --workloads 100m                             without a GPU: tiny steps on virtual devices

A run continues from the file of --json: results in it are not measured again. The file is refused on another kind of
device, and if --steps, the versions or the source of contenders have changed. A workload that was started on another
machine of the same kind, but not finished there, is measured again as a whole.
"""

_LEGEND = (
    "rounds: smallest to largest median of a round, and the number of rounds. x XLA, x fsdp2: times as fast as the "
    "fastest rival that does the same work. planned: GiB of arguments and temporaries as XLA planned them. grads: "
    "dtype in which weight gradients are sent and summed over the ranks. embedding: dtype in which the gradients of an "
    "embedding's rows are summed over the tokens"
)


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "suite",
        help="a table of training steps, compared with the best of each rival, in rounds that can be continued",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("devices", "workloads", "contenders", "list", "rounds", "slower", "cache", "within", "json", "png"),
    )
    topic.add_argument(
        "--devices", type=whole, metavar="N", help="run only workloads of this many devices (default: all that fit)"
    )
    topic.add_argument(
        "--workloads", nargs="+", default=[], metavar="NAME", help="workloads to run, by name or pattern (default: all)"
    )
    topic.add_argument(
        "--contenders",
        nargs="+",
        default=[],
        metavar="WORDS",
        help="contenders of each workload, by words of their names (default: all)",
    )
    topic.add_argument("--list", action="store_true", help="print the workloads, contenders and goals, and run nothing")
    topic.add_argument("--rounds", type=whole, default=3, help="number of rounds (default: %(default)s)")
    topic.add_argument(
        "--steps",
        type=whole,
        help="number of timed steps per round, after 3 warm-up steps (default: the number in the table)",
    )
    topic.add_argument(
        "--slower",
        type=positive,
        metavar="PERCENT",
        help="do not repeat variants of a rival that, in the first round, were slower by more than this percentage "
        "than the fastest one that does the same work (default: repeat all)",
    )
    topic.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="keep compiled programs in this directory for later rounds. This saves minutes, but all rounds then "
        "run the kernels that autotuning chose in the first (default: JAX compiles again in each round)",
    )
    add_run_flags(topic, timeout_s=240, one="process")
    add_file_flags(
        topic, json="save the results to this file, and continue from it", png="draw the ratios to this file"
    )
    topic.add_argument("--logs", type=Path, metavar="DIR", help="directory for the output of each process")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_files(args.json, args.png)
    check_torch_python(args.torch_python)
    every = sorted({workload.devices for workload in benchmarks.WORKLOADS})
    if args.list:
        if args.json is not None and args.json.exists():
            benchmarks.read_suite(args.json)
        devices = every if args.devices is None else [args.devices]
        print(
            _listed(benchmarks.chosen_workloads(args.workloads, args.contenders, devices), args.contenders, args.rounds)
        )
        return 0
    environment = benchmarks.environment_of(max(every))
    device, platform, count = benchmarks.probe(environment)
    if args.devices is not None and args.devices > count:
        raise ValueError(f"`--devices` is {args.devices}, but this machine has {count}. Use at most that many.")
    devices = [n for n in every if n <= count] if args.devices is None else [args.devices]
    known = [workload.on(platform) for workload in benchmarks.WORKLOADS]
    workloads = [w.on(platform) for w in benchmarks.chosen_workloads(args.workloads, args.contenders, devices)]
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    settings = benchmarks.settings_here(device, args.torch_python, steps=args.steps)
    file = benchmarks.SuiteFile(args.json, settings, lambda results: benchmarks.suite_summary(known, results))
    options = benchmarks.SuiteOptions(
        platform=platform,
        machine=benchmarks.this_machine(platform == "gpu"),
        environment={**environment, **_cache(args.cache)},
        rounds=args.rounds,
        contenders=args.contenders,
        steps=args.steps,
        timeout_s=args.timeout,
        within_s=seconds_within(args),
        slower=None if args.slower is None else args.slower / 100,
        torch_python=args.torch_python,
        logs=args.logs,
    )
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items() if version)
    title = f"{device}, {versions}"
    print(f"{title}\n", flush=True)
    for workload, result in benchmarks.run_suite(workloads, file, options, say=_say):
        _say(_line(workload, result, args.rounds))
    for workload in workloads:
        rows = benchmarks.rows_of(workload, file.results, args.contenders)
        if rows:
            print(f"\n{_table(workload, rows, platform)}")
    print(f"\n{_LEGEND}")
    if args.png:
        found = [(w, benchmarks.rows_of(w, file.results)) for w in known]
        benchmarks.draw_suite([(w, rows) for w, rows in found if rows], f"gtp_jax and its rivals, {device}", args.png)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def _cache(folder: Path | None) -> dict[str, str]:
    if folder is None:
        return {}
    return {
        "JAX_COMPILATION_CACHE_DIR": os.fspath(folder.absolute() / "jax"),
        "TORCHINDUCTOR_CACHE_DIR": os.fspath(folder.absolute() / "inductor"),
    }


def _line(workload: benchmarks.SuiteWorkload, result: benchmarks.Result, rounds: int) -> str:
    head = f"{workload.name}  {result.round + 1}/{rounds}  {result.contender}"
    if result.failure:
        return f"{head}: {result.failure}"
    ordered = sorted(result.seconds)
    median = 1e3 * (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
    low, high = 1e3 * ordered[0], 1e3 * ordered[-1]
    return f"{head}  {median:.1f} ms ({low:.1f} to {high:.1f}), process {result.wall_s:.0f} s"


def _listed(workloads: Sequence[benchmarks.SuiteWorkload], contenders: Sequence[str], rounds: int) -> str:
    lines, processes = [], 0
    for workload in workloads:
        goals = "; ".join(f"{g.ours} {g.ratio:.2f} x {g.rival}" for g in workload.goals) or "none"
        step = benchmarks.describe(workload.workload("gpu"), "GPU")
        chosen = workload.chosen(contenders)
        processes += rounds * len(chosen)
        lines += [f"{workload.name}: {workload.title}", f"  {step}", f"  goals: {goals}"]
        lines += [f"    {contender.name}" for contender in chosen]
    return "\n".join([*lines, f"{len(workloads)} workloads, {processes} processes in {rounds} rounds"])


def _table(workload: benchmarks.SuiteWorkload, rows: Sequence[benchmarks.Row], platform: str) -> str:
    work = workload.workload(platform)
    flops = benchmarks.workload_flops(work) / work.devices
    header = ("contender", "matmuls", "weights", "ms", "rounds", "x XLA", "x fsdp2")
    header += ("TFLOP/s", "planned", "peak GiB", "grads", "embedding", "compile s")
    cells = []
    for row in rows:
        name = f"{row.contender.family} {row.contender.variant}"
        if row.failure:
            continue
        ratios = (benchmarks.suite_ratio(row, rows, family, workload) for family in ("partitioner", "fsdp2"))
        cells.append(
            (
                name,
                row.contender.matmuls,
                row.contender.policy,
                f"{1e3 * row.median_s:.1f}",
                f"{1e3 * row.low_s:.1f} to {1e3 * row.high_s:.1f}, {len(row.seconds)}",
                *("" if r is None else f"{r:.3f}" for r in ratios),
                f"{flops / row.median_s / 1e12:.3g}",
                *(_gibibytes(row.facts.get(name)) for name in ("planned_bytes", "peak_bytes")),
                row.facts.get("reduce_dtype", ""),
                row.facts.get("embedding_dtype", ""),
                f"{row.facts['compile_s']:.1f}" if row.facts.get("compile_s") is not None else "",
            )
        )
    parts = [f"{workload.title}: {benchmarks.describe(work, platform)}"]
    if cells:
        parts.append(columns(header, cells, right=(3, 5, 6, 7, 8, 9, 12)))
    parts += [f"no result from {row.contender.name}: {row.failure}" for row in rows if row.failure]
    parts += [_verdict(v, rows) for v in benchmarks.suite_verdicts(workload, rows)]
    return "\n".join(parts)


def _verdict(verdict: benchmarks.Verdict, rows: Sequence[benchmarks.Row]) -> str:
    planned = {row.contender.name: row.facts.get("planned_bytes") for row in rows}
    ours, theirs = planned[verdict.name], planned[verdict.rival]
    memory = f"; planned {_gibibytes(ours)} GiB, there {_gibibytes(theirs)}" if ours and theirs else ""
    return (
        f"{'reached' if verdict.is_reached else 'MISSED '}: {verdict.name} {verdict.ratio:.3f} x {verdict.rival} "
        f"({verdict.low:.3f} to {verdict.high:.3f} in a round), goal {verdict.goal.ratio:.2f}{memory}"
    )


def _gibibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.3g}"
