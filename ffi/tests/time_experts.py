"""Times a layer of experts on one GPU, forward and backward, and prints the time spent in each kernel.

    PYTHONPATH=. python ffi/tests/time_experts.py --out DIR

Contenders are interleaved in one process. DIR gets each contender's optimized HLO, and a table of its kernels.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gtp_jax as gtp
from gtp_jax import inspect as seen
from gtp_jax import native
from gtp_jax.ops import grouped_fp8, power_of_two_amax
from gtp_jax.ops._grouped._hopper import HOPPER, _along_out
from gtp_jax.ops._grouped._pallas import PALLAS
from gtp_jax.ops._grouped._tiles import cut_into_tiles
from gtp_jax.ops._quantize import amax_fused, quantize_fused

TOKENS, SEQUENCE = 16384, 4096
SHAPES = {
    "qwen3": dict(features=2048, hidden=768, num_experts=128, top_k=8),
    "mixtral": dict(features=4096, hidden=14336, num_experts=8, top_k=2),
}
RECIPES = {
    "bf16": None,
    "fp8": gtp.FP8(matmuls=True, exclude=()),
    "mxfp8": gtp.MXFP8(matmuls=True, exclude=()),
    "fp8-blocks": gtp.recipes.FP8Blocks(exclude=()),
}
FEW = 3  # the number of traced steps


def say(*words: object) -> None:
    print(*words, flush=True)


def fused_codes(x: jax.Array, _: jax.Array | None = None, form: gtp.formats.Format = gtp.formats.FP8_E4M3) -> jax.Array:
    amax = power_of_two_amax(amax_fused(x), form)
    return quantize_fused(x, form, amax).codes


def check_bits() -> bool:
    """Compares codes with those of `quantize`, and transposed tiles with numpy's, bit for bit."""
    agree = True
    for form in (gtp.formats.FP8_E5M2, gtp.formats.FP8_E4M3):
        for spread in (0.0, 4.0, 30.0):
            noise, wide = (jax.random.normal(jax.random.key(i), (1000, 272)) for i in range(2))
            x = (noise * jnp.exp(spread * wide)).astype(jnp.bfloat16).at[3, 5].set(jnp.nan).at[9, 7].set(jnp.inf)
            wanted = gtp.ops.quantize(x, form, amax=power_of_two_amax(gtp.ops.multi_amax([x])[0], form)).codes
            same = bool(jnp.array_equal(jax.jit(functools.partial(fused_codes, form=form))(x), wanted))
            say(f"   fused quantization, {form.name}, spread {spread}: {'equal' if same else 'DIFFERS'}")
            agree &= same
    rows = jax.random.randint(jax.random.key(0), (1000, 272), 0, 256).astype(jnp.uint8)
    starts = jnp.array([0, 128, 200, 5, 900, 990], jnp.int32)
    stops = jnp.array([128, 130, 200, 100, 1000, 1000], jnp.int32)
    found = jax.jit(lambda *a: native.transpose(*a, matrices=2))(rows, starts, stops)
    parts = [np.pad(np.asarray(rows)[i:j], ((0, 128 - (j - i)), (0, 0))).T for i, j in zip(starts, stops, strict=True)]
    wanted = np.stack([np.concatenate(parts[:3], axis=1), np.concatenate(parts[3:], axis=1)])
    same = bool(np.array_equal(np.asarray(found), wanted))
    say(f"   transposed tiles: {'equal' if same else 'DIFFER'}")
    return agree and same


