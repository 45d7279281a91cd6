"""Computes a bound for any schedule: the time of a step's matmuls and attention, at rates measured on one GPU.

`python bound.py --gtp 8 --sequences 8`. Communication, norms, activations, loss and optimizer count as free.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from workload import Workload, parser, report, workload

PRECISION = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
PER_PARAMETER = 6  # FLOPs per parameter and token: forward 2, backward 4


def ceiling(side: int, dtype: Any) -> Callable[[], float]:
    """Returns a function that measures the FLOP/s of a matmul of two matrices `(side, side)`."""
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16).astype(dtype) for i in range(2))
    product = jax.jit(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16))
    return lambda: 2 * side**3 / _seconds(product, a, b)


def attention(work: Workload) -> Callable[[], float]:
    """Returns a function that times one layer's attention, forward and backward, on a device's part of a microbatch."""
    rows = work.sequences // work.microbatches // (work.gtp * work.ep)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (rows, work.seq, heads // work.tp, work.head_dim), jnp.bfloat16)
        for i, heads in enumerate((work.num_heads, work.num_kv_heads, work.num_kv_heads))
    )
    how = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pull = jax.vjp(
            lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how), q, k, v
        )
        return pull(out)

    compiled = jax.jit(both)
    return lambda: _seconds(compiled, q, k, v)


def _seconds(function: Callable[..., Any], *args: Any, calls: int = 10) -> float:
    jax.block_until_ready(function(*args))
    out, begin = None, time.perf_counter()
    for _ in range(calls):
        out = function(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / calls


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument(
        "--precision", choices=PRECISION, default="bf16", help="format of the matmuls; attention is in bf16"
    )
    flags.add_argument("--side", type=int, help="size of the square matmul (default: 8192 on a GPU, 512 on a CPU)")
    args = flags.parse_args()
    work = workload(args, all_over_tp=True)
    side = args.side or (8192 if jax.default_backend() == "gpu" else 512)
    rate, one_layer = ceiling(side, PRECISION[args.precision]), attention(work)
    operations = PER_PARAMETER * work.matmul_parameters * work.tokens / work.devices
    rounds = [(rate(), one_layer()) for _ in range(work.steps)]
    times = [operations / flops + work.num_layers * work.microbatches * seconds for flops, seconds in rounds]
    report(
        times,
        matmul_flops=max(flops for flops, _ in rounds),
        attention_s=min(work.num_layers * work.microbatches * seconds for _, seconds in rounds),
        versions={"jax": jax.__version__},
    )


if __name__ == "__main__":
    main()
