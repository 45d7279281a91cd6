"""`gtp-jax bench recipes`: measures what each recipe costs in loss."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import benchmarks
from gtp_jax.hlo import columns
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import positive, whole

from ._arguments import seconds_within

_DESCRIPTION = """\
Trains the same Llama on the same text from the same seed with several recipes, each in its own process, one at a time
per GPU. Losses are logged to NAME.jsonl in --out during training. At the end, prints a table of final losses with their
gaps to bf16, and draws a picture, recipes.png. Both include earlier runs in --out, which must have the same settings.
"""

_EXAMPLES = f"""\
recipes: {", ".join(benchmarks.VARIANTS)}
`bf16-seed1` is bf16 from other initial weights on the same text: a gap that is not larger than its gap means nothing.
Some recipes deliberately omit a part or contain a mistake: those with `-no-` in their names, `nvfp4-local-amax` (shards
do not agree on an amax) and `mxfp8-rounded-down` (the scales that the OCP specification suggests, for weights only).

examples:
  gtp-jax bench recipes --out curves                    100m on GPUs; on a CPU tiny, for 50 steps
  gtp-jax bench recipes --recipes nvfp4-matmuls mxfp8-matmuls --steps 10000 --data books/ --out curves
  gtp-jax bench recipes --recipes fp8 --out curves      one more recipe, in addition to those in curves
  gtp-jax bench recipes --draw --out curves             the table and the picture again, without training
"""


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "recipes",
        help="loss curves of recipes, compared with bf16",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topic.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory for logs and the picture")
    topic.add_argument(
        "--recipes",
        nargs="+",
        default=list(benchmarks.DEFAULT_VARIANTS),
        metavar="NAME",
        help="recipes to train, from the list below; bf16 is added if --out does not have it (default: all "
        "except fp8-matmuls-e4m3 and nvfp4-matmuls-mxfp8-down)",
    )
    topic.add_argument("--preset", choices=PRESETS, help="the model (default: 100m on GPUs, tiny on a CPU)")
    topic.add_argument("--head-dim", type=whole, help="width of an attention head (default: the preset's)")
    topic.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="text to train on (default: Python's standard library)"
    )
    topic.add_argument(
        "--steps", type=whole, help="number of steps of each recipe (default: 3000 on GPUs, 50 on a CPU)"
    )
    topic.add_argument("--batch", type=whole, help="sequences per step (default: 16 on GPUs, 8 on a CPU)")
    topic.add_argument("--seq", type=whole, help="tokens per sequence (default: 512 on GPUs, 64 on a CPU)")
    topic.add_argument("--lr", type=positive, help="peak learning rate (default: 0.003 * sqrt(128 / width))")
    topic.add_argument(
        "--seed", type=int, default=0, help="seed of the weights and of the order of the text (default: 0)"
    )
    topic.add_argument(
        "--within",
        type=positive,
        metavar="MIN",
        help="time limit in minutes for all runs; those that are still running then are ended",
    )
    topic.add_argument("--draw", action="store_true", help="train nothing; show the logs in --out")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    variants = benchmarks.chosen_variants(args.recipes)
    if "bf16" not in args.recipes and (args.out / "bf16.jsonl").exists():
        variants = variants[1:]  # its log is there to compare with
    failures: dict[str, str] = {}
    if args.draw:
        settings = benchmarks.settings_in(args.out)
        if settings is None:
            raise ValueError(f"{args.out} has no logs. Remove --draw to train, or choose another --out.")
    else:
        settings, failures = _train(args, variants)
    shown = [v for v in benchmarks.VARIANTS.values() if (args.out / f"{v.name}.jsonl").exists() or v.name in failures]
    curves = [benchmarks.read_curve(v, args.out, failures.get(v.name, "")) for v in shown]
    print(f"{settings.title}\n\n{_table(curves)}")
    if failures:
        print("\ndid not finish: " + "; ".join(f"{name} ({why})" for name, why in failures.items()))
    picture = args.out / "recipes.png"
    benchmarks.draw_curves(curves, settings.title, picture)
    print(f"\nthe picture of the curves: {picture}")
    return 1 if failures else 0


def _train(
    args: argparse.Namespace, variants: list[benchmarks.Variant]
) -> tuple[benchmarks.CurveSettings, dict[str, str]]:
    environment = benchmarks.environment_of(1)
    device, platform, count = benchmarks.probe(environment)
    settings = benchmarks.curve_settings(
        platform,
        preset=args.preset,
        head_dim=args.head_dim,
        steps=args.steps,
        batch=args.batch,
        seq=args.seq,
        seed=args.seed,
        lr=args.lr,
        data=tuple(args.data),
        device=device,
    )
    benchmarks.check_comparable(args.out, settings, variants)
    args.out.mkdir(parents=True, exist_ok=True)
    with tqdm(total=settings.steps * len(variants), unit="step", file=sys.stderr, disable=None) as progress:
        failures = benchmarks.run_curves(
            benchmarks.slowest_first(variants),
            settings,
            args.out,
            environment=environment,
            gpus=benchmarks.gpus_of(environment, platform, count),
            within_s=seconds_within(args),
            report=lambda done: progress.update(done - progress.n),
        )
    return settings, failures


def _table(curves: list[benchmarks.Curve]) -> str:
    steps = max((int(c.steps[-1]) for c in curves if len(c.steps)), default=0)
    base = curves[0]
    gap = f"to {base.variant.name}"
    header = ("recipe", "loss", gap, "held out", gap, "ms per step", "published")
    rows = []
    for curve in curves:
        last = curve.held_out.get(steps, math.nan)
        rows.append(
            (
                curve.variant.name,
                "diverged" if curve.diverged else _number(curve.final(steps)),
                _gap(curve.final(steps), base.final(steps)) if curve is not base else "",
                _number(last),
                _gap(last, base.held_out.get(steps, math.nan)) if curve is not base else "",
                "" if curve.step_s is None else f"{1e3 * curve.step_s:.1f}",
                curve.variant.published,
            )
        )
    return columns(header, rows, right=(1, 2, 3, 4, 5))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _gap(value: float, base: float) -> str:
    return "-" if not math.isfinite(value / base) else f"{100 * (value / base - 1):+.2f} %"
