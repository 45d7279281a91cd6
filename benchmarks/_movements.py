"""Compares the collectives of one layer, in each wire format, with what the links can carry.

The bound is the time to send the bytes that leave a device at the rate of a large message, whose gather and scatter are
timed alone in the same run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gtp_jax import hlo
from gtp_jax.mesh import AXES, GTP, TP, degree, platform
from gtp_jax.models import ModelConfig, family_of
from gtp_jax.nn import groups_of, init, shards_of, split_model
from gtp_jax.recipes import GRAD_WIRES, Recipe
from gtp_jax.train import compile_options
from gtp_jax.weights import GradReduce, Kernels, ModulePath, Shards, Tiles, WeightGroup, quantize_together, scatter

from ._timing import seconds_a_call

Tree = Any


@dataclasses.dataclass(frozen=True)
class Movement:
    """A collective over gtp: the gather of one layer's weights, or the sum of their gradients.

    Attributes:
        name: the name of the collective and its format.
        wire_bytes: the bytes that leave a device.
        seconds: the seconds of the gather alone; for a gradient, those of the whole sum, including conversions.
        bound_s: the seconds to send the same bytes at the rate of a large message.
        whole_s: the seconds of the gather together with conversions: casting shards before it or, for codes that are
            already packed, decoding them after it; `None` for a gradient.
        error: the error of a summed gradient relative to the sum in float32, in the L2 norm; `None` for a gather.
    """

    name: str
    wire_bytes: int
    seconds: float
    bound_s: float
    whole_s: float | None = None
    error: float | None = None

    @property
    def of_bound(self) -> float:
        """The fraction of a large message's rate that is reached."""
        return self.bound_s / self.seconds


@dataclasses.dataclass(frozen=True)
class Links:
    """The rates that a large message reaches.

    Attributes:
        mebibytes: the size of the whole message in MiB.
        gather_rate: the bytes per second that leave a device in an all-gather.
        scatter_rate: the bytes per second that leave a device in a bfloat16 reduce-scatter.
    """

    mebibytes: float
    gather_rate: float
    scatter_rate: float


def measure_links(mebibytes: float) -> Links:
    """Times a large all-gather and a large reduce-scatter over the gtp axis of the mesh in scope.

    Args:
        mebibytes: the approximate size of the whole message in MiB.

    Raises:
        ValueError: if gtp is 1, because nothing would be sent.
    """
    ranks = _ranks()
    elements = round(mebibytes * 2**20 / 2 / ranks / 256) * 256
    leaving = 2 * elements * (ranks - 1)
    part = _placed(jnp.ones((ranks * elements,), jnp.bfloat16), P(GTP))
    gather = _jitted(lambda x: _gathered(_bits(x)), P(GTP), P())
    scatter = _jitted(lambda x: lax.psum_scatter(x, GTP, tiled=True), P(), P(GTP))
    whole = _placed(jnp.ones((ranks * elements,), jnp.bfloat16), P())
    return Links(
        2 * ranks * elements / 2**20,
        leaving / _seconds(gather, part),
        leaving / _seconds(scatter, whole),
    )


def measure_movements(config: ModelConfig, recipes: Mapping[str, Recipe], links: Links) -> Iterator[Movement]:
    """Times the gather of one block in each recipe's wire format, and each way of reducing its gradient, with its
    error.

    Args:
        config: the configuration of the model whose block is measured.
        recipes: the recipes by name.
        links: the result of `measure_links`.

    Raises:
        ValueError: if gtp is 1.
    """
    ranks = _ranks()
    block = _Block(config)
    for name, recipe in recipes.items():
        form = recipe.of(("blocks",)).wire
        if form is None:
            sent = block.run(
                lambda shards: {p: _bits(_cast(g, shards[p])) for p, g in block.groups.items()}, cut_out=True
            )(block.params)
            whole = block.run(lambda shards: _fused(block.groups, shards))
            whole_s = _seconds(whole, block.params)
        else:
            groups = {n: dataclasses.replace(g, wire=form, operands=None) for n, g in block.groups.items()}
            wires = block.run(lambda shards, groups=groups: quantize_together(groups, shards), cut_out=True)(
                block.params
            )
            whole = block.run(lambda _, wires, groups=groups: [wire.gather(groups) for wire in wires], wires)
            whole_s = _seconds(whole, block.params, wires)
            sent = [wire.codes if isinstance(wire, Tiles) else wire.buffer for wire in wires]
        size = sum(x.nbytes for x in jax.tree.leaves(sent)) // ranks // degree(TP) * (ranks - 1)
        wire = block.run(lambda _, sent: jax.tree.map(_gathered, sent), sent, without=True)
        yield Movement(f"gather {name}", size, _seconds(wire, sent), size / links.gather_rate, whole_s)
    yield from _reductions(block, links)


