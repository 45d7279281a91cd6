"""`gtp-jax bench step`: times a training step of gtp_jax and its rivals, in one run on one machine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import benchmarks
from gtp_jax.chain import REMAT
from gtp_jax.experts import TRANSPORTS
from gtp_jax.hlo import columns, quantity
from gtp_jax.nn import GRAD_REDUCE
from gtp_jax.runner.cli import check_files, whole
from gtp_jax.runner.flags import ExpertOptions, Quantization, add_flags, from_settings, given

from ..contenders.workload import COMMAND_BUFFERS, XLA_OPTIONS
from ._arguments import add_file_flags, add_run_flags, check_torch_python, seconds_within

_EXAMPLES = """\
examples:
  gtp-jax bench step                                    the reference step of all contenders, on this machine's GPUs
  gtp-jax bench step --contenders "gtp_jax regather" "fsdp2 bf16" --tokens 2048 --seq 2048
  gtp-jax bench step --contenders "gtp_jax fp8-matmuls" "fsdp2 float8"     FP8 matmuls against FP8 matmuls of torchao
  gtp-jax bench step --contenders "gtp_jax fp8-matmuls" te --preset 1b --seq 4096 --tokens 8192 --gtp 1
                                                        ... and of TransformerEngine
  gtp-jax bench step --preset 70b --num-layers 4 --within 9 --json run.json --png run.png
  gtp-jax bench step --contenders nvfp4-matmuls --high-precision-last 2 --microbatches 4 --pregathered-layers all
  gtp-jax bench step --contenders "gtp_jax bf16" --remat matmuls activations    what keeping more gains
  gtp-jax bench step --contenders "gtp_jax bf16 regather" "fsdp2 bf16 regather" --grad-reduce float32 bf16-wire bf16
                                                        what it costs to sum weight gradients in float32
  gtp-jax bench step --preset qwen3-30b-a3b --num-layers 12 --vocab-size 32768 --seq 4096 --tokens 16384 --gtp 1 \\
      --ep 2 --transport gather ragged --contenders "gtp_jax bf16 regather"     experts on ranks of their own
  gtp-jax bench step --preset 1b --seq 4096 --tokens 8192 --gtp 1 --command-buffers default off on \\
      --contenders "gtp_jax bf16 regather" "gtp_jax fp8-matmuls regather"     what CUDA graphs bring
  gtp-jax bench step --compare run.json                 the same again, and what has become slower since
  gtp-jax bench step --contenders "gtp_jax nvfp4"       on a machine without a GPU: a tiny model on virtual devices

Select contenders by words of their names, which consist of a family, a variant and a policy (regather or keep):

  gtp_jax      a recipe
  partitioner  scan, unrolled or combined
  fsdp2        bf16; at tp 1, float8 tensorwise or float8 rowwise; at tp above 1, bf16 async-tp
  te           at tp 1, current grad-norm or current grad-norm-cond
  bound        bf16 or fp8, without a policy

