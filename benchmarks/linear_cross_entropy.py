"""Times the loss and the gradients of a head on one GPU, with and without the logits of all tokens.

    python benchmarks/linear_cross_entropy.py
    python benchmarks/linear_cross_entropy.py --tokens 512 --features 64 --vocab 1000 --chunk 128      # on CPU

Each row is computed in a process of its own, so that its peak of memory is its own. The head is a `gtp_jax.Dense` with
weights in float32, which are multiplied in bfloat16. `planned` is what XLA plans in addition to arguments and results:
the input, the weight and their gradients. `peak` counts everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--chunk", type=int, nargs="+", default=[4096, 8192], help="fewest tokens of a chunk")
    parser.add_argument("--case", type=int, help="compute one row, with this chunk; 0 for the logits of all tokens")
    args = parser.parse_args()
    if args.case is not None:
        measure(args.tokens[0], args.features, args.vocab, args.case)
        return
    print(f"{args.features} features, a vocabulary of {args.vocab}", flush=True)
    print(
        f"{'tokens':>8} {'logits of':>10} {'ms':>9} {'TFLOP/s':>8} {'planned GB':>11} {'peak GB':>8}  loss", flush=True
    )
    for tokens in args.tokens:
        for chunk in (0, *args.chunk):
            own = ["--tokens", str(tokens), "--features", str(args.features), "--vocab", str(args.vocab)]
            command = [sys.executable, __file__, *own, "--case", str(chunk)]
            if subprocess.run(command, stderr=subprocess.PIPE, check=False).returncode:
                print(f"{tokens:>8} {chunk or 'all':>10}  does not fit, or failed: {' '.join(command)}", flush=True)


def measure(tokens: int, features: int, vocab: int, chunk: int) -> None:
    """Prints one row."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import gtp_jax as gtp

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks._timing import seconds_a_call

    graph, params = nnx.split(gtp.Dense(features, vocab, parallel="column", rngs=nnx.Rngs(0)))
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (1, tokens, features), jnp.bfloat16)
    targets = jax.random.randint(keys[1], (1, tokens), 0, vocab)

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        head = nnx.merge(graph, params)
        if not chunk:
            total, count = gtp.cross_entropy(head(x), targets)
        else:
            total, count = gtp.nn.linear_cross_entropy(x, head, targets, chunk=chunk)
        return total / count

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x, targets).compile()
    planned = program.memory_analysis().temp_size_in_bytes  # pyright: ignore[reportOptionalMemberAccess]
    value = float(program(params, x, targets)[0])
    seconds = seconds_a_call(program, params, x, targets)
    rate = 6 * tokens * features * vocab / seconds / 1e12
    stats = jax.local_devices()[0].memory_stats() or {}  # `None` on CPU
    peak = f"{stats['peak_bytes_in_use'] / 1e9:8.2f}" if "peak_bytes_in_use" in stats else f"{'-':>8}"
    row = f"{tokens:>8} {chunk or 'all':>10} {1e3 * seconds:9.2f} {rate:8.1f} {planned / 1e9:11.2f} {peak}  {value:.5f}"
    print(row, flush=True)


if __name__ == "__main__":
    main()
