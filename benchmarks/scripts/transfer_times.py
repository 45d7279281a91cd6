"""Times what a step over replicas of unequal degree transfers, on two GPUs.

    python benchmarks/scripts/transfer_times.py
    python benchmarks/scripts/transfer_times.py --preset tiny --seq 64 --layers 2 --step-layers 2     # on CPU

Unequal degrees need three devices. Of tp 2 and tp 1 two devices have either the replica of tp 2 and its core of one
device, between which weights are unfolded and gradients folded; or the core of both replicas, over which weights are
gathered and gradients summed. So each transfer of a step has its full size here. Then a step of two equal replicas
through these programs is timed beside that of one mesh, of fewer layers, which take as long to compute as to transfer
in the same proportion.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from gtp_jax.train import all_reduce_with_nccl

all_reduce_with_nccl()  # ahead of the backend
jax.config.update("jax_num_cpu_devices", 2)  # of no account on GPUs

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from steps import random_batch, seconds_of_steps  # noqa: E402

import gtp_jax as gtp  # noqa: E402
from gtp_jax.models import Llama, next_token_loss, preset_of  # noqa: E402
from gtp_jax.nn import abstract_model  # noqa: E402
from gtp_jax.nonuniform import FaultPlan, ReplicaDtypes, _step, plan_faults, replica_dtypes_of  # noqa: E402

WIDE, NARROW, CODES = "as stored, float32", "as on one mesh", "gradients as MXFP8 codes"


class Unequal(FaultPlan):
    """Equal replicas that count as unequal, so that a step goes through their programs."""

    @property
    def uniform(self) -> bool:
        return False


def as_stored(core: Any, params: Any, recipe: Any, reduce_over_dp: Any, *, frozen: Any = None) -> ReplicaDtypes:
    """Everything travels in the dtype in which it is stored."""
    wide = tuple(np.dtype(x.dtype) for x in jax.tree.leaves(params))
    return replica_dtypes_of(core, params, recipe, reduce_over_dp, frozen=frozen)._replace(
        weights=wide, gradients=wide, rounded=frozenset()
    )


def gradients_as_weights(
    core: Any, params: Any, recipe: Any, reduce_over_dp: Any, *, frozen: Any = None
) -> ReplicaDtypes:
    """Gradients of weights that are multiplied in bfloat16 travel in it, as where replicas divide what is stored: the
    plan of one replica, whose transfers have the size of two replicas' here, has nobody to divide it with."""
    found = replica_dtypes_of(core, params, recipe, reduce_over_dp, frozen=frozen)
    return found._replace(gradients=found.weights)


def codes_as_gradients(
    core: Any, params: Any, recipe: Any, reduce_over_dp: Any, *, frozen: Any = None
) -> ReplicaDtypes:
    """Gradients are bytes, like the codes of MXFP8: the plan of one replica has nobody to exchange codes with. Scales,
    one byte per 32 elements, are left out."""
    found = gradients_as_weights(core, params, recipe, reduce_over_dp, frozen=frozen)
    return found._replace(gradients=(np.dtype(np.uint8),) * len(found.gradients), coded={})


def milliseconds(function: Callable[[], Any], calls: int = 5) -> float:
    """Returns the median time of a call, of which two have been made before."""
    for _ in range(2):
        jax.block_until_ready(function())
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds)


def random_like(tree: Any) -> Any:
    """Returns arrays of small random numbers, as zeros would draw less power."""

    def one(like: Any) -> jax.Array:
        if not jnp.issubdtype(like.dtype, jnp.floating):
            return jax.device_put(jnp.ones(like.shape, like.dtype), like.sharding)
        make = jax.jit(lambda: jax.random.normal(jax.random.key(0), like.shape, like.dtype) * 0.02)
        return jax.jit(make, out_shardings=like.sharding)()

    return jax.tree.map(one, tree)


def prepare(config: Any, plan: FaultPlan, wires: str, optimizer: Any) -> tuple[gtp.nonuniform.Replicas, Any, Any]:
    """Returns the replicas, a state and a step."""
    alone = len(plan.replicas) == 1 and config.grad_reduce == "bf16"
    narrow = gradients_as_weights if alone else replica_dtypes_of
    codes = codes_as_gradients if len(plan.replicas) == 1 else replica_dtypes_of
    _step.replica_dtypes_of = {NARROW: narrow, WIDE: as_stored, CODES: codes}[wires]
    recipe = gtp.recipes.BF16(grad_wire="mxfp8") if wires == CODES else None
    factory = lambda rngs: Llama(config, rngs=rngs)  # noqa: E731
    replicas = gtp.nonuniform.Replicas(factory, plan, jax.devices()[:2])
    with jax.set_mesh(replicas.core):
        state = random_like(gtp.TrainState.create(abstract_model(factory), optimizer))
    return replicas, state, gtp.train_step(next_token_loss, optimizer, view="local", replicas=replicas, recipe=recipe)


