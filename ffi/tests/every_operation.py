"""Runs every kernel on odd and even shapes, under NVIDIA's compute-sanitizer, with a separate allocation per buffer:

XLA_PYTHON_CLIENT_ALLOCATOR=platform PYTHONPATH=. compute-sanitizer --tool racecheck python \\
    ffi/tests/every_operation.py
"""

import jax
import jax.numpy as jnp

import gtp_jax as gtp
from gtp_jax.formats import FORMATS, PackPlan, Piece

SHAPES = [(1, 1), (33, 47), (64, 64), (256, 640), (322, 584), (3, 100, 72)]
PLAN = PackPlan(
    (
        Piece(rows=64, cols=100, transposed=True, total_rows=64, out=0, out_row=0),
        Piece(rows=32, cols=100, transposed=False, total_rows=32, out=0, out_row=64),
    ),
    by_shard=True,
)


def main() -> None:
    key = jax.random.key(0)
    for shape in SHAPES:
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16):
            x = jax.random.normal(key, shape, dtype)
            for form in FORMATS.values():
                for q in gtp.quantize(x, form, axis="both", implementation="native"):
                    gtp.dequantize(q, dtype, implementation="native").block_until_ready()
            _, column = gtp.quantize(
                x,
                FORMATS["NVFP4_1D"],
                axis="both",
                hadamard=True,
                key=jnp.array([1, 2], jnp.uint32),
                implementation="native",
            )
            column.codes.block_until_ready()
            gtp.multi_amax([x, x], implementation="native").block_until_ready()
            gtp.hadamard_amax(x, implementation="native").block_until_ready()
    weights = [jax.random.normal(key, piece.stored) for piece in PLAN.pieces]
    for form in FORMATS.values():
        amax = gtp.multi_amax(weights) if form.has_amax else None
        buffer = gtp.pack(weights, form, amax, PLAN, implementation="native")
        gtp.unpack(jnp.stack([buffer, buffer]), form, amax, PLAN, implementation="native")[0].block_until_ready()
    print("all kernels have run")


if __name__ == "__main__":
    main()
