"""Compares two ways of sending a layer's sequence over tp: in parts that overlap with a matmul, or in one collective.

Movements without a matmul are timed as chains inside one program, because a program with a single movement would mostly
measure its launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gtp_jax.collectives import gather_linear, gather_sequence, linear_scatter, reduce_scatter_sequence, split_parts
from gtp_jax.mesh import TP, degree, platform
from gtp_jax.models import ModelConfig, family_of
from gtp_jax.nn import abstract_model, groups_of
from gtp_jax.ops import linear
from gtp_jax.train import compile_options

from ._timing import seconds_a_call

Way = Literal["one way", "both ways", "gather"]
WAYS: tuple[Way, ...] = ("one way", "both ways", "gather")

_HOPS = 16


@dataclasses.dataclass(frozen=True)
class Rate:
    """The rate at which activations leave a device over tp.

    Attributes:
        mebibytes: the size of one rank's part in MiB.
        way: "one way": each rank sends its part to the next rank; "both ways": each rank sends half of its part to the
            next rank and half to the previous one; "gather": an all-gather of all ranks' parts.
        bytes_per_s: the bytes per second that leave a device.
    """

    mebibytes: float
    way: Way
    bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class SequenceMatmul:
    """The times of one matmul of a layer together with the movement of its sequence.

    Attributes:
        name: the module, and forward or backward.
        flops: the FLOPs per rank.
        wire_bytes: the bytes that leave a device.
        alone_s: the seconds of the matmuls alone, on a sequence that has already been gathered.
        parts_s: the seconds if each part is multiplied while another one is sent.
        at_once_s: the seconds with one collective before or after the matmul.
    """

    name: str
    flops: int
    wire_bytes: int
    alone_s: float
    parts_s: float
    at_once_s: float


def measure_rates(mebibytes: Sequence[float]) -> Iterator[Rate]:
    """Times movements of parts over the tp axis of the mesh in scope, for each size and each of `WAYS`.

    Args:
        mebibytes: the sizes of one rank's part in MiB.

    Raises:
        ValueError: if tp is 1, because nothing would be sent.
    """
    ranks = _ranks()
    for size in mebibytes:
        elements = max(2, round(size * 2**20 / 2 / 2) * 2)
        x = _placed(jnp.ones((ranks * elements,), jnp.bfloat16), P(TP))
        for way in WAYS:
            leaving = 2 * elements * _HOPS * (ranks - 1 if way == "gather" else 1)
            yield Rate(elements / 2**19, way, leaving / _seconds(_jitted(_chain(way), P(TP), P(TP)), x))


def measure_sequence(config: ModelConfig, *, part: int, shares: int) -> Iterator[SequenceMatmul]:
    """Times the matmuls of one layer over the tp axis of the mesh in scope, forward and backward.

    Args:
        config: the configuration of the model whose layer is measured.
        part: the number of tokens in a rank's part of the sequence.
        shares: the tp degree that determines a rank's share of each weight. It may exceed the tp degree of the mesh:
            the weights then have the shapes of the larger degree, but fewer parts are sent.

    Raises:
        ValueError: if tp is 1, or `shares` does not divide the features of a weight.
    """
    ranks = _ranks()
    model = abstract_model(lambda rngs: family_of(config).block(config, rngs=rngs))
    for (path, _), group in groups_of(model, None).items():
        layout = group.layouts[0]
        if layout.split_dim not in (0, 1) or len(layout.shape) != 2:
            continue
        column = layout.split_dim == 1
        into, out = layout.shape[0], sum(one.shape[1] for one in group.layouts)
        if (out if column else into) % shares:
            raise ValueError(
                f"`shares` is {shares}, which does not divide a weight of {into} x {out} features over tp. Use a "
                f"degree that divides {out if column else into}."
            )
        into, out = (into, out // shares) if column else (into // shares, out)
        yield from _matmul(".".join(map(str, path)), column, into, out, part, ranks)


def _matmul(name: str, column: bool, into: int, out: int, part: int, ranks: int) -> Iterator[SequenceMatmul]:
    key = jax.random.key(0)
    # the ranks' weights, concatenated along the dimension that tp shards
    weight = (out * ranks, into) if column else (out, into * ranks)
    w_spec = P(TP) if column else P(None, TP)
    w = _placed(jax.random.normal(key, weight, jnp.bfloat16), w_spec)
    seq = part * ranks
    x_spec = P(None, TP) if column else P(None, None, TP)
    x = _placed(jax.random.normal(key, (1, seq, into if column else into * ranks), jnp.bfloat16), x_spec)
    whole = _placed(jnp.ones((1, seq, into), jnp.bfloat16), P())
    if column:
        parts: Callable[..., Any] = lambda x, w: gather_linear(x, w, TP)  # noqa: E731
        at_once = lambda x, w: linear(gather_sequence(x, TP, sequence_parallel=True), w)  # noqa: E731
    else:
        parts = lambda x, w: linear_scatter(split_parts(x, TP), w, TP)  # noqa: E731
        at_once = lambda x, w: reduce_scatter_sequence(linear(x, w), TP, sequence_parallel=True)  # noqa: E731
    flops, moved = 2 * seq * into * out, 2 * (seq - part) * (into if column else out)
    for title, run, factor, moves in (("forward", _forward, 1, 1), ("backward", _backward, 2, 2 if column else 1)):
        times = (
            _seconds(_jitted(run(f), (spec, w_spec), P(TP)), operand, w)
            for f, operand, spec in ((linear, whole, P()), (parts, x, x_spec), (at_once, x, x_spec))
        )
        yield SequenceMatmul(f"{name} {title}", factor * flops, moves * moved, *times)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, w: _own(function(x, w))


def _backward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a program of the backward pass. XLA removes those forward computations that backward does not need."""

    def run(x: jax.Array, w: jax.Array) -> Any:
        y, transpose = jax.vjp(function, x, w)
        return _own(transpose(jax.tree.map(lambda y: jnp.full(y.shape, 1e-3, y.dtype), y)))

    return run


