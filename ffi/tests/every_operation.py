"""Runs every kernel on odd and even shapes, under NVIDIA's compute-sanitizer, with a separate allocation per buffer:

XLA_PYTHON_CLIENT_ALLOCATOR=platform PYTHONPATH=. compute-sanitizer --tool racecheck python \\
    ffi/tests/every_operation.py
"""

import jax
import jax.numpy as jnp

import gtp_jax as gtp
from gtp_jax.formats import FORMATS, FP8_BLOCKS, FP8_E4M3, FP8_E5M2, PackPlan, Piece, QuantizedArray
from gtp_jax.mesh import supports_grouped_matmul
from gtp_jax.ops import SlottedWeight, grouped_fp8, grouped_matmul, grouped_quantized, swiglu_fp8

SHAPES = [(1, 1), (33, 47), (64, 64), (256, 640), (322, 584), (3, 100, 72)]
PLAN = PackPlan(
    (
        Piece(rows=64, cols=100, transposed=True, total_rows=64, out=0, out_row=0),
        Piece(rows=32, cols=100, transposed=False, total_rows=32, out=0, out_row=64),
    ),
    by_shard=True,
)

# sizes of groups, features out, features in, shards
EXPERTS = [([0, 1, 127, 128, 129], 384, 256, 3), ([5, 0, 300], 272, 144, 1)]


def run_experts() -> None:
    """Runs the grouped matmuls, forward and backward."""
    key = jax.random.key(0)
    for sizes, out, features, shards in EXPERTS:
        experts, given = len(sizes), jnp.array(sizes, jnp.int32)
        x = jax.random.normal(key, (sum(sizes) + 5, features), jnp.bfloat16)
        kernels = jax.random.normal(key, (shards, experts, out // shards, features), jnp.bfloat16)
        whole = jnp.reshape(jnp.swapaxes(kernels, 0, 1), (experts, out, features))
        q = gtp.ops.quantize(whole, FP8_BLOCKS)
        codes = jnp.swapaxes(jnp.reshape(q.codes, (experts, shards, -1, features)), 0, 1)
        tiles = QuantizedArray(codes, q.scales, None, FP8_BLOCKS, codes.shape[2:])
        products = [
            lambda x, w, given=given: grouped_matmul(x, w, given),
            lambda x, w, given=given: grouped_fp8(x, w, given, FP8_E5M2),
            lambda x, w, given=given: grouped_fp8(x, w, given, FP8_E4M3),
            lambda x, w, given=given, tiles=tiles: grouped_quantized(
                x, SlottedWeight(tiles, w), given, jnp.zeros(2, jnp.uint32), gtp.recipes.FP8Blocks().operands
            ),
        ]
        for product in products:
            y, back = jax.vjp(product, x, kernels)
            jax.block_until_ready(back(y))


def run_swiglu() -> None:
    """Runs the MLP in FP8, forward and backward, on whole tiles and on parts of tiles."""
    key = jax.random.key(0)
    for rows, width, parts in [(1, 1, 1), (33, 47, 3), (128, 128, 2), (130, 264, 1)]:
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16):
            x = jax.random.normal(key, (rows, 72), dtype)
            up = jax.random.normal(key, (parts * 2 * width, 72), dtype)
            down = jax.random.normal(key, (40, parts * width), dtype)
            y, back = jax.vjp(lambda *given, p=parts: swiglu_fp8(*given, FP8_E5M2, parts=p), x, up, down)
            jax.block_until_ready(back(y))


def main() -> None:
    key = jax.random.key(0)
    for shape in SHAPES:
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float16):
            x = jax.random.normal(key, shape, dtype)
            for form in FORMATS.values():
                for q in gtp.ops.quantize(x, form, axis="both", implementation="native"):
                    gtp.ops.dequantize(q, dtype, implementation="native").block_until_ready()
            _, column = gtp.ops.quantize(
                x,
                FORMATS["NVFP4_1D"],
                axis="both",
                hadamard=True,
                key=jnp.array([1, 2], jnp.uint32),
                implementation="native",
            )
            column.codes.block_until_ready()
            gtp.ops.multi_amax([x, x], implementation="native").block_until_ready()
            gtp.ops.hadamard_amax(x, implementation="native").block_until_ready()
    weights = [jax.random.normal(key, piece.stored) for piece in PLAN.pieces]
    for form in FORMATS.values():
        amax = gtp.ops.multi_amax(weights) if form.has_amax else None
        buffer = gtp.ops.pack(weights, form, amax, PLAN, implementation="native")
        gtp.ops.unpack(jnp.stack([buffer, buffer]), form, amax, PLAN, implementation="native")[0].block_until_ready()
    run_swiglu()
    if supports_grouped_matmul():
        run_experts()
    print("all kernels have run")


if __name__ == "__main__":
    main()
