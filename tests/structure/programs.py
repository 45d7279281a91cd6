"""Small programs that show whether a change of structure changed what is computed.

    python -m tests.structure.programs --write DIR      # before the change
    python -m tests.structure.programs --against DIR    # after it: says where a program differs, and exits with 1

Each program is traced for eight virtual CPU devices and written as StableHLO without names (`normal_form`). Nothing is
compiled and nothing is allocated. The programs are made by public names of gtp_jax alone, so that they are the same
before and after a move. Texts of another version of jax, or of a build with other kernels, say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import hashlib
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

from .normal_form import normal_form

WIDTH, BATCH, LENGTH = 64, 16, 32
SIZES = dict(
    vocab_size=128,
    hidden_size=WIDTH,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
)
OPTIMIZER = optax.adamw(1e-3)
SHOWN = 40  # lines of a difference
VERSION = f"jax {jax.__version__}\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A train step.

    Attributes:
        mesh: degrees.
        model: makes the model.
        loss: of it.
        tokens: whether a batch is of tokens; otherwise of vectors.
        options: of `train_step`.
    """

    mesh: dict[str, int]
    model: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[..., Any] = next_token_loss
    tokens: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def lower(self) -> list[str]:
        """Returns the StableHLO of the step, for abstract arrays."""
        devices = jax.devices()[: int(np.prod(list(self.mesh.values())))]
        mesh = gtp.make_mesh(**self.mesh, devices=devices)
        with jax.set_mesh(mesh):
            state = gtp.TrainState.create(abstract_model(self.model), OPTIMIZER)
            axes = tuple(axis for axis in ("dp", "gtp", "ep") if axis in mesh.shape)
            place = NamedSharding(mesh, P(axes))
            if self.tokens:
                part = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=place)
                batch = {"tokens": part, "targets": part}
            else:
                batch = {"x": jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32, sharding=place)}
            step: Any = gtp.train_step(self.loss, OPTIMIZER, **self.options)
            return [step.lower(state, batch).as_text()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicasProgram:
    """The programs of a train step over replicas of unequal degree.

    Attributes:
        plan: of `plan_faults`.
        config: of a Llama.
        options: of `train_step`.
    """

    plan: dict[str, Any]
    config: LlamaConfig
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def lower(self) -> list[str]:
        """Returns the StableHLO of each program of the step."""
        plan = gtp.nonuniform.plan_faults(**self.plan)
        replicas = gtp.nonuniform.Replicas(self._model, plan)
        rows = np.zeros((plan.batch, LENGTH), np.int32)
        with jax.set_mesh(replicas.core), lowered_alone() as found:
            state = gtp.TrainState.create(abstract_model(self._model), OPTIMIZER)
            step: Any = gtp.train_step(next_token_loss, OPTIMIZER, view="local", replicas=replicas, **self.options)
            step.compile(state, {"tokens": rows, "targets": rows})
        return found

    def _model(self, rngs: nnx.Rngs) -> nnx.Module:
        return Llama(self.config, rngs=rngs)


@contextlib.contextmanager
def lowered_alone():
    """Collects the text of every program that is lowered to be compiled, in the order in which they are; none is
    compiled."""
    texts: list[str] = []

    def compile(lowered: jax.stages.Lowered, *_: Any, **__: Any) -> Any:
        texts.append(lowered.as_text())
        return mock.sentinel.compiled

    with mock.patch.object(jax.stages.Lowered, "compile", compile):
        yield texts


def llama(**changes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
    config = LlamaConfig(**{**SIZES, **changes})
    return lambda rngs: Llama(config, rngs=rngs)


class InList(nnx.Module):
    """Layers without a `Stack`: one fused, with biases, and one whose weight is used twice."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = gtp.Dense(WIDTH, {"a": WIDTH, "b": WIDTH}, use_bias=True, parallel="column", rngs=rngs)
        self.layers = nnx.List([gtp.Dense(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = self.first(x)
        x = parts["a"] * jnp.tanh(parts["b"])
        for layer in (*self.layers, self.layers[0]):
            x = jnp.tanh(layer(x))
        return x


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = gtp.Dense(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.dense(x))


class InStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = gtp.Stack(Block, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.blocks(x)


class AdaptedBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp = gtp.MLP(WIDTH, 2 * WIDTH, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.mlp(x) + self.lora(x)


class Adapted(nnx.Module):
    """A base to be frozen, in a `Stack` and outside, with adapters."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = gtp.Embed(128, WIDTH, rngs=rngs)
        self.blocks = gtp.Stack(AdaptedBlock, 2, rngs=rngs)
        self.head = gtp.nn.LayerNormDense(WIDTH, 128, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.blocks(self.embed(tokens)))


def frozen(rngs: nnx.Rngs) -> nnx.Module:
    return gtp.nn.freeze(Adapted(rngs), gtp.NVFP4(), trained=(nnx.LoRAParam,))


class StockBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.heads = nnx.LinearGeneral(WIDTH, (4, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((4, 16), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(jnp.tanh(self.heads(x)))
        return x + self.down(jnp.tanh(self.up(x)))


class Stock(nnx.Module):
    """Blocks of Flax's own layers, and a table that is the head too."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        self.blocks = nnx.List([StockBlock(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def stock(rngs: nnx.Rngs) -> nnx.Module:
    return gtp.shard(Stock(rngs), "blocks.*", min_size=WIDTH)


MIXED = gtp.MXFP8(override={"heads": gtp.recipes.FP8Blocks(), "up": gtp.FP8(matmuls=True)}, exclude=("down",))


def of_tokens(model: Any, batch: Any) -> Any:
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


def mean_square(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]).astype(jnp.float32) ** 2)


def penalized(model: Any, batch: Any) -> jax.Array:
    """A mean square, and the square of its gradient with respect to the input and to the parameters."""
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def mean(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(nnx.merge(graph, params, others), {"x": x})

    found = jax.grad(mean, (0, 1))(params, batch["x"])
    return mean(params, batch["x"]) + sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(found))


DP, TP, ALL = dict(dp=2, gtp=4), dict(gtp=4, tp=2), dict(dp=2, gtp=2, tp=2)

PROGRAMS: dict[str, Program | ReplicasProgram] = {
    "global_view": Program(mesh=DP, model=llama(), options=dict(max_grad_norm=1.0)),
    "local_view": Program(mesh=ALL, model=llama(), options=dict(view="local")),
    "tp_keep_gathered": Program(mesh=TP, model=llama(keep_gathered="all", tie_embeddings=True)),
    "fp8_matmuls": Program(
        mesh=DP, model=llama(), options=dict(view="local", recipe=gtp.FP8(matmuls=True), microbatches=2)
    ),
    "nvfp4": Program(mesh=ALL, model=llama(), options=dict(recipe=gtp.NVFP4(high_precision_last=1))),
    "nvfp4_matmuls": Program(mesh=DP, model=llama(), options=dict(view="local", recipe=gtp.NVFP4(matmuls=True))),
    "mxfp8": Program(mesh=DP, model=llama(), options=dict(recipe=gtp.MXFP8(matmuls=True, grad_wire="mxfp8"))),
    "microbatches_each": Program(
        mesh=DP, model=llama(grad_reduce="bf16"), options=dict(view="local", microbatches=2, recipe=gtp.FP8())
    ),
    "microbatches_last": Program(
        mesh=DP,
        model=llama(grad_reduce="bf16-wire"),
        options=dict(view="local", microbatches=2, reduce_over_dp="last", recipe=gtp.FP8()),
    ),
    "frozen": Program(mesh=ALL, model=frozen, loss=of_tokens, options=dict(microbatches=2)),
    "experts": Program(
        mesh=dict(ep=2, gtp=2, tp=2),
        model=llama(num_experts=4, aux_loss_coeff=0.01, shared_hidden=64),
        options=dict(view="local", recipe=gtp.FP8()),
    ),
    "pregathered": Program(
        mesh=DP, model=llama(), options=dict(recipe=gtp.NVFP4(), microbatches=2, pregathered_layers=1)
    ),
    "looped": Program(
        mesh=DP, model=llama(num_layers=4, unroll=1, remat="nothing"), options=dict(recipe=gtp.MXFP8(), view="local")
    ),
    "replicas": ReplicasProgram(
        plan=dict(dp=2, tp=2, gtp=2, failed=(3,), batch=12), config=LlamaConfig(**SIZES), options=dict(microbatches=1)
    ),
    "list": Program(mesh=ALL, model=InList, loss=mean_square, tokens=False, options=dict(recipe=gtp.FP8())),
    "stock": Program(mesh=DP, model=stock, loss=of_tokens, options=dict(recipe=gtp.NVFP4(exclude=()), microbatches=2)),
    "stock_matmuls": Program(mesh=TP, model=stock, loss=of_tokens, options=dict(recipe=gtp.NVFP4(matmuls=True))),
    "stock_mixed": Program(mesh=DP, model=stock, loss=of_tokens, options=dict(view="local", recipe=MIXED)),
    "penalty": Program(mesh=DP, model=InStack, loss=penalized, tokens=False, options=dict(recipe=gtp.NVFP4())),
}


def text_of(name: str) -> str:
    """Returns the normal form of a program."""
    jax.clear_caches()  # so that what was traced before has no say
    return "".join(map(normal_form, PROGRAMS[name].lower()))


def texts(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields each name with the normal form of its program, and prints the digest of that."""
    for name in names:
        start = time.perf_counter()
        text = text_of(name)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        seconds = time.perf_counter() - start
        print(f"{name:18} {digest} {text.count(chr(10)):6} lines {seconds:5.1f} s", flush=True)
        yield name, text


def write(names: Iterable[str], directory: Path) -> int:
    """Writes programs to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "version.txt").write_text(VERSION)
    for name, text in texts(names):
        (directory / f"{name}.mlir").write_text(text)
    return 0


def compare(names: Sequence[str], directory: Path) -> int:
    """Compares programs with those in a directory, prints the first lines of each difference, and returns 1 if there is
    any; 2 if nothing can be said."""
    if (written := (directory / "version.txt").read_text()) != VERSION:
        print(f"The programs in {directory} are of {written.strip()}, and this is {VERSION.strip()}.")
        return 2
    different = []
    for name, text in texts(names):
        before = (directory / f"{name}.mlir").read_text()
        if before != text:
            different.append(name)
            lines = difflib.unified_diff(before.splitlines(), text.splitlines(), "before", "after", n=2, lineterm="")
            print(*(line[:200] for line in itertools.islice(lines, SHOWN)), sep="\n")
    print(f"{len(different)} of {len(names)} programs differ{': ' if different else '.'}{', '.join(different)}")
    return int(bool(different))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure.programs", description=__doc__.split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", metavar="DIR", type=Path, help="write the programs there")
    action.add_argument("--against", metavar="DIR", type=Path, help="compare with the programs that were written there")
    parser.add_argument("names", nargs="*", help=f"of programs, by default all: {', '.join(PROGRAMS)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PROGRAMS):
        parser.error(f"no program is called {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    names = args.names or list(PROGRAMS)
    return compare(names, args.against) if args.against else write(names, args.write)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main())