def _own(tree: Any) -> Any:
    """Adds a leading dimension that is sharded over tp to every array, so that each rank returns its own values."""
    return jax.tree.map(lambda y: y[None], tree)


def _chain(way: Way) -> Callable[[jax.Array], jax.Array]:
    """Returns a program of `_HOPS` movements of `x`, one after another."""
    ranks = degree(TP)
    ahead, behind = ([(rank, (rank + step) % ranks) for rank in range(ranks)] for step in (1, -1))

    def hop(x: jax.Array) -> jax.Array:
        if way == "one way":
            return lax.ppermute(x, TP, ahead)
        if way == "both ways":
            a, b = jnp.split(x, 2)
            return jnp.concatenate([lax.ppermute(a, TP, ahead), lax.ppermute(b, TP, behind)])
        whole = lax.optimization_barrier(lax.all_gather(x, TP, tiled=True))
        return lax.slice_in_dim(whole, 0, x.shape[0])

    def run(x: jax.Array) -> jax.Array:
        for _ in range(_HOPS):
            x = lax.optimization_barrier(hop(x))
        return x

    return run


def _ranks() -> int:
    if degree(TP) == 1:
        raise ValueError("tp is 1, so nothing would be sent. Use two or more devices on the tp axis: `--tp 2`.")
    return degree(TP)


def _placed(x: jax.Array, spec: P) -> jax.Array:
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))  # pyright: ignore[reportArgumentType]


def _jitted(function: Callable[..., Any], into: Any, out: Any) -> Callable[..., Any]:
    mapped = jax.shard_map(function, in_specs=into, out_specs=out, check_vma=False)
    return jax.jit(mapped, compiler_options=compile_options(platform(), tp=degree(TP)))


def _seconds(program: Callable[..., Any], *operands: Any) -> float:
    return seconds_a_call(program, *operands, one_by_one=platform() == "cpu")