def time_transfers(config: Any, wires: str) -> None:
    """Prints the milliseconds of each transfer of a step at tp 2 and tp 1."""
    plan = plan_faults(dp=1, tp=2, batch=2, core_tp=1)
    replicas, state, step = prepare(config, plan, wires, optax.sgd(1e-3))
    with jax.set_mesh(replicas.core):
        stored = step._stored(state)
        weights = step.weights(state)[0]
        kinds = step._wires_of(state).gradients
        with jax.set_mesh(replicas.meshes[0]):
            arrays = [x.astype(kind) for x, kind in zip(jax.tree.leaves(weights), kinds, strict=True)]
        gradients = [{shard.device: shard.data for shard in x.addressable_shards} for x in arrays]
        del weights, arrays
        [transfers] = step.transfers(state)
        for name, parts in (("unfold", stored), ("fold", gradients)):
            transfer = transfers[name]
            took = milliseconds(lambda e=transfer, parts=parts: [list(one.values()) for one in e(parts)])
            here = [number for number, _ in transfer._here]
            buffers = [transfer._pack[number](transfer._own(parts, number)) for number in here]
            joined = [transfer._global(one, [b[i] for b in buffers]) for i, one in enumerate(transfer.moves.rounds)]
            with jax.set_mesh(transfer._mesh):
                wire = milliseconds(lambda transfer=transfer, joined=joined: transfer._permute(joined))
            size = transfer.moves.bytes_in_turn
            rate = f"{size / wire / 1e6:.0f} GB/s"
            print(f"  {name:9}{size / 1e9:8.2f} GB{took:9.2f} ms, of which permutes {wire:.2f} ms, {rate}", flush=True)
            del buffers, joined
    del stored, gradients, state
    plan = Unequal(**vars(plan_faults(dp=2, tp=1, batch=2)))
    replicas, state, step = prepare(config, plan, wires, optax.sgd(1e-3))
    with jax.set_mesh(replicas.core):
        send = step._gather_of(state)
        took = milliseconds(lambda: send(state))
        print(f"  gather             {took:9.2f} ms", flush=True)
        sums = [jax.ShapeDtypeStruct((1,), np.float32)] * 2
        shapes, of_sums = step._shapes_on_core(state, sums)
        print(
            f"  exchanged as codes {len(step._wires_of(state).coded)} of {len(jax.tree.leaves(state.params))} gradients"
        )
        found, totals, flag = random_like(shapes), random_like(of_sums), step._flag(None)
        update = jax.jit(step._updated)
        took = milliseconds(lambda: update(state, found, totals, flag, state.frozen))
        print(f"  sum, and SGD       {took:9.2f} ms", flush=True)


def time_step(config: Any, seq: int, wires: str | None) -> None:
    """Prints the milliseconds of a step of two equal replicas; on one mesh if no `wires` are named."""
    plan, optimizer = plan_faults(dp=2, tp=1, batch=2), optax.adamw(1e-4)
    plan = plan if wires is None else Unequal(**vars(plan))
    replicas, state, step = prepare(config, plan, wires or NARROW, optimizer)
    batch = random_batch(config.vocab_size, 2, seq, None if wires is None else replicas)
    with jax.set_mesh(replicas.core):
        seconds = seconds_of_steps(step, state, batch, 5)
    where = "one mesh" if wires is None else f"replicas, {wires}"
    print(f"  {where:30}{1000 * statistics.median(seconds):9.1f} ms per step", flush=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--preset", default="reference")
    flags.add_argument("--seq", type=int, default=8192, help="tokens of a sequence (default: 8192)")
    flags.add_argument("--layers", type=int, default=16, help="of the transfers (default: 16)")
    flags.add_argument("--step-layers", type=int, default=4, help="of the steps (default: 4)")
    flags.add_argument(
        "--grad-reduce", nargs="+", default=["bf16", "float32"], choices=["bf16", "float32"], help="(default: both)"
    )
    flags.add_argument("--limit", type=float, default=1e9, help="begin nothing more after these seconds")
    options = flags.parse_args()
    began = time.perf_counter()
    print(f"{jax.devices()}, jax {jax.__version__}, preset {options.preset}", flush=True)

    def config(layers: int, grad_reduce: Any) -> Any:
        sizes = {"num_layers": layers, "dtype": "bfloat16", "grad_reduce": grad_reduce}
        return dataclasses.replace(preset_of(options.preset), **sizes)

    def late() -> bool:
        return time.perf_counter() - began > options.limit

    def timed(grad_reduce: str) -> bool:
        return grad_reduce in options.grad_reduce and not late()

    for wires, grad_reduce in ((NARROW, "bf16"), (CODES, "bf16"), (NARROW, "float32"), (WIDE, "float32")):
        if timed(grad_reduce):
            print(f"{options.layers} layers, {wires}, grad_reduce {grad_reduce!r}", flush=True)
            time_transfers(config(options.layers, grad_reduce), wires)
    for wires, grad_reduce in (
        (None, "bf16"),
        (NARROW, "bf16"),
        (CODES, "bf16"),
        (WIDE, "bf16"),
        (None, "float32"),
        (NARROW, "float32"),
    ):
        if timed(grad_reduce):
            print(f"{options.step_layers} layers, seq {options.seq}, grad_reduce {grad_reduce!r}", flush=True)
            time_step(config(options.step_layers, grad_reduce), options.seq, wires)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
