"""Compiles steps that gather experts or exchange tokens, for experts.py and expert_checks.py."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import time
from typing import Any

START = time.monotonic()
GATHERED = "gathered"


@dataclasses.dataclass
class Row:
    """One contender and its results."""

    name: str
    ep: int
    transport: str
    recipe: str
    chunks: int = 1
    seconds: list[float] = dataclasses.field(default_factory=list)
    clocks_mhz: list[float] = dataclasses.field(default_factory=list)
    watts: list[float] = dataclasses.field(default_factory=list)
    compile_s: float = 0.0
    planned_bytes: int = 0
    loss: float | None = None
    failure: str = ""


def start_jax(args: argparse.Namespace) -> Any:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    import jax

    if args.cpu or args.target:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.ranks)
    return jax


def config_of(args: argparse.Namespace, transport: str, chunks: int = 1) -> Any:
    from gtp_jax.models import preset_of

    names = ("num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_experts", "top_k")
    sizes = {name: getattr(args, name) for name in names if getattr(args, name)}
    return dataclasses.replace(
        preset_of(args.preset),
        **sizes,
        remat=args.remat,
        grad_reduce=args.grad_reduce,
        unroll=args.unroll,
        transport=None if transport == GATHERED else transport,
        exchange_chunks=chunks,
    )


class Program:
    """A contender: its mesh, how its state is made, and its step."""

    def __init__(self, args: argparse.Namespace, row: Row) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from jax.sharding import NamedSharding, PartitionSpec

        import gtp_jax as gtp
        from gtp_jax import hlo
        from gtp_jax.models import Llama, next_token_loss
        from gtp_jax.nn import abstract_model
        from gtp_jax.recipes import RECIPES

        self.config = config = config_of(args, row.transport, row.chunks)
        degrees = {"gtp": args.ranks} if row.ep == 1 else {"gtp": args.ranks // row.ep, "ep": row.ep}
        devices = jax.devices()[: args.ranks]
        if args.target:
            devices = list(hlo.topology_devices(hlo.parse_target(f"{args.target}:{args.ranks}")))
        self.mesh = gtp.make_mesh(**degrees, devices=devices)
        self.optimizer = optax.adamw(1e-4, weight_decay=1e-4)
        self.make = lambda rngs: Llama(config, rngs=rngs)
        self.degrees = tuple(degrees.items())
        with jax.set_mesh(self.mesh):
            self.like = gtp.TrainState.create(abstract_model(self.make), self.optimizer)
            step = gtp.train_step(
                next_token_loss,
                self.optimizer,
                microbatches=args.microbatches,
                recipe=RECIPES[row.recipe](),
                view="local",
            )
            shape = (args.tokens * args.ranks // args.seq, args.seq)
            axes = tuple(name for name in self.mesh.axis_names if name != "tp")
            self.placed = NamedSharding(self.mesh, PartitionSpec(axes))
            like: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.placed)
            self.shape = shape
            self.lowered = step.lower(self.like, {"tokens": like, "targets": like})  # pyright: ignore

    def compile(self, target: str | None) -> None:
        """Compiles the step. May be called in any thread."""
        from gtp_jax import hlo

        begin = time.perf_counter()
        options: Any = dict(hlo.COMPILE_OPTIONS) if target else None
        self.step = self.lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - begin
        memory: Any = self.step.memory_analysis()
        self.planned = memory.temp_size_in_bytes + memory.argument_size_in_bytes

    def new_state(self) -> Any:
        """Returns an initial state."""
        import jax
        from flax import nnx

        import gtp_jax as gtp

        with jax.set_mesh(self.mesh):
            return gtp.TrainState.create(gtp.init(self.make, nnx.Rngs(0)), self.optimizer)

    def batch(self) -> Any:
        """Returns a batch of random tokens."""
        import jax
        import jax.numpy as jnp

        tokens = jax.random.randint(jax.random.key(1), self.shape, 0, self.config.vocab_size)
        batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
        return jax.device_put(batch, self.placed)

    def fitted(self, state: Any) -> Any:
        """Returns the state of another contender with the same mesh in the form that this program takes."""
        return dataclasses.replace(state, model_def=self.like.model_def)


def compiled(rows: list[Row], args: argparse.Namespace) -> dict[str, Program]:
    """Returns the programs by name. Traces one contender after another, while threads compile those already traced. If
    a contender fails, sets `failure` of its row."""
    programs: dict[str, Program] = {}
    with concurrent.futures.ThreadPoolExecutor(args.compilers) as pool:
        started: dict[str, Any] = {}
        for row in rows:
            if row.failure:
                continue
            try:
                programs[row.name] = Program(args, row)
                started[row.name] = pool.submit(programs[row.name].compile, args.target)
            except Exception as error:
                row.failure = said(error)
        print(f"{time.monotonic() - START:.0f} s: traced {len(programs)}", flush=True)
        for row in rows:
            if row.failure:
                continue
            try:
                started[row.name].result()
                row.compile_s, row.planned_bytes = programs[row.name].compile_s, programs[row.name].planned
            except Exception as error:
                row.failure = said(error)
            print(f"{time.monotonic() - START:.0f} s: {row.name}: {row.failure or 'compiled'}", flush=True)
    return programs


def said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
