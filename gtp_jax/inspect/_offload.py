"""Compares the time that a layer's copies to the host's memory and back take with the time for which it computes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractDevice, PartitionSpec

from ..chain import OFFLOADED, Moved, offloads_recorded
from ..experts import MoE
from ..hlo import CHIPS, fact, quantity
from ..hook import OffloadingUnit, offloading_units, to_trace
from ..mesh import axes_of, degree, degrees, platform
from ..nn import TRACED_AS, Attention, Stack, weight_owners


@dataclasses.dataclass(frozen=True)
class OffloadFact:
    """The activations that the layers of one `Stack`, or the blocks of a model sharded by `gtp_jax.shard`, keep in the
    host's memory between the passes, per device and call.

    Attributes:
        stack: the path of the stack in the model, or of the blocks, with `*` for numbers in which their paths differ.
        remat: the policy.
        layers: the number of layers or blocks.
        bytes: what one layer copies each way, or the block that copies most. This is an upper bound outside of a
            `shard_map`: values other than the layer's input then count as whole on each rank of tp.
        flops: the floating-point operations of its forward pass in matmuls with gathered weights and, in a `Stack`, in
            self-attention, if ranks share them equally.
        chip: the chip of `hlo.CHIPS` that sets the rates.
    """

    stack: str
    remat: str
    layers: int
    bytes: int
    flops: float
    chip: str

    def __str__(self) -> str:
        return (
            f"{self.stack}, remat {self.remat}: {self.layers} layers keep up to "
            f"{quantity(self.layers * self.bytes, 'B')} per device in the host's memory\n"
            + break_even(self.bytes, self.flops, self.chip)
        )


def break_even(bytes_of_layer: float, flops_of_layer: float, chip: str) -> str:
    """Returns lines that say whether a layer's forward pass computes longer than its copies take.

    Args:
        bytes_of_layer: what a layer copies each way, per device.
        flops_of_layer: the floating-point operations of its forward pass, per device.
        chip: the chip that sets the rates.
    """
    link, rate = fact(chip, "host_link_peak"), fact(chip, "bf16_ceiling")
    copying, computing = bytes_of_layer / link.value, flops_of_layer / rate.value
    verdict = "which hides them" if copying <= computing else f"which hides {computing / copying:.0%} of them"
    return (
        f"break-even: a layer's {quantity(bytes_of_layer, 'B')} take {quantity(copying, 's')} each way; its forward "
        f"computes for {quantity(computing, 's')}, {verdict}\n"
        f"  copies at {quantity(link.value, link.unit)}: {link.source}\n"
        f"  matmuls and attention at {quantity(rate.value, rate.unit)}: {rate.source}"
    )


def offload_facts(model: nnx.Module, call: Callable[[Any], Any]) -> tuple[OffloadFact, ...]:
    """Returns a fact for each `Stack`, and for the blocks of each sharded list, that move what they save to the host,
    if the call runs them in a chain.

    Args:
        model: the model, which may be abstract.
        call: a function of the model, which is traced with its gradient, but not run.
    """
    units = offloading_units(model)
    if not units and not any(isinstance(m, Stack) and m.remat in OFFLOADED for _, m in nnx.iter_modules(model)):
        return ()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    stacks: dict[str, Stack] = {}

    def outputs(params: Any, rest: Any) -> list[Any]:
        own = to_trace(nnx.merge(graph, params, rest))
        for path, module in nnx.iter_modules(own):
            if isinstance(module, Stack):
                name = ".".join(map(str, path)) or "the model"
                stacks[name] = module
                setattr(module.layers, TRACED_AS, name)  # static, so that copies of the module have it too
        return [a for a in jax.tree.leaves(call(own)) if _is_float(a)]

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, rest))
    with _as_on_gpus(), offloads_recorded() as found:
        jax.eval_shape(lambda params, rest: jax.vjp(lambda p: outputs(p, rest), params)[0], *shapes)
    known: dict[str, list[Moved]] = {}
    for one in found:
        known.setdefault(one.source, []).append(one)
    lists: dict[str, list[str]] = {}
    for name in (name for name in units if any(one.arrays for one in known.get(name, ()))):
        lists.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    return (
        *(_fact(name, stack, known[name]) for name, stack in stacks.items() if name in known),
        *(_of_blocks(name, units[names[0]], [known[one] for one in names]) for name, names in lists.items()),
    )


def _of_blocks(name: str, unit: OffloadingUnit, moved: Sequence[Sequence[Moved]]) -> OffloadFact:
    """Returns the fact of blocks of one list.

    Args:
        name: the name of the blocks.
        unit: one of them.
        moved: what the calls of each block move.
    """
    largest = max(itertools.chain(*moved), key=lambda one: _bytes(one.arrays))
    ranks = 1 if largest.per_device else degrees(unit.batch)
    tokens = max((math.prod(x.shape[:-1]) for x in largest.x if x.ndim > 1), default=0)
    return OffloadFact(
        name,
        unit.remat,
        len(moved),
        _bytes(largest.arrays) // ranks,
        2 * unit.elements * tokens / ranks,
        chip_in_scope(),
    )


def _fact(name: str, stack: Stack, moved: Sequence[Moved]) -> OffloadFact:
    largest = max(moved, key=lambda one: _bytes(one.arrays))
    x, roles = largest.x[0], stack.roles
    into = stack.partitions(len(x.shape))[0]
    if largest.per_device:
        size = _bytes(largest.arrays)
        shape = [n * degrees(_axes_of_dim(into, dim)) for dim, n in enumerate(x.shape)]
    else:
        inputs, others = largest.arrays[: largest.inputs], largest.arrays[largest.inputs :]
        size = _bytes(inputs) // degrees(tuple(axes_of(into))) + _bytes(others) // degrees(roles.batch)
        shape = list(x.shape)
    flops = _flops(stack, shape) / (degrees(roles.batch) * degree(roles.tensor))
    return OffloadFact(name, stack.remat, stack.length, size, flops, chip_in_scope())


def _axes_of_dim(spec: PartitionSpec, dim: int) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dimension."""
    return tuple(axes_of(PartitionSpec(*spec[dim : dim + 1])))


