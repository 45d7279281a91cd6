"""Trains a Llama on text with one recipe: `python curve.py nvfp4-matmuls --log nvfp4.jsonl --steps 3000`.

The log has one JSON object per line: the settings, the loss of each step, the held-out loss at intervals and, at the
end, the seconds per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from mistakes import with_mistake

import gtp_jax as gtp
from gtp_jax.models import PRESETS, build, family_of
from gtp_jax.runner.data import Loader, Windows, load_corpus, read_text

sys.path.insert(0, str(Path(__file__).parents[2]))  # the checkout comes before any other `benchmarks`
from benchmarks import VARIANTS, CurveSettings  # noqa: E402

_FETCH = 25  # the number of steps whose losses are fetched together, so that the device does not wait
_HELD_OUT_BATCHES = 16
_EVALUATIONS = 6


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("variant", choices=VARIANTS)
    flags.add_argument("--log", type=Path, required=True)
    flags.add_argument("--preset", default="100m", choices=PRESETS)
    flags.add_argument("--head-dim", type=int)
    flags.add_argument("--data", nargs="*", default=[])
    for name, default in (("steps", 3000), ("batch", 16), ("seq", 512), ("seed", 0)):
        flags.add_argument(f"--{name}", type=int, default=default)
    flags.add_argument("--lr", type=float, required=True)
    flags.add_argument("--device", default="")
    args = flags.parse_args()
    settings = CurveSettings(**{name: value for name, value in vars(args).items() if name not in ("variant", "log")})
    variant, config = VARIANTS[args.variant], settings.config

    def loss(model: nnx.Module, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        if variant.mistake:
            model = with_mistake(model, variant.mistake)
        return family_of(config).loss(model, batch)

    each = max(1, args.steps // _EVALUATIONS)
    corpus = load_corpus(read_text(args.data))
    corpus.check(batch=args.batch, seq=args.seq)
    with args.log.open("w", buffering=1) as log, jax.set_mesh(gtp.make_mesh(gtp=1, devices=jax.devices()[:1])):

        def write(**values: object) -> None:
            log.write(json.dumps(values) + "\n")

        write(settings=dataclasses.asdict(settings))
        mesh = jax.sharding.get_mesh()
        warmup = min(200, args.steps // 10)
        rate = optax.warmup_cosine_decay_schedule(0, args.lr, warmup, args.steps, end_value=args.lr / 10)
        optimizer = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
        rngs = nnx.Rngs(args.seed + variant.seed)
        model = gtp.init(lambda rngs: build(config, rngs=rngs), rngs)
        state = gtp.TrainState.create(model, optimizer, recipe=variant.recipe)
        step = gtp.train_step(loss, optimizer, max_grad_norm=1.0, recipe=variant.recipe, view="local")
        evaluate = gtp.eval_step(loss, recipe=variant.recipe, view="local")
        train = Loader(corpus.rows(args.seq, args.seed), args.batch, mesh)
        held_out = Loader(Windows(corpus.held_out[0].tokens, args.seq, args.seed), args.batch, mesh)
        tests = list(held_out.steps(0, _HELD_OUT_BATCHES))

        waiting: list[tuple[int, jax.Array]] = []
        begin, done, seconds = time.perf_counter(), 0, []
        for number, batch in enumerate(train.steps(0, args.steps), start=1):
            state, metrics = step(state, batch)
            waiting.append((number, metrics["loss"]))
            evaluates = number % each == 0 or number == args.steps
            if number == 1 or number % _FETCH == 0 or evaluates:
                for at, value in waiting:
                    write(step=at, loss=float(value))
                waiting.clear()
                seconds.append((time.perf_counter() - begin) / (number - done))
                if evaluates:
                    write(step=number, held_out=float(np.mean([float(evaluate(state, b)["loss"]) for b in tests])))
                begin, done = time.perf_counter(), number
        write(done=True, step_s=float(np.median(seconds[1:] or seconds)), first_s=seconds[0])


if __name__ == "__main__":
    main()
