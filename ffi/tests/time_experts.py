"""Times a layer of experts on one GPU, forward and backward, and prints which kernels its milliseconds go to.

    PYTHONPATH=. python ffi/tests/time_experts.py --out DIR

Contenders are interleaved in one process. DIR gets each contender's optimized HLO, and a table of its kernels.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import statistics
import tempfile
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

import gtp_jax as gtp
from gtp_jax import inspect as seen

TOKENS, SEQUENCE = 16384, 4096
SHAPES = {
    "qwen3": dict(features=2048, hidden=768, num_experts=128, top_k=8),
    "mixtral": dict(features=4096, hidden=14336, num_experts=8, top_k=2),
}
RECIPES = {
    "bf16": None,
    "fp8 e5m2": gtp.FP8(matmuls=True, exclude=()),
    "fp8 e4m3": gtp.FP8(matmuls=True, gradient="e4m3", exclude=()),
    "mxfp8": gtp.MXFP8(matmuls=True, exclude=()),
}
FEW = 3  # steps that are traced


def say(*words: object) -> None:
    print(*words, flush=True)


def layer_step(shape: dict[str, int], recipe: gtp.Recipe | None):
    """Returns a compiled step, its arguments and its floating-point operations."""
    module = gtp.MoE(**shape, loss_reduction="sum", rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)

    def loss(params, x, gradient):
        return jnp.vdot(nnx.merge(graph, params)(x).astype(jnp.float32), gradient.astype(jnp.float32))

    def step(params, x, gradient):
        with gtp.use_recipe(recipe):
            return jax.grad(loss, argnums=(0, 1))(params, x, gradient)

    size = (TOKENS // SEQUENCE, SEQUENCE, shape["features"])
    x, gradient = (jax.random.normal(jax.random.key(i), size, jnp.bfloat16) for i in range(2))
    compiled = jax.jit(step).lower(params, x, gradient).compile()
    flops = 18 * TOKENS * shape["top_k"] * shape["features"] * shape["hidden"]
    return compiled, (params, x, gradient), flops


def timed(run) -> float:
    began = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - began)


def table_of(run) -> list[tuple[float, int, str, str]]:
    """Returns milliseconds a step, launches a step, kind and name, of each kernel, the longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(FEW):
                jax.block_until_ready(run())
        ops = seen.read_trace(Path(folder))
    spent: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for op in ops:
        spent[op.kind, op.name].append(op.end_us - op.start_us)
    return sorted(((sum(t) / FEW / 1e3, len(t) // FEW, *key) for key, t in spent.items()), reverse=True)


def report(name: str, rows: list[tuple[float, int, str, str]]) -> None:
    by_kind: dict[str, float] = collections.defaultdict(float)
    for spent, _, kind, _ in rows:
        by_kind[kind] += spent
    say(f"-- {name}: {sum(by_kind.values()):.2f} ms of kernels;", {k: round(v, 2) for k, v in by_kind.items()})
    for spent, count, kind, kernel in rows[:32]:
        say(f"   {spent:7.3f} ms  {count:3d}x  {kind:12s} {kernel[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    say(jax.__version__, jax.devices(), "native:", gtp.native.describe())
    found = {}
    for shape in args.shapes:
        steps = {}
        for recipe in args.recipes:
            name = f"{shape} {recipe}"
            try:
                began = time.perf_counter()
                compiled, operands, flops = layer_step(SHAPES[shape], RECIPES[recipe])
                (args.out / f"{name.replace(' ', '_')}.hlo").write_text(compiled.as_text())
                run = functools.partial(compiled, *operands)
                timed(run), timed(run)
                memory = compiled.memory_analysis()
                temp = memory.temp_size_in_bytes / 1e9
                say(f"{name}: compiled and warm in {time.perf_counter() - began:.0f} s; {temp:.2f} GB temporary")
                steps[name] = run, flops, []
            except Exception:
                say(f"{name}: failed")
                traceback.print_exc()
        for _ in range(args.repeat):
            for run, _, times in steps.values():
                with contextlib.suppress(Exception):
                    times.append(timed(run))
        for name, (_, flops, times) in steps.items():
            if times:
                middle = statistics.median(times)
                found[name] = {"ms": middle, "tflops": flops / middle / 1e9, "all": times}
                say(f"{name:22s} {middle:8.3f} ms  {flops / middle / 1e9:6.0f} TFLOP/s  (min {min(times):.3f})")
        for name, (run, _, _) in steps.items():
            try:
                rows = table_of(run)
                report(name, rows)
                found.setdefault(name, {})["kernels"] = rows
            except Exception:
                traceback.print_exc()
        (args.out / "experts.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
