"""`gtp-jax profile`: draws a trace of one training step as a timeline."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ... import inspect
from ...hlo import columns
from ..flags import add_flags, from_settings, given
from ._arguments import check_files, positive
from ._checkout import benchmarks, has_benchmarks, refuse_elsewhere
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax profile                                      the reference step on this machine's GPUs
  gtp-jax profile --contender "gtp_jax nvfp4 keep" --html step.html
  gtp-jax profile --contender "partitioner combined regather"
                                                       what a rival does with the same step
  gtp-jax profile --trace DIR                          an existing trace of any JAX program

Exposed communication, in red, is not hidden by compute. Contenders have the same names as in `gtp-jax bench step`.
"""

# what `--help` shows
_MAIN = ("preset", "seq", "tokens", "gtp", "tp", "contender", "trace", "png", "html")

_TRACED = ("gtp_jax", "partitioner")


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Traces one step and draws the first device's timeline: compute, communication, what is exposed, "
        "and the share of each kind of work. Prints the shares; writes profile.png and profile.html.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=_MAIN if has_benchmarks() else (),
    )
    if not has_benchmarks():
        refuse_elsewhere(parser, "--trace")
    else:
        add_flags(parser, benchmarks().StepOptions, but=("dp", "ep"))
    parser.add_argument("--contender", default="gtp_jax bf16 regather", metavar="WORDS", help="(default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="read this trace instead of running a step")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the trace in DIR, for example for other tools")
    parser.add_argument("--png", type=Path, default=Path("profile.png"), metavar="FILE", help="(default: %(default)s)")
    parser.add_argument(
        "--html", type=Path, default=Path("profile.html"), metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the time of each kind of work to FILE")
    parser.add_argument(
        "--timeout", type=positive, default=300, metavar="S", help="seconds allowed for the run (default: %(default)s)"
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: if the run failed, or its trace is empty.
        FileNotFoundError: if there is no trace.
    """
    check_files(args.png, args.html, args.json)
    if args.trace is not None:
        return _show(args, args.trace, str(args.trace))
    bench = benchmarks()
    step = from_settings(bench.StepOptions, given(args, bench.StepOptions))
    (contender, *more) = bench.chosen_contenders([args.contender], tp=step.parallelism.tp or 1)
    if more or contender.family not in _TRACED:
        several = ", ".join(c.name for c in bench.CONTENDERS if c.family in _TRACED)
        raise ValueError(f"`--contender` is {args.contender!r}; it must name one of {several}.")
    environment = bench.environment_of(step.parallelism.virtual_devices(bench.VIRTUAL_DEVICES))
    device, platform, count = bench.probe(environment)
    work = step.workload(platform, count, steps=3)
    with _folder(args.keep) as folder:
        traced = dataclasses.replace(contender, flags=(*contender.flags, f"--trace={folder}"))
        print(f"tracing {contender.name} on {bench.describe(work, device)}", flush=True)
        (row,) = bench.measure_steps([traced], work, environment=environment, timeout_s=args.timeout)
        if row.failure:
            raise ValueError(f"{contender.name} failed: {row.failure}")
        return _show(args, folder, f"{contender.name}, {bench.describe(work, device)}")


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _show(args: argparse.Namespace, trace: Path, title: str) -> int:
    ops = inspect.read_trace(trace)
    breakdown = inspect.breakdown(ops)
    print(inspect.sentence(breakdown) + "\n")
    rows = [
        (kind, f"{us / 1e3:.3f}", f"{breakdown.share(kind):.1%}", sum(op.kind == kind for op in ops) or "")
        for kind, us in sorted(breakdown.by_kind.items(), key=lambda item: -item[1])
    ]
    print(columns(("kind", "ms", "share", "kernels"), rows, right=(1, 2, 3)))
    longest = sorted(ops, key=lambda op: op.start_us - op.end_us)[:8]
    print("\nlongest kernels")
    cells = [(f"{(op.end_us - op.start_us) / 1e3:.3f}", op.kind, op.stream, op.name[:80]) for op in longest]
    print(columns(("ms", "kind", "stream", "name"), cells, right=(0,)))
    inspect.draw_trace(ops, breakdown, title, args.png)
    inspect.write_page(ops, breakdown, title, args.html)
    print(f"\nwritten: {args.png}, {args.html}")
    if args.json:
        args.json.write_text(json.dumps({"title": title, **dataclasses.asdict(breakdown)}, indent=1))
    return 0