def _flops(stack: Stack, shape: Sequence[int]) -> float:
    """Returns the operations of `OffloadFact.flops` over all devices, given the global shape of the layer's input."""
    tokens = math.prod(shape[:-1])
    shares = {path: m.top_k / m.num_experts for path, m in nnx.iter_modules(stack.layers) if isinstance(m, MoE)}
    found = 0.0
    for path, owner in weight_owners(stack.layers).items():
        share = next((share for start, share in shares.items() if path[: len(start)] == start), 1.0)
        for kernel in owner.shapes:
            found += 2 * math.prod(kernel) * tokens * (share if len(kernel) > 2 else 1)
    for _, module in nnx.iter_modules(stack.layers):
        if isinstance(module, Attention) and len(shape) > 2:
            causal, window = module.core.causal, module.core.reach.window
            seen = shape[1] / 2 if causal else shape[1]
            seen = seen if window is None else min(seen, window if causal else 2 * window - 1)
            found += 4 * tokens * seen * module.out.shapes[0][0]
    return found


@contextlib.contextmanager
def _as_on_gpus() -> Iterator[None]:
    """Traces for H200s if the devices of the mesh in scope are not GPUs, because what attention saves depends on it."""
    mesh = jax.sharding.get_abstract_mesh()
    if platform() == "gpu":
        yield
        return
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device)):
        yield


def chip_in_scope() -> str:
    """Returns the chip of the mesh in scope, or an H200 if its rates are not known."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    kind = (jax.devices()[0] if device is None else device).device_kind.lower()
    return next((name for name in CHIPS if name in kind), "h200")


def _bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
    return sum(math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in arrays)


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)
