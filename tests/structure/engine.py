"""Prints how large the engine is: what one train step enters of gtp_jax, lines of code, and modules in import circles.

    python -m tests.structure.engine

Each step is of two small MLP blocks on eight virtual CPU devices. It is called once, and traced, compiled and run, in a
process of its own, so that what another left in caches has no say. Local functions and generator expressions count as
functions. All figures are of the gtp_jax that Python imports.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import grimp
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gtp_jax as gtp

from .sizes import files_by_room, lines_of

PACKAGE = Path(gtp.__file__).parent
ROOMS = ("hook", "weights", "chain", "layout", "variables", "nn")  # and rooms for what is moved out of them
WIDTH, BATCH, DEVICES = 256, 16, 8


class Block(nnx.Module):
    def __init__(self, linear: Callable[..., Any], rngs: nnx.Rngs):
        self.up = linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class Stock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(nnx.Linear, rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def own() -> nnx.Module:
    return gtp.init(lambda rngs: gtp.Stack(lambda rngs: Block(gtp.Dense, rngs), 2, rngs=rngs), nnx.Rngs(0))


def sharded() -> nnx.Module:
    return gtp.shard(Stock(nnx.Rngs(0)), blocks="blocks.*")


# what makes the model, and the recipe
STEPS: dict[str, tuple[Callable[[], nnx.Module], gtp.NVFP4 | None]] = {
    "own layers": (own, None),
    "gtp.shard": (sharded, None),
    "own layers, NVFP4": (own, gtp.NVFP4()),
}


def mean_square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]).astype(jnp.float32)))


def entered(call: Callable[[], object]) -> set[tuple[str, str]]:
    """Returns the file and the name of each function of gtp_jax that a call enters, in this thread."""
    found: set[tuple[str, str]] = set()
    inside = f"{PACKAGE}{os.sep}"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside):
            found.add((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def entered_by_step(name: str) -> tuple[int, int]:
    """Returns how many files and functions of gtp_jax a train step enters. The process must not have used JAX yet."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    make, recipe = STEPS[name]
    optimizer = optax.adamw(1e-3)
    with jax.set_mesh(gtp.make_mesh(gtp=DEVICES)):
        state = gtp.TrainState.create(make(), optimizer)
        step = gtp.train_step(mean_square, optimizer, recipe=recipe)
        batch = {"x": jnp.ones((BATCH, WIDTH))}
        found = entered(lambda: step(state, batch))
    return len({file for file, _ in found}), len(found)


def circles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Returns the groups of modules that import each other, directly or not."""
    needed = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = {frozenset({one, *(other for other in all_of if one in needed[other])}) for one, all_of in needed.items()}
    return [set(group) for group in groups if len(group) > 1]


def imports() -> grimp.ImportGraph:
    """Returns who imports whom in gtp_jax, with imports for type checkers; stubs (`.pyi`) are not read."""
    return grimp.build_graph("gtp_jax", cache_dir=None)


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, (files, functions) in zip(STEPS, pool.imap(entered_by_step, STEPS), strict=True):
            print(f"{f'files, functions entered by a step: {name}':72} {files:3}, {functions:3}", flush=True)
    rooms = files_by_room(PACKAGE)
    lines = lines_of(path for room in ROOMS for path in rooms.get(room, []))
    print(f"{f'lines of code in {", ".join(ROOMS)}':72} {lines:8,}")
    print(f"{'modules in import circles':72} {sum(map(len, circles(imports()))):8}")


if __name__ == "__main__":
    main()
