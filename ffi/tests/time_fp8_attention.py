"""Times cuDNN's causal attention in FP8 and in bfloat16, and prints how far they differ.

python ffi/tests/time_fp8_attention.py     # one Hopper GPU; half a minute
"""

import time

import jax
import jax.numpy as jnp

from gtp_jax.ops import attention, attention_fp8

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


def both(function):
    """Returns forward, and forward with backward, of causal attention by a function."""
    forward = jax.jit(lambda *x: function(*x, causal=True, implementation="native"))
    return forward, jax.jit(lambda g, *x: jax.vjp(forward, *x)[1](g))


def main():
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    ways = {"bf16": both(attention), "FP8": both(attention_fp8)}
    for tokens, heads, key_heads in SHAPES:
        keys = jax.random.split(jax.random.key(0), 4)
        *operands, of_output = (
            jax.random.normal(key, (1, tokens, count, HEAD_DIM), jnp.bfloat16)
            for key, count in zip(keys, (heads, key_heads, key_heads, heads), strict=True)
        )
        print(f"{tokens} tokens, {heads} query and {key_heads} key heads:")
        wanted = ways["bf16"][0](*operands).astype(jnp.float32)
        for name, (forward, training) in ways.items():
            found = forward(*operands).astype(jnp.float32)
            error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
            took = 1e3 * seconds(forward, *operands), 1e3 * seconds(training, of_output, *operands)
            print(f"  {name:>4}: forward {took[0]:.3f} ms, with backward {took[1]:.3f}; {error:.4f} from bf16")


if __name__ == "__main__":
    main()
