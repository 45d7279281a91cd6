"""Times the reference training step: 3.6 B parameters, one sequence of 8192 tokens a GPU, bf16.

python examples/03_reference_step.py                  # on GPUs; all of them on the gtp axis
python examples/03_reference_step.py --kept all --seq 2048
python examples/03_reference_step.py --layers 2 --seq 64 --width 64     # tries it out anywhere
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import gtp_jax as gtp
from gtp_jax.models import PRESETS, Llama, next_token_loss
from gtp_jax.plan import step_flops
from gtp_jax.recipes import RECIPES

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--seq", type=int, default=8192, help="tokens a sequence; one sequence a GPU")
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--kept", default="1", help="layers that keep gathered weights for backward, or 'all'")
parser.add_argument(
    "--remat", default="matmuls", help="what a layer keeps: nothing, matmuls, activations or everything"
)
parser.add_argument("--unroll", default="full", help="layers in one loop body, or 'full'")
parser.add_argument("--recipe", default="bf16", choices=RECIPES, help="in which format weights travel")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

scale = args.width / 4096
config = dataclasses.replace(
    PRESETS["reference"],
    layers=args.layers,
    dim=args.width,
    head_dim=int(128 * scale),
    ffn=int(14336 * scale),
    remat=args.remat,
    kept="all" if args.kept == "all" else int(args.kept),
    unroll="full" if args.unroll == "full" else int(args.unroll),
)
devices = jax.device_count()
with jax.set_mesh(gtp.make_mesh(gtp=devices // args.tp, tp=args.tp)) as mesh:
    mesh = jax.sharding.get_mesh()
    optimizer = optax.adamw(1e-4)
    state = gtp.TrainState.create(gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0)), optimizer)
    tokens = jax.random.randint(jax.random.key(1), (devices // args.tp, args.seq), 0, config.vocab)
    batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(("dp", "gtp"))))
    begin = time.perf_counter()
    step = gtp.train_step(next_token_loss, optimizer, recipe=RECIPES[args.recipe]()).lower(state, batch).compile()
    compile_s = time.perf_counter() - begin
    times = []
    for _ in range(args.steps + 3):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        times.append(time.perf_counter() - begin)
    seconds = float(np.median(times[3:]))
    flops = step_flops(
        matmul_params=config.matmul_params(),
        layers=config.layers,
        tokens=tokens.size,
        seq=args.seq,
        heads=config.heads,
        head_dim=config.head_dim,
    )
    memory = step.memory_analysis()
    low, high = min(times[3:]) * 1e3, max(times[3:]) * 1e3
    print(
        f"{devices} devices, {tokens.size // devices} tokens each: {seconds * 1e3:.1f} ms ({low:.1f} to {high:.1f}), "
        f"{flops / devices / seconds / 1e12:.1f} TFLOP/s and {tokens.size / devices / seconds:.0f} tokens/s a device, "
        f"compiled in {compile_s:.1f} s, {memory.temp_size_in_bytes / 2**30:.1f} GiB temporary + "
        f"{memory.argument_size_in_bytes / 2**30:.1f} GiB state, loss {float(metrics['loss']):.3f}"
    )