def check() -> None:
    """Compares products of codes with float32 products of their values, for groups of awkward sizes."""
    errors = []
    cases = (([130, 0, 1, 300, 77], 384, 256, 1), ([17, 512, 128, 3], 768, 2048, 3), ([900], 272, 144, 1))
    for sizes, out, features, shards in cases:
        rows = sum(sizes) + 5
        x, g = (jax.random.normal(jax.random.key(i), (rows, n), jnp.bfloat16) for i, n in ((0, features), (1, out)))
        weight = jax.random.normal(jax.random.key(2), (1, len(sizes), out, features), jnp.bfloat16)
        weight = weight * jnp.arange(1, len(sizes) + 1, dtype=jnp.bfloat16)[:, None, None] ** 2
        weight = jnp.swapaxes(jnp.reshape(weight, (len(sizes), shards, -1, features)), 0, 1)
        for form in (gtp.formats.FP8_E5M2, gtp.formats.FP8_E4M3):

            def run(x, weight, g, implementation, form=form, sizes=sizes):
                given = jnp.array(sizes, jnp.int32)
                y, back = jax.vjp(lambda x, w: grouped_fp8(x, w, given, form, implementation=implementation), x, weight)
                return y, *back(g)

            found = jax.jit(lambda *a: run(*a, "native"))(x, weight, g)
            wide = [a.astype(jnp.float32) for a in (x, weight, g)]
            wanted = jax.jit(lambda *a: run(*a, "reference"))(*wide)
            for name, got, exact in zip(("forward", "dgrad", "wgrad"), found, wanted, strict=True):
                error = jnp.linalg.norm(jnp.ravel(got.astype(jnp.float32) - exact)) / jnp.linalg.norm(jnp.ravel(exact))
                worst = jnp.max(jnp.abs(got.astype(jnp.float32) - exact)) / jnp.max(jnp.abs(exact))
                verdict = "agree" if float(error) < 2e-2 else "DIFFER"
                say(f"   {sizes} {form.name} {name}: {verdict}, error {float(error):.2e}, at most {float(worst):.2e}")
                errors.append(float(error))
    if not (check_bits() and max(errors) < 2e-2):
        sys.exit(1)


def print_errors() -> None:
    """Prints the relative errors of a small layer's gradients against float32, in the Euclidean norm, and whether two
    runs give the same bits."""
    jax.config.update("jax_default_matmul_precision", "highest")
    sizes = dict(features=1024, hidden=512, num_experts=32, top_k=4, aux_loss_coeff=0.0)
    x, gradient = (jax.random.normal(jax.random.key(i), (4, 2048, 1024)) for i in range(2))
    x = x.astype(jnp.bfloat16).astype(jnp.float32)

    def found(dtype, recipe):
        graph, params = nnx.split(gtp.nn.MoE(**sizes, dtype=dtype, rngs=nnx.Rngs(0)))

        def loss(params, x):
            y = nnx.merge(graph, params)(x.astype(dtype)).astype(jnp.float32)
            return jnp.vdot(y, gradient.astype(dtype).astype(jnp.float32))

        with gtp.use_recipe(recipe):
            to_params, to_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
        named = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(to_params)}
        return {name: np.asarray(a, np.float64) for name, a in {**named, "x": to_x}.items()}

    wanted = found(jnp.float32, None)
    recipes = {form: gtp.FP8(matmuls=True, gradient=form, exclude=()) for form in ("e5m2", "e4m3")}
    for name, recipe in {"bf16": None, **recipes}.items():
        first, second = (found(jnp.bfloat16, recipe) for _ in range(2))
        errors = {k: np.linalg.norm(first[k] - a) / np.linalg.norm(a) for k, a in wanted.items()}
        same = all(np.array_equal(first[k], second[k]) for k in first)
        say(f"{name:6s}", *(f"{k} {error:.4f}" for k, error in errors.items()), "equal bits" if same else "OTHER BITS")


def time_products(shape: dict[str, int], only: Sequence[str]) -> None:
    """Times kernels alone, on FP8 codes and on bfloat16: those that are named, or all."""
    rows, groups = TOKENS * shape["top_k"], shape["num_experts"]
    chosen = jax.random.randint(jax.random.key(0), (rows,), 0, groups)
    sizes = jnp.bincount(chosen, length=groups).astype(jnp.int32)
    features, hidden = shape["features"], shape["hidden"]
    for name, depth, out in (("up", features, 2 * hidden), ("down", hidden, features)):
        time_layer(name, depth, out, rows, groups, sizes, only)


