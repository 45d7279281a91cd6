"""`gtp-jax bench generate`: times the generation of a token."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

import benchmarks
from gtp_jax.hlo import quantity
from gtp_jax.mesh import choose_devices, make_mesh, on_gpu
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import check_files, whole

_EXAMPLES = """\
examples:
  gtp-jax bench generate                              1.1 B parameters, on one GPU
  gtp-jax bench generate --preset reference --prompt 4096 --json generate.json
"""

_PRESET = {True: "1b", False: "tiny"}


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "generate",
        help="the time to generate a token, compared with the time to read its weights and cache",
        description="Generates from one prompt on one device, with random weights in bfloat16, and times the calls "
        "of the decoding program, which generate 16 tokens each. Compilation and the prompt are not "
        "included. If the memory bandwidth of the GPU is known, prints the ratio of the time per token "
        "to the time of reading what a token must read.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topic.add_argument("--preset", choices=PRESETS, help="the model (default: 1b on GPUs, tiny on a CPU)")
    topic.add_argument("--num-layers", type=whole, metavar="N", help="number of layers, instead of the preset's")
    topic.add_argument("--vocab-size", type=whole, metavar="N", help="size of the vocabulary, instead of the preset's")
    topic.add_argument(
        "--prompt", type=whole, default=128, metavar="N", help="number of tokens in the prompt (default: 128)"
    )
    topic.add_argument(
        "--tokens", type=whole, default=256, metavar="N", help="number of new tokens, at least 17 (default: 256)"
    )
    topic.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_files(args.json)
    choose_devices(1)
    preset = args.preset or _PRESET[on_gpu()]
    changed = {name: getattr(args, name) for name in ("num_layers", "vocab_size") if getattr(args, name)}
    config = dataclasses.replace(PRESETS[preset], **changed)
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        found = benchmarks.measure_generate(config, prompt=args.prompt, tokens=args.tokens)
    device = jax.devices()[0].device_kind
    rate = benchmarks.memory_rate(device)
    ratio = None if rate is None else found.over_reading(rate)
    print(
        f"{device}, jax {jax.__version__}: {preset}, {config.param_count() / 1e9:.3g} B parameters in bfloat16, one "
        f"row, a prompt of {args.prompt} tokens, {args.tokens} new\n"
    )
    times = ", ".join(f"{1e3 * s:.3f}" for s in (found.low_s, found.high_s))
    print(f"a token          {1e3 * found.seconds:.3f} ms, the median of {found.calls} calls (least, most: {times})")
    print(
        f"it must read     {quantity(found.weight_bytes, 'B')} of weights, {quantity(found.cache_bytes, 'B')} of cache"
    )
    if rate is not None and ratio is not None:
        verdict = "reached" if ratio <= benchmarks.GENERATE_GOAL else "MISSED"
        print(f"memory bandwidth {quantity(rate, 'B/s')}")
        print(f"time / reading   {ratio:.2f}, goal at most {benchmarks.GENERATE_GOAL:g}: {verdict}")
    if args.json:
        sizes = {**changed, "prompt": args.prompt, "tokens": args.tokens, "parameters": config.param_count()}
        record = {"device": device, "jax": jax.__version__, "preset": preset, **sizes, **dataclasses.asdict(found)}
        known = {"memory_rate": rate, "ratio": ratio, "goal": benchmarks.GENERATE_GOAL}
        args.json.write_text(json.dumps(record | known, indent=1))
    return 0
