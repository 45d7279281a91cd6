"""Checks and times FP8 in blocks of 128 on one Hopper GPU: the quantizer's bits, the products' errors, milliseconds.

PYTHONPATH=. python ffi/tests/time_blocked.py
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.ops import SlottedWeight, linear, linear_fp8, linear_fp8_blocks

E4M3 = ml_dtypes.float8_e4m3fn
# tokens, features in, features out: the products of an 8 B model's layers, and one of a small model
SHAPES = [(8192, 4096, 6144), (8192, 4096, 28672), (8192, 14336, 4096), (8192, 1024, 3072)]


def say(*words: object) -> None:
    print(*words, flush=True)


def runs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of the rows of a float32 matrix and the inverses of the scales of its runs, by numpy."""
    parts = x.reshape(len(x), -1, 128)
    top = np.abs(parts).max(-1)  # NaN if there is one
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = np.where(np.isfinite(top) & (top > 0), np.float32(448) / top, np.float32(1))
    scale = np.minimum(scale, np.finfo(np.float32).max)
    scale = (scale.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    bad = ~np.isfinite(parts)
    with np.errstate(over="ignore", invalid="ignore"):
        codes = np.clip(np.where(bad, 0, parts) * scale[..., None], -448, 448).astype(E4M3).view(np.uint8)
    return np.where(bad, 0x7F, codes).astype(np.uint8).reshape(x.shape), (1 / scale.astype(np.float64)).astype(
        np.float32
    )


def check_bits() -> None:
    random = np.random.default_rng(0)
    every = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(512, 128)
    wide = (random.normal(size=(384, 640)) * np.exp(20 * random.normal(size=(384, 640)))).astype(np.float32)
    wide[3, 5], wide[9, 7], wide[130:258, :] = np.nan, np.inf, 0
    cases = {"every bfloat16": every, "wide float32": wide, "wide bfloat16": wide.astype(ml_dtypes.bfloat16)}
    with np.errstate(over="ignore"):
        cases["wide float16"] = wide.astype(np.float16)
    cases["tiny float32"] = (wide * np.float32(1e-37)).astype(np.float32)
    for name, x in cases.items():
        for rows, columns in ((True, True), (True, False), (False, True)):
            found = jax.jit(lambda x, r=rows, c=columns: native.quantize_runs(x, rows=r, columns=c))(jnp.asarray(x))
            wanted = []
            for needed, own in ((rows, x), (columns, x.T)):
                codes, inverse = runs(np.ascontiguousarray(own).astype(np.float32)) if needed else (None, None)
                wanted += [codes, None if inverse is None else inverse.T]
            same = [
                w is None or np.array_equal(np.asarray(f).view(np.uint8), np.ascontiguousarray(w).view(np.uint8))
                for f, w in zip(found, wanted, strict=True)
            ]
            say(f"bits of {name}, rows {rows}, columns {columns}:", "equal" if all(same) else f"DIFFER {same}")


def codes_of(random: np.random.Generator, rows: int, depth: int, *, positive: bool) -> np.ndarray:
    x = random.uniform(0.5, 1, (rows, depth)) if positive else random.normal(size=(rows, depth))
    return (x * 100).astype(E4M3).view(np.uint8)


def check_products() -> None:
    random = np.random.default_rng(1)
    for tiles in (True, False):
        for wide in (False, True):
            for positive in (False, True):
                for rows, columns, depth in ((256, 384, 16384), (128, 128, 128), (384, 256, 896)):
                    left, right = (codes_of(random, n, depth, positive=positive) for n in (rows, columns))
                    a = np.exp2(random.integers(-8, 3, (depth // 128, rows))).astype(np.float32)
                    grid = (columns // 128 if tiles else columns, depth // 128)
                    b = np.exp2(random.integers(-8, 3, grid)).astype(np.float32)
                    x = left.view(E4M3).astype(np.float64) * np.repeat(a.T, 128, 1)
                    w = right.view(E4M3).astype(np.float64) * np.repeat(np.repeat(b, 128, 1), 128 if tiles else 1, 0)
                    passed = np.pad(b, ((0, 0), (0, -b.shape[1] % 4))) if tiles else b.T
                    dtype = jnp.float32 if wide else jnp.bfloat16
                    try:
                        found = jax.jit(lambda *o, t=tiles, d=dtype: native.blocked_product(*o, tiles=t, dtype=d))(
                            left, a, right, passed
                        )
                        found = np.asarray(found).astype(np.float64)
                    except Exception as error:  # the first thing to know is which products exist
                        say(f"tiles {tiles} float32 {wide} {rows} x {columns} x {depth}: {str(error)[:200]}")
                        continue
                    wanted = x @ w.T
                    size = np.abs(x) @ np.abs(w).T
                    say(
                        f"tiles {tiles} float32 {wide} one sign {positive} {rows} x {columns} x {depth}: "
                        f"largest error / sum of magnitudes {np.max(np.abs(found - wanted) / size):.2e}"
                    )


def milliseconds(function: Callable[..., Any], *operands: Any, times: int = 20) -> float:
    run = jax.jit(function)
    jax.block_until_ready(run(*operands))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(times):
            found = run(*operands)
        jax.block_until_ready(found)
        best = min(best, (time.perf_counter() - begin) / times)
    return best * 1e3


def time_all() -> None:
    for tokens, width, out in SHAPES:
        x, w, g = (
            jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
            for i, s in enumerate(((tokens, width), (out, width), (tokens, out)))
        )

        def dot(a: jax.Array, b: jax.Array, i: int, j: int, dtype: Any = jnp.bfloat16) -> jax.Array:
            return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=dtype)

        both = jax.jit(lambda a: native.quantize_runs(a, rows=True, columns=True))
        xq, gq = both(x), both(g)
        wq, wt = both(w)[0], both(w)[2]

        def grid(rows: int, cols: int) -> jax.Array:
            return jnp.ones((rows // 128, -(-cols // 512) * 4), jnp.float32)

        bf16 = (
            milliseconds(lambda x, w: dot(x, w, 1, 1), x, w),
            milliseconds(lambda g, w: dot(g, w, 1, 0), g, w),
            milliseconds(lambda g, x: dot(g, x, 0, 0, jnp.float32), g, x),
        )
        rows = [f"{tokens} x {width} -> {out}: bf16 {bf16[0]:.3f} {bf16[1]:.3f} {bf16[2]:.3f}"]
        try:
            fp8 = (
                milliseconds(
                    lambda *o: native.blocked_product(*o, tiles=True, dtype=jnp.bfloat16),
                    xq[0],
                    xq[1],
                    wq,
                    grid(out, width),
                ),
                milliseconds(
                    lambda *o: native.blocked_product(*o, tiles=True, dtype=jnp.bfloat16),
                    gq[0],
                    gq[1],
                    wt,
                    grid(width, out),
                ),
                milliseconds(
                    lambda *o: native.blocked_product(*o, tiles=False, dtype=jnp.float32), gq[2], gq[3], xq[2], xq[3]
                ),
            )
        except Exception as error:
            say(rows[0], str(error)[:200])
            continue
        casts = (
            milliseconds(lambda a: native.quantize_runs(a, rows=True, columns=False), x),
            milliseconds(lambda a: native.quantize_runs(a, rows=True, columns=True), x),
            milliseconds(lambda a: native.quantize_runs(a, rows=True, columns=True), g),
            milliseconds(lambda a: a.T, wq),
        )
        total = sum(fp8) + casts[1] + casts[2] + casts[3]
        rows.append(f"fp8 {fp8[0]:.3f} {fp8[1]:.3f} {fp8[2]:.3f}")
        rows.append(f"TFLOP/s {', '.join(f'{2e-9 * tokens * width * out / t:.0f}' for t in fp8)}")
        rows.append(f"casts of x by rows {casts[0]:.3f}, of x {casts[1]:.3f}, of g {casts[2]:.3f}, w^T {casts[3]:.3f}")
        rows.append(f"bf16 / fp8 with casts {sum(bf16) / total:.2f}")
        say("; ".join(rows))


def time_layers() -> None:
    """Times forward and backward of a dense layer, given the weight as it was gathered."""
    for tokens, width, out in SHAPES:
        x, w, g = (
            jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
            for i, s in enumerate(((tokens, width), (out, width), (tokens, out)))
        )
        slot = jnp.zeros((out, width), jnp.float32)

        def products(multiply: Any, x: jax.Array, weight: Any, slot: jax.Array, g: jax.Array) -> Any:
            y, back = jax.vjp(lambda x, slot: multiply(x, SlottedWeight(weight, slot)), x, slot)
            return y, back(g)

        codes = gtp.ops.quantize(w, gtp.formats.FP8_BLOCKS)
        scaled = gtp.ops.quantize(w, gtp.formats.FP8_E4M3)
        times = [
            milliseconds(functools.partial(products, multiply), x, weight, slot, g)
            for multiply, weight in (
                (linear, w),
                (linear_fp8_blocks, codes),
                (lambda x, w: linear_fp8(x, w, gtp.formats.FP8_E5M2), scaled),
            )
        ]
        say(
            f"layer {tokens} x {width} -> {out}: bf16 {times[0]:.3f} ms, in blocks {times[1]:.3f}, FP8 {times[2]:.3f}; "
            f"bf16 / in blocks {times[0] / times[1]:.2f}"
        )


def main() -> None:
    device = jax.devices()[0]
    say(device.device_kind, jax.__version__)
    for path in {line.split()[-1] for line in open("/proc/self/maps") if "cublasLt" in line}:
        say("loaded", path)
    if not native.is_built():
        raise SystemExit(f"the extension is not built: {native.REBUILD}")
    check_bits()
    check_products()
    time_all()
    time_layers()


if __name__ == "__main__":
    main()