def time_layer(
    name: str, depth: int, out: int, rows: int, groups: int, sizes: jax.Array, only: Sequence[str] = ()
) -> None:
    x = jax.random.normal(jax.random.key(1), (rows, depth), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(2), (groups, out, depth), jnp.bfloat16)
    y = jax.random.normal(jax.random.key(3), (rows, out), jnp.bfloat16)
    apart = (rows // 128 + groups + 1) * 128
    x8, w8, y8, xt, yt = (
        jax.lax.bitcast_convert_type(a.astype(jnp.float8_e4m3fn), jnp.uint8)
        for a in (x, w, y, jnp.resize(x, (depth, apart)), jnp.resize(y, (out, apart)))
    )
    scales = jnp.ones(groups)
    tiles = cut_into_tiles(sizes, rows, 128)
    blocks = -(-sizes // 128) * 128
    stops = jnp.cumsum(blocks, dtype=jnp.int32)
    kinds = dict(left_e5m2=False, right_e5m2=False)
    of_rows, of_tiles = jnp.ones((depth // 128, rows)), jnp.ones((groups, -(-out // 128), depth // 128))
    of_columns = [jnp.ones((apart // 128, size)) for size in (out, depth)]

    def of_blocks(a, b, of_a, of_b, dtype):
        return native.grouped_blocked_outer(a, of_a, b, of_b, stops - blocks, stops, shards=1, dtype=dtype)

    runs = {
        "product fp8 in blocks": jax.jit(
            lambda a, b, of_a, of_b: native.grouped_blocked_product(a, of_a, b[None], of_b, *tiles, dtype=jnp.bfloat16)
        ),
        "outer fp8 in blocks": jax.jit(functools.partial(of_blocks, dtype=jnp.bfloat16)),
        "outer fp8 in blocks, f32": jax.jit(functools.partial(of_blocks, dtype=jnp.float32)),
        "quantize in blocks": jax.jit(lambda a, b: native.quantize_runs(a, rows=True, columns=True)),
        "product fp8": jax.jit(
            lambda a, b: native.grouped_product(a, b[None], scales, *tiles, **kinds, dtype=jnp.bfloat16)
        ),
        "product fp8, 4 shards": jax.jit(
            lambda a, b: native.grouped_product(a, b, scales, *tiles, **kinds, dtype=jnp.bfloat16)
        ),
        "product pallas": jax.jit(lambda a, b: PALLAS.product(a, b[None], sizes, dtype=a.dtype, transposed=True)),
        "product cuda": jax.jit(lambda a, b: HOPPER.product(a, b[None], sizes, dtype=a.dtype, transposed=True)),
        "product cuda, 4 shards": jax.jit(lambda a, b: HOPPER.product(a, b, sizes, dtype=a.dtype, transposed=True)),
        "backward pallas": jax.jit(lambda a, b: PALLAS.product(a, b[None], sizes, dtype=a.dtype, transposed=False)),
        "backward cuda": jax.jit(lambda a, b: HOPPER.product(a, b[None], sizes, dtype=a.dtype, transposed=False)),
        "outer cuda": jax.jit(lambda a, b: HOPPER.outer(a, b, sizes, shards=1, dtype=jnp.dtype(jnp.bfloat16))),
        "outer cuda f32": jax.jit(lambda a, b: HOPPER.outer(a, b, sizes, shards=1, dtype=jnp.dtype(jnp.float32))),
        "outer pallas bf16": jax.jit(lambda a, b: PALLAS.outer(a, b, sizes, shards=1, dtype=jnp.dtype(jnp.bfloat16))),
        "take": jax.jit(lambda a, b: native.take(a, b)),
        "take by XLA": jax.jit(lambda a, b: a[b]),
        "outer fp8": jax.jit(
            lambda a, b: native.grouped_outer(a, b, scales, stops - blocks, stops, shards=1, **kinds, dtype=jnp.float32)
        ),
        "outer pallas": jax.jit(lambda a, b: PALLAS.outer(a, b, sizes, shards=1, dtype=jnp.dtype(jnp.float32))),
        "transpose of kernels": jax.jit(lambda a, b: _along_out(b[None])),
        "the same by XLA": jax.jit(lambda a, b: jnp.swapaxes(b, 1, 2)),
        "transpose of rows": jax.jit(lambda a, b: native.transpose(a, tiles.start, tiles.stop, matrices=1)),
        "quantize, amax fused": jax.jit(fused_codes),
        "quantize, amax kernels": jax.jit(lambda a, b: gtp.ops.quantize(a, gtp.formats.FP8_E4M3).codes),
    }
    tokens, index = x[: rows // 8], jax.random.randint(jax.random.key(5), (rows,), 0, rows // 8)
    given = {"take": (tokens, index), "take by XLA": (tokens, index), "product cuda": (x, w), "backward cuda": (y, w)}
    given |= {"backward pallas": (y, w), "product cuda, 4 shards": (x, jnp.reshape(w, (4, groups, out // 4, depth)))}
    given |= {name: (y, x) for name in ("outer cuda", "outer cuda f32", "outer pallas bf16")}
    given |= {"product pallas": (x, w), "outer fp8": (yt, xt), "outer pallas": (y, x)}
    given |= {name: (yt, xt, *of_columns) for name in ("outer fp8 in blocks", "outer fp8 in blocks, f32")}
    given |= {"product fp8 in blocks": (x8, w8, of_rows, of_tiles), "quantize in blocks": (x, w)}
    given |= {"quantize, amax fused": (x, w), "quantize, amax kernels": (x, w)}
    given |= {"product fp8, 4 shards": (x8, jnp.reshape(w8, (4, groups, out // 4, depth)))}
    for what, run in runs.items():
        if only and what not in only:
            continue
        try:
            one = functools.partial(run, *given.get(what, (x8, w8)))
            timed(one)
            spent = sum(row[0] for row in table_of(one))
            say(f"   {name} {what:24s} {spent:7.3f} ms  {2 * rows * depth * out / spent / 1e9:6.0f} TFLOP/s")
        except Exception:
            traceback.print_exc()


def layer_step(shape: dict[str, int], recipe: gtp.recipes.Recipe | None, parts: int):
    """Returns a compiled step, its arguments and its FLOPs.

    Args:
        shape: the shape of the layer.
        recipe: the recipe of its matmuls.
        parts: the number of parts into which the batch is split; they go through the layer one after another. One
            part's exchange could then overlap with another part's matmuls. The extra time of several parts on one GPU
            is what the overlap would have to save.
    """
    module = gtp.nn.MoE(**shape, loss_reduction="sum", rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)

    def loss(params, x, gradient):
        outputs = [nnx.merge(graph, params)(part) for part in jnp.split(x, parts)]
        return jnp.vdot(jnp.concatenate(outputs).astype(jnp.float32), gradient.astype(jnp.float32))

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
    """Returns the milliseconds per step, launches per step, kind and name of each kernel, slowest first."""
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
    parser.add_argument("--parts", type=int, nargs="*", default=[1], help="parts that the batch is split into")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--layers-alone", action="store_true", help="do not time the kernels by themselves")
    parser.add_argument(
        "--kernels", nargs="*", default=[], help="names of the kernels to time by themselves; all by default"
    )
    parser.add_argument("--check", action="store_true", help="only compare the kernels with their oracles")
    parser.add_argument("--errors", action="store_true", help="only compare a layer's gradients with float32")
    args = parser.parse_args()
    if args.check or args.errors:
        return check() if args.check else print_errors()
    args.out.mkdir(parents=True, exist_ok=True)
    say(jax.__version__, jax.devices(), "native:", gtp.native.describe())
    found = {}
    for shape in args.shapes:
        steps = {}
        for recipe, parts in itertools.product(args.recipes, args.parts):
            name = f"{shape} {recipe}" + (f" in {parts}" if parts > 1 else "")
            try:
                began = time.perf_counter()
                compiled, operands, flops = layer_step(SHAPES[shape], RECIPES[recipe], parts)
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
        if not args.layers_alone:
            time_products(SHAPES[shape], args.kernels)
        (args.out / "experts.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