def _reductions(block: _Block, links: Links) -> Iterator[Movement]:
    """Yields reductions of a block's gradient: a bfloat16 reduce-scatter, then an exchange for each of `GRAD_WIRES`."""

    def random(shards: Mapping[Any, Shards]) -> Tree:
        key = jax.random.fold_in(jax.random.key(0), lax.axis_index(AXES))  # every rank has a different gradient
        shapes = jax.eval_shape(lambda: _fused(block.groups, shards))
        return jax.tree.map(lambda s: jax.random.normal(key, s.shape, s.dtype), shapes)

    def summed(reduction: Any, sums: GradReduce = "bf16") -> Callable[..., Tree]:
        groups = {p: dataclasses.replace(g, reduction=reduction, grad_reduce=sums) for p, g in block.groups.items()}
        return block.run(lambda _, gradients: scatter(groups, gradients), gradients, cut_out=True)

    gradients = block.run(random, cut_out=True)(block.params)
    exact = jax.device_get(summed(None, "float32")(block.params, gradients))
    for name, reduction in {"scatter": None, **GRAD_WIRES}.items():
        program = summed(reduction)
        numbers = jax.device_get(program(block.params, gradients))
        pairs = list(zip(jax.tree.leaves(numbers), jax.tree.leaves(exact), strict=True))
        error = sum(float(np.sum((a - b) ** 2)) for a, b in pairs) / sum(float(np.sum(b**2)) for _, b in pairs)
        seconds = _seconds(program, block.params, gradients)
        if reduction is None:  # not from the HLO, because XLA's CPU backend widens bfloat16 reductions
            ranks = _ranks()
            size = sum(x.nbytes for x in jax.tree.leaves(gradients)) // ranks // degree(TP) * (ranks - 1) // ranks
        else:
            lowered = program.lower(block.params, gradients)  # pyright: ignore[reportFunctionMemberAccess]
            size = sum(c.wire_bytes for c in hlo.collectives(lowered.compile().as_text()))
        title = "scatter gradient" if reduction is None else f"exchange gradient {name}"
        yield Movement(title, size, seconds, size / links.scatter_rate, error=error**0.5)


class _Block:
    """One block's weights on the mesh in scope, and programs that use them."""

    def __init__(self, config: ModelConfig) -> None:
        model = init(lambda rngs: family_of(config).block(config, rngs=rngs), nnx.Rngs(0))
        self.groups = _in_one_buffer({path: group for (path, _), group in groups_of(model, None).items()})
        self.model_def, self.params, _, _ = split_model(model)

    def run(
        self, function: Callable[..., Tree], *operands: Tree, cut_out: bool = False, without: bool = False
    ) -> Callable[..., Tree]:
        """Returns a jitted program that takes a rank's shards and other operands.

        Args:
            function: the function to jit, called as `function(shards by name, *operands)`.
            operands: example operands; only their number is used. The first dimensions of the arrays in the program's
                operands are sharded over all axes.
            cut_out: whether every rank has its own results, which are concatenated along the first dimension, sharded
                over all axes. Otherwise, results are the same on all gtp ranks.
            without: whether to omit the parameters; the function's first argument is then `None`.
        """
        out = P(AXES) if cut_out else P(TP)

        def local(*args: Tree) -> Tree:
            shards = None if without else _in_one_buffer(shards_of(self.model_def.model(args[0])))
            return function(shards, *args[0 if without else 1 :])

        own = () if without else (self.model_def.specs,)
        return _jitted(local, (*own, *(P(AXES) for _ in operands)), out)


def _fused(groups: Mapping[Any, WeightGroup], shards: Mapping[Any, Shards]) -> dict[Any, Any]:
    return {path: Kernels(shards[path], (path,)).gather(groups)[path] for path in groups}


def _in_one_buffer[T](by_path: Mapping[ModulePath, T]) -> dict[ModulePath, T]:
    """Returns the same values by names of one part, whose weights `quantize_together` packs like those of a layer in a
    stack, instead of each module's alone."""
    return {(".".join(map(str, path)),): value for path, value in by_path.items()}


def _cast(group: WeightGroup, shards: Shards) -> jax.Array:
    return jnp.concatenate([jnp.ravel(s) for s in shards]).astype(group.dtype)


def _bits(x: jax.Array) -> jax.Array:
    # XLA's CPU backend widens 16-bit floats in collectives
    return lax.bitcast_convert_type(x, jnp.uint16)


def _gathered(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, GTP, tiled=True)


def _seconds(program: Callable[..., Tree], *operands: Tree) -> float:
    return seconds_a_call(program, *operands, one_by_one=platform() == "cpu")


def _ranks() -> int:
    ranks = degree(GTP)
    if ranks == 1:
        raise ValueError("gtp is 1, so nothing would be sent. Use two or more devices on the gtp axis: `--gtp 2`.")
    return ranks


def _placed(x: jax.Array, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))  # pyright: ignore[reportArgumentType]


def _jitted(function: Callable[..., Tree], into: Any, out: Any) -> Callable[..., Tree]:
    mapped = jax.shard_map(function, in_specs=into, out_specs=out, check_vma=False)
    return jax.jit(mapped, compiler_options=compile_options(platform(), tp=degree(TP)))