Flags about recipes apply to gtp_jax's contenders, in addition to the recipe in their names. Each contender is a script
in benchmarks/contenders that can be run on its own. FSDP2 needs PyTorch, and its float8 contenders also need torchao.
The contenders called te are the partitioner's with FP8 matmuls of TransformerEngine. They run if it is installed (see
docs/benchmarks.md) or if --contenders names te.
"""

_FORMULA = (
    "FLOPs of a step: 6 x matmul parameters x tokens + 6 x layers x tokens x sequence x heads x head_dim (causal "
    "attention at half; recomputation not counted)"
)

_LEGEND = (
    "grads: dtype in which weight gradients are sent and summed over the ranks. x fsdp2, x XLA, x te: times as fast "
    "as the fastest contender of PyTorch FSDP2, XLA's partitioner and TransformerEngine with the same entries in the "
    "columns `matmuls` and `weights`"
)


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "step",
        help="a training step of gtp_jax, XLA's partitioner, PyTorch FSDP2 and TransformerEngine, and a bound",
        description="Runs a training step of the same Llama with the same batch size and optimizer in every "
        "contender, each in its own process. Ratios compare contenders that multiply in the same formats "
        "and make the same choice: to gather weights again in backward, or to keep them for it. "
        f"{_FORMULA}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("preset", "num-layers", "seq", "tokens", "gtp", "tp", "contenders", "steps", "json"),
    )
    add_flags(topic, benchmarks.StepOptions, but=("dp",))
    add_flags(topic, ExpertOptions, but=("transport",))
    topic.add_argument(
        "--transport",
        nargs="+",
        choices=TRANSPORTS,
        default=[],
        help="how tokens are sent over ep; give several to compare them (default: the one that suits the devices)",
    )
    add_flags(topic, Quantization, but=("recipe",))
    topic.add_argument(
        "--remat",
        nargs="+",
        choices=REMAT,
        default=["matmuls"],
        help="what gtp_jax's layers keep for backward; give several to compare them (default: matmuls)",
    )
    topic.add_argument(
        "--grad-reduce",
        nargs="+",
        choices=GRAD_REDUCE,
        default=["bf16"],
        help="how gtp_jax sums weight gradients over the ranks; give several to compare them (default: bf16, as in the "
        "other contenders; the default of gtp_jax's models is float32)",
    )
    topic.add_argument(
        "--command-buffers",
        nargs="+",
        choices=COMMAND_BUFFERS,
        default=["default"],
        help="what XLA records into command buffers (CUDA graphs) in gtp_jax's steps on GPUs: `default` leaves the "
        "choice to XLA, `off` records nothing, `on` records every kind of command; give several to compare them "
        "(default: default)",
    )
    topic.add_argument(
        "--xla-options",
        nargs="+",
        choices=XLA_OPTIONS,
        default=["gtp_jax"],
        help="the options with which gtp_jax's steps are compiled on GPUs: `gtp_jax` for those that `train_step` "
        "chooses, `default` for XLA's defaults, as in a plain `jax.jit`; give both to compare them (default: gtp_jax)",
    )
    topic.add_argument(
        "--steps", type=whole, default=12, help="number of timed steps, after 3 warm-up steps (default: %(default)s)"
    )
    topic.add_argument(
        "--contenders", nargs="+", default=[], metavar="WORDS", help="contenders to measure (default: all)"
    )
    add_run_flags(topic, timeout_s=240, one="contender")
    topic.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="print the changes since this saved run; the exit status is 1 if there are regressions",
    )
    add_file_flags(topic, json="also write the run to this file", png="draw the run to this file")
    topic.add_argument("--logs", type=Path, metavar="DIR", help="directory for the output of each contender")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    step = from_settings(benchmarks.StepOptions, given(args, benchmarks.StepOptions))
    options = from_settings(Quantization, given(args, Quantization))
    chosen = benchmarks.with_recipe(benchmarks.chosen_contenders(args.contenders, tp=step.parallelism.tp or 1), options)
    chosen = benchmarks.with_remat_policies(chosen, args.remat)
    chosen = benchmarks.with_grad_reductions(chosen, args.grad_reduce)
    chosen = benchmarks.with_command_buffers(chosen, args.command_buffers)
    chosen = benchmarks.with_xla_options(chosen, args.xla_options)
    if args.transport and step.parallelism.ep == 1:
        raise ValueError(
            f"`--transport` is {' '.join(args.transport)}, but no tokens are sent at ep 1. Add --ep, or "
            "remove --transport."
        )
    words = {name: value for name, value in given(args, ExpertOptions).items() if name != "transport"}
    experts = ExpertOptions(**words)
    chosen = benchmarks.with_experts(
        chosen, experts.flags(but=("top_k", "aux_loss_coeff", "shared_hidden")), args.transport
    )
    check_files(args.json, args.png)
    check_torch_python(args.torch_python)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    saved = None if args.compare is None else _read(args.compare)
    environment = benchmarks.environment_of(step.parallelism.virtual_devices(benchmarks.VIRTUAL_DEVICES))
    device, platform, count = benchmarks.probe(environment)
    work = step.workload(platform, count, steps=args.steps, experts=experts)
    if saved is not None:
        benchmarks.changes(
            benchmarks.record([benchmarks.Row(c, failure="to be run") for c in chosen], work, device), saved
        )
    rows: list[benchmarks.Row] = []
    with tqdm(total=len(chosen), unit="contender", file=sys.stderr, disable=None) as progress:
        progress.set_description(chosen[0].name)
        measured = benchmarks.measure_steps(
            chosen,
            work,
            environment=environment,
            torch_python=args.torch_python,
            timeout_s=args.timeout,
            within_s=seconds_within(args),
            logs=args.logs,
        )
        for row in measured:
            rows.append(row)
            progress.set_description(chosen[min(len(rows), len(chosen) - 1)].name)
            progress.update()
    families = list(dict.fromkeys(c.family for c in (*benchmarks.CONTENDERS, *benchmarks.ENGINES)))
    rows.sort(key=lambda row: families.index(row.contender.family))
    record = benchmarks.record(rows, work, device)
    title = benchmarks.describe(work, device)
    if options != Quantization():
        title += f"; gtp_jax with {' '.join(options.flags)}"
    versions = sorted({f"{k} {v}" for row in rows for k, v in row.facts.get("versions", {}).items()})
    print(f"{title}; {', '.join(versions)}\n")
    print(_table(rows, work))
    print(f"\n{_LEGEND}")
    failures = [row for row in rows if row.failure]
    if failures:
        print("\nno result from")
        print("\n".join(f"  {row.contender.name}: {row.failure}" for row in failures))
    print(f"\n{_FORMULA}: {quantity(benchmarks.workload_flops(work) / work.devices, 'FLOP')} per device")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1))
    if args.png:
        benchmarks.draw_steps(rows, benchmarks.workload_flops(work) / work.devices, title, args.png)
    return 0 if saved is None else _print_changes(benchmarks.changes(record, saved))


def _table(rows: list[benchmarks.Row], work: benchmarks.Workload) -> str:
    rivals = {"fsdp2": "x fsdp2", "partitioner": "x XLA"}
    if any(row.contender.family == "te" for row in rows):
        rivals["te"] = "x te"
    header = (
        "contender",
        "matmuls",
        "weights",
        "grads",
        "ms",
        "low to high",
        "tokens/s",
        "TFLOP/s",
        "GiB",
        "compile s",
        *rivals.values(),
    )
    flops = benchmarks.workload_flops(work) / work.devices
    cells = []
    for row in rows:
        name = f"{row.contender.family} {row.contender.variant}".strip()
        if row.failure:
            cells.append((name, row.contender.matmuls, row.contender.policy, "", "-", *[""] * (len(header) - 5)))
            continue
        s, peak, compile_s = row.median_s, row.facts.get("peak_bytes"), row.facts.get("compile_s")
        ratios = (benchmarks.ratio(row, rows, family) for family in rivals)
        cells.append(
            (
                name,
                row.contender.matmuls,
                row.contender.policy,
                row.facts.get("reduce_dtype", ""),
                f"{s * 1e3:.1f}",
                f"{row.low_s * 1e3:.1f} to {row.high_s * 1e3:.1f}",
                f"{work.tokens / work.devices / s:.0f}",
                f"{flops / s / 1e12:.3g}",
                "" if peak is None else f"{peak / 2**30:.3g}",
                "" if compile_s is None else f"{compile_s:.1f}",
                *("" if r is None else f"{r:.3f}" for r in ratios),
            )
        )
    return columns(header, cells, right=range(4, len(header)))


def _print_changes(changes: list[benchmarks.Change]) -> int:
    worse = [c for c in changes if c.is_regression]
    shown = {"step": lambda v: f"{v * 1e3:.1f} ms", "memory": lambda v: quantity(v, "B")}
    print(f"\nsince the saved run, {len(worse)} regressions of more than {benchmarks.TOLERANCE:.0%}")
    cells = [
        (
            c.name,
            c.what,
            shown[c.what](c.then),
            shown[c.what](c.now),
            f"{c.relative:+.1%}",
            "REGRESSION" * c.is_regression,
        )
        for c in changes
    ]
    print(columns(("contender", "", "then", "now", "change", ""), cells, right=(2, 3, 4)))
    return 1 if worse else 0


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(
            f"`--compare` is {path}, which is not a file. Give one that `gtp-jax bench step --json` wrote."
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(
            f"`--compare` is {path}, which is not JSON: {error}. Give a file that `gtp-jax bench step --json` wrote."
        ) from None
