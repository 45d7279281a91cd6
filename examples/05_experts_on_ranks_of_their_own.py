"""Trains a small mixture of experts on text, with experts divided over ep 4, and shows how evenly they are loaded.

    python examples/05_experts_on_ranks_of_their_own.py --png load.png   # some minutes
    python examples/05_experts_on_ranks_of_their_own.py --size 100m --steps 120 --png load.png   # 2 cores: 13 minutes

Needs 4 GPUs, or uses 4 virtual CPU devices where there is no GPU; pictures need matplotlib.

Trains the same model on the same text four times: on one device, which has all experts, and on four devices, each of
which has a quarter of them, both with the load-balancing loss; then on four with biases instead of that loss, and with
neither. Prints the largest difference between the losses of one device and of four, and draws losses and loads. The
load is that of the busiest expert in any layer, as a multiple of an even share.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.runner.data import BYTES, Rows, load_corpus, standard_library

BATCH, SEQ = 16, 64
SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    num_experts=16,
    top_k=2,
    aux_loss_coeff=0.01,
    dtype="float32",
    unroll=1,
)
SIZES = {
    "1m": (SMALL, 3e-3),
    "100m": (
        dataclasses.replace(SMALL, hidden_size=256, num_layers=4, head_dim=64, intermediate_size=1024, num_experts=32),
        1e-3,
    ),
}
# a rate of 0 reports the load without changing biases
REPORTED = gtp.nn.Routing(bias_rate=0.0)
BALANCE_LOSS = dict(routing=REPORTED)
BIASES = dict(aux_loss_coeff=0.0, routing=gtp.nn.Routing(score="sigmoid", bias_rate=0.01))
NEITHER = dict(aux_loss_coeff=0.0, routing=REPORTED)
RUNS = {
    "balance loss, ep 1": (BALANCE_LOSS, 1),
    "balance loss, ep 4": (BALANCE_LOSS, 4),
    "biases, ep 4": (BIASES, 4),
    "neither, ep 4": (NEITHER, 4),
}


def train(config: LlamaConfig, rate: float, ep: int, windows: Rows, steps: int) -> list[tuple[float, float]]:
    """Returns the loss and the load of each step."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps))
    with jax.set_mesh(gtp.make_mesh(gtp=1, ep=ep, devices=jax.devices()[:ep])):
        state = gtp.TrainState.create(gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0)), optimizer)
        step = gtp.train_step(next_token_loss, optimizer, max_grad_norm=1.0)
        found = []
        for number in range(steps):
            batch = windows.rows(np.arange(number * BATCH, (number + 1) * BATCH))
            state, metrics = step(state, batch)
            found.append((float(metrics["loss"]), float(metrics["expert_load"])))
    return found


def draw(found: dict[str, list[tuple[float, float]]], title: str, path: Path) -> None:
    """Draws losses and loads."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = dict(zip(RUNS, (("#2a6f97", "-"), ("#dd8452", "--"), ("#55a868", "-"), ("#8c8c8c", "-")), strict=True))
    for name, values in found.items():
        losses, loads = np.array(values).T
        colour, line = styles[name]
        window = max(1, len(loads) // 40)
        smooth = np.convolve(loads, np.ones(window) / window, mode="valid")
        left.plot(np.arange(1, len(losses) + 1), losses, line, color=colour, label=name, linewidth=1.3)
        right.plot(np.arange(window, len(loads) + 1), smooth, line, color=colour, label=name, linewidth=1.3)
    left.set_ylabel("loss, nats per byte")
    right.set_ylabel("load of the busiest expert, in even shares")
    right.axhline(1, color="#333333", linewidth=0.8, linestyle=":", label="even load")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9)
    figure.suptitle(f"{title}, on the source of Python's standard library")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains, compares and draws."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument(
        "--size", choices=SIZES, default="1m", help="number of parameters, most of them in experts (default: 1m)"
    )
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--png", type=Path)
    flags.add_argument("--json", type=Path)
    args = flags.parse_args()
    jax.config.update("jax_num_cpu_devices", 4)  # where there is no GPU
    windows = load_corpus(standard_library(), BYTES).rows(SEQ, 0)
    base, rate = SIZES[args.size]
    print(f"{base.param_count():,} parameters, {base.matmul_params():,} of which multiply each token", flush=True)
    found = {}
    for name, (changes, ep) in RUNS.items():
        found[name] = train(dataclasses.replace(base, **changes), rate, ep, windows, args.steps)
        losses, loads = np.array(found[name]).T
        last = max(1, args.steps // 10)
        print(f"{name:20} loss {losses[-last:].mean():.4f}, load {loads[-last:].mean():.2f}", flush=True)
    one, four = (np.array(found[name])[:, 0] for name in list(RUNS)[:2])
    apart = np.abs(one - four)
    # sums in another order only differ by rounding, until a token with nearly equal experts chooses another one
    first = apart[: args.steps // 2].max()
    print(f"largest difference between the losses of ep 1 and ep 4: {first:.1e} in the first half, {apart.max():.1e}")
    if args.json:
        args.json.write_text(json.dumps(found))
    if args.png:
        title = f"{base.param_count() / 1e6:.0f} M parameters, {base.top_k} of {base.num_experts} experts per token"
        draw(found, title, args.png)


if __name__ == "__main__":
    main()
