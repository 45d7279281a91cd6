"""Times cuDNN's causal attention in FP8 and in bfloat16, forward, and prints how far they differ.

    python ffi/tests/time_fp8_attention.py     # one Hopper GPU; half a minute

Operands and output are E4M3 with one scale per tensor; the scale of the probabilities is 448, because none is above 1.
cuDNN's FP8 attention has no public function in JAX, so this calls the private one that `jax.nn.dot_product_attention`
is made of. `gtp_jax` does not use it.
"""

import time

import jax
import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import (  # noqa: TID251
    MaskType,
    dot_product_attention,
    fp8_params_keys,
)

FINITE_MAX = 448.0
# tokens, query heads, key heads: the reference, its heads without groups, and the preset 1b
SHAPES = ((8192, 32, 8), (8192, 32, 32), (4096, 16, 8))
HEAD_DIM, ROUNDS, CALLS = 128, 5, 10


def seconds(function, *operands):
    """Returns the median time of a call, in seconds, after one that is not timed."""
    jax.block_until_ready(function(*operands))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            result = function(*operands)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / CALLS)
    return sorted(times)[ROUNDS // 2]


def quantized(q, k, v):
    """Returns the codes of q, k and v, cuDNN's scales, and the factor by which its output is scaled."""
    largest = [jnp.max(jnp.abs(x)).astype(jnp.float32) for x in (q, k, v)]
    codes = [
        (x.astype(jnp.float32) * (FINITE_MAX / a)).astype(jnp.float8_e4m3fn)
        for x, a in zip((q, k, v), largest, strict=True)
    ]
    scale_o = FINITE_MAX / largest[2]
    scales = {name: jnp.ones((), jnp.float32) for name in fp8_params_keys}
    scales |= {f"descale_{name}": a / FINITE_MAX for name, a in zip("qkv", largest, strict=True)}
    scales |= {"scale_s": jnp.float32(FINITE_MAX), "descale_s": jnp.float32(1 / FINITE_MAX), "scale_o": scale_o}
    return codes, {name: jnp.reshape(scale, (1, 1, 1, 1)) for name, scale in scales.items()}, scale_o


def main():
    options = dict(scale=HEAD_DIM**-0.5, mask_type=MaskType.CAUSAL)
    in_bf16 = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, **options))
    of_codes = jax.jit(
        lambda codes, scales: dot_product_attention(*codes, fp8_params=scales, use_fp8=True, **options)[0]
    )
    of_values = jax.jit(lambda q, k, v: of_codes(*quantized(q, k, v)[:2]))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for tokens, heads, key_heads in SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        operands = [
            jax.random.normal(key, (1, tokens, count, HEAD_DIM), jnp.bfloat16)
            for key, count in zip(keys, (heads, key_heads, key_heads), strict=True)
        ]
        codes, scales, scale_o = jax.jit(quantized)(*operands)
        found = of_codes(codes, scales).astype(jnp.float32) / scale_o
        wanted = in_bf16(*operands).astype(jnp.float32)
        error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
        took = [seconds(in_bf16, *operands), seconds(of_codes, codes, scales), seconds(of_values, *operands)]
        print(
            f"{tokens} tokens, {heads} query and {key_heads} key heads: bf16 {1e3 * took[0]:.3f} ms, "
            f"FP8 {1e3 * took[1]:.3f}, with amaxes and casts {1e3 * took[2]:.3f}; relative difference {error:.4f}"
        )


if __name__ == "__main__":
    main()
