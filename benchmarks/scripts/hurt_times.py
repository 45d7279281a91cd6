"""Times steps of a run that has lost a GPU of four: replicas of tp 2 and 1, beside what else one could do.

    python benchmarks/scripts/hurt_times.py                                           # 4 GPUs
    python benchmarks/scripts/hurt_times.py --preset tiny --seq 64 --layers 2         # 4 virtual CPU devices

Beside all four GPUs: the replica of tp 2 alone, and three GPUs with gtp 3. Each has one sequence a GPU. The share is of
the throughput of all four; of three GPUs, 75 % would be their part of the compute, and the aim is 97 % of that.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any, NamedTuple

import jax

from gtp_jax.train import all_reduce_with_nccl

all_reduce_with_nccl()  # ahead of the backend
jax.config.update("jax_num_cpu_devices", 4)  # of no account on GPUs

import optax  # noqa: E402
from flax import nnx  # noqa: E402
from steps import random_batch, seconds_of_steps  # noqa: E402

import gtp_jax as gtp  # noqa: E402
from gtp_jax.hlo import columns  # noqa: E402
from gtp_jax.models import Llama, next_token_loss, preset_of  # noqa: E402
from gtp_jax.nonuniform import plan_faults  # noqa: E402
from gtp_jax.recipes import RECIPES  # noqa: E402

HEADER = ("contender", "matmuls", "GPUs", "ms per step", "low", "high", "tokens/s", "share", "of its part")


class Contender(NamedTuple):
    """A way to train.

    Attributes:
        name: of the row.
        devices: that it uses.
        degrees: of its mesh; of the healthy run where slots have failed.
        failed: slots of the healthy mesh.
    """

    name: str
    devices: int
    degrees: dict[str, int]
    failed: tuple[int, ...] = ()


ALL = Contender("all four, tp 2 x dp 2", 4, dict(dp=2, tp=2))
CONTENDERS = [
    ALL,
    Contender("replicas of tp 2 and tp 1", 3, dict(dp=2, tp=2), (3,)),
    Contender("the hurt replica dropped", 2, dict(dp=1, tp=2)),
    Contender("gtp 3", 3, dict(gtp=3)),
]


def seconds_a_step(config: Any, contender: Contender, recipe: Any, seq: int, steps: int) -> list[float]:
    """Returns the seconds of each of so many steps of a contender."""
    optimizer = optax.adamw(1e-4)
    factory = lambda rngs: Llama(config, rngs=rngs)  # noqa: E731
    replicas = None
    if contender.failed:
        plan = plan_faults(**contender.degrees, failed=contender.failed, batch=contender.devices)  # pyright: ignore
        replicas = gtp.nonuniform.Replicas(factory, plan, jax.devices()[:4])
        mesh = replicas.core
    else:
        mesh = gtp.make_mesh(**contender.degrees, devices=jax.devices()[: contender.devices])  # pyright: ignore
    batch = random_batch(config.vocab_size, contender.devices, seq, replicas)
    with jax.set_mesh(mesh):
        state = gtp.TrainState.create(gtp.init(factory, nnx.Rngs(0)), optimizer)
        step = gtp.train_step(next_token_loss, optimizer, view="local", recipe=recipe, replicas=replicas)
        return seconds_of_steps(step, state, batch, steps)


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--preset", default="reference")
    flags.add_argument("--seq", type=int, default=8192, help="tokens of a sequence (default: 8192)")
    flags.add_argument("--layers", type=int, default=16, help="in place of the preset's (default: 16)")
    flags.add_argument("--steps", type=int, default=8, help="timed (default: 8)")
    flags.add_argument("--recipes", nargs="+", default=["bf16", "fp8-matmuls"], choices=RECIPES)
    flags.add_argument("--limit", type=float, default=1e9, help="begin nothing more after these seconds")
    options = flags.parse_args()
    began, rows = time.perf_counter(), []
    if len(jax.devices()) < 4:
        raise SystemExit(f"4 devices are needed, and there are {len(jax.devices())}.")
    config = dataclasses.replace(
        preset_of(options.preset), num_layers=options.layers, dtype="bfloat16", grad_reduce="bf16"
    )
    for recipe in options.recipes:
        whole = None
        for contender in CONTENDERS:
            if time.perf_counter() - began > options.limit:
                continue
            times = seconds_a_step(config, contender, RECIPES[recipe](), options.seq, options.steps)
            middle = statistics.median(times)
            rate = contender.devices * options.seq / middle
            whole = rate if contender is ALL else whole
            share = rate / (whole or rate)
            cells = (1e3 * middle, 1e3 * min(times), 1e3 * max(times))
            row = [contender.name, recipe, str(contender.devices), *(f"{cell:.1f}" for cell in cells)]
            rows.append(
                (*row, f"{rate:.0f}", f"{share:.1%}", f"{share * len(jax.devices()[:4]) / contender.devices:.1%}")
            )
            print(f"{time.perf_counter() - began:5.0f} s: {' '.join(row)}", flush=True)
    print(f"\n{jax.devices()[0].device_kind}, jax {jax.__version__}, {options.preset}, {options.layers} layers")
    print(columns(HEADER, rows, right=range(2, len(HEADER))))


if __name__ == "__main__":
    main()
