"""Inspects what a training step of a preset costs on a mesh, without allocating the model.

The step is compiled from shapes alone, for virtual CPU devices or for GPUs that this machine need not have.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import hlo
from ..experts import TokenExchange, exchanges
from ..layout import Layout, even_shares
from ..mesh import Roles, has_gpu, make_mesh, use_cpu, use_roles
from ..models import build, family_of
from ..nn import abstract_model
from ..runner.flags import InspectOptions
from ..train import TrainState, train_step
from ._explain import Explanation, explain
from ._state_memory import StateMemory, state_memory

_DEFAULT_DEVICES = 8
_MAX_GRAD_NORM = 1.0


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How one weight is stored on the mesh.

    Attributes:
        path: the path of the weight in the model.
        logical_shape: the shape of the weight, without padding.
        dtype: the dtype of the stored array.
        partition: the mesh axes that shard each dimension.
        bytes_per_device: the bytes of the largest shard.
        note: which axes store the weight whole, how it is padded in storage and in use, and what its output costs
            outside a chain; empty if none of these applies.
    """

    path: str
    logical_shape: tuple[int, ...]
    dtype: str
    partition: tuple[Any, ...]
    bytes_per_device: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The result of an inspection.

    Attributes:
        options: the options of the inspection.
        degrees: the sizes of the mesh axes.
        batch: the number of sequences per step.
        param_count: the number of parameters of the model.
        parameters: how each parameter is stored on the mesh.
        wire: how each weight is sent.
        exchanges: how tokens are sent to experts on other ranks.
        memory: the memory of the compiled step, in bytes per device.
        state: where the state is between steps.
        collectives: the collectives of the compiled step.
        flops: the floating-point operations of a step over all devices, without recomputation.
        order: the order of launches; `None` without a target.
        timeline: the modelled times of the launches if NVLink joins all GPUs; `None` without a target.
        over_network: the modelled times with the network between hosts; `None` if the options do not describe it.
        host_copies: the copies of activations between the memories of a device and of its host; empty without a target.
        host_bytes: the bytes that the step takes in the memory of the host for them, per device.
        layer_flops: the floating-point operations of a layer's forward pass, per device and microbatch.
        compile_s: the compile time in seconds.
    """

    options: InspectOptions
    degrees: dict[str, int]
    batch: int
    param_count: int
    parameters: tuple[Parameter, ...]
    wire: Explanation
    exchanges: tuple[TokenExchange, ...]
    memory: hlo.Memory
    state: StateMemory
    collectives: tuple[hlo.Collective, ...]
    flops: int
    order: hlo.LaunchOrder | None
    timeline: hlo.Timeline | None
    over_network: hlo.Timeline | None
    host_copies: tuple[hlo.Event, ...]
    host_bytes: int
    layer_flops: float
    compile_s: float


def inspect(options: InspectOptions) -> Inspection:
    """Compiles the step from shapes and reads the result.

    If this is the process's first use of JAX, JAX starts with the virtual CPU devices that the inspection needs. On a
    machine with GPUs it starts on these too, and they stay the default; to leave them to other processes, set
    JAX_PLATFORMS=cpu, as `gtp-jax inspect` does. On a machine without GPUs, JAX runs on CPU devices alone.

    Raises:
        ValueError: if degrees, heads, sequence length and batch do not fit together, if the target is not one of
            `hlo.parse_target`, or if JAX runs without CPU devices or already with too few; raised before compilation.
        ModuleNotFoundError: if a target needs packages that are not installed.
        RuntimeError: if a target is given, but JAX's CUDA plugin did not start.
    """
    target, network = options.machine, options.network
    execution, recipe = options.execution, options.quantization.to_recipe()
    config = dataclasses.replace(options.model, **execution.of_model)
    degrees = options.parallelism.degrees(target.devices if target else _DEFAULT_DEVICES)
    config.check_mesh(tp=degrees["tp"], seq=options.seq, cp=options.parallelism.cp)
    ranks = math.prod(degrees[axis] for axis in options.parallelism.roles.batch)
    batch = options.batch or ranks * execution.microbatches
    execution.check_batch(batch, degrees)
    # for a target too, because compiling needs no GPU
    host = _cpu_devices(1 if target else math.prod(degrees.values()))
    mesh = make_mesh(**degrees, devices=hlo.topology_devices(target) if target else host)
    optimizer = optax.adamw(1e-3)
    # the step chooses its compile options by the platform of this mesh
    with jax.default_device(host[0]), jax.set_mesh(mesh), use_roles(options.parallelism.roles):
        step = train_step(
            family_of(config).loss,
            optimizer,
            microbatches=execution.microbatches,
            max_grad_norm=_MAX_GRAD_NORM,
            recipe=recipe,
            pregathered_layers=options.quantization.pregathered_layers,
            view="local",
            reduce_over_dp=execution.reduce_over_dp,
        )
        with even_shares():
            model = abstract_model(lambda rngs: build(config, rngs=rngs))
        state = TrainState.create(model, optimizer, recipe=recipe, offload=execution.offloaded)
        found = exchanges(model, recipe, tokens=batch * options.seq // (ranks * execution.microbatches))
        wire = explain(model, recipe)
        tokens = _batch(mesh, options.parallelism.roles, batch, options.seq)
        lowered = step.lower(state, tokens)  # pyright: ignore[reportFunctionMemberAccess]
        began = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS) if target else None)
        compile_s = time.perf_counter() - began
    module = hlo.parse(str(compiled.as_text()))
    order = hlo.launch_order(module) if target else None
    sizes: Any = {"seq": options.seq, "heads": config.num_heads, "head_dim": config.head_dim}
    tokens_per_step, in_head = batch * options.seq, config.vocab_size * config.hidden_size
    in_layer = (config.matmul_params() - in_head) // config.num_layers
    of_layer = hlo.step_flops(matmul_params=in_layer, tokens=tokens_per_step, layers=1, **sizes)
    return Inspection(
        options=options,
        degrees=dict(mesh.shape),
        batch=batch,
        param_count=config.param_count(),
        parameters=_parameters(state),
        wire=wire,
        exchanges=found,
        memory=hlo.memory(compiled, params=state.params, opt_state=state.opt_state, frozen=state.frozen),
        state=state_memory(state),
        collectives=tuple(hlo.collectives(module)),
        flops=hlo.step_flops(
            matmul_params=config.matmul_params(), tokens=tokens_per_step, layers=config.num_layers, **sizes
        ),
        order=order,
        timeline=hlo.timeline(order, target.chip) if order and target else None,
        over_network=hlo.timeline(order, target.chip, network) if order and target and network else None,
        host_copies=hlo.host_copies(module) if target else (),
        host_bytes=compiled.memory_analysis().host_temp_size_in_bytes if target else 0,  # pyright: ignore[reportOptionalMemberAccess]
        layer_flops=of_layer / 3 / math.prod(degrees.values()) / execution.microbatches,  # backward takes the other 2/3
        compile_s=compile_s,
    )


def _cpu_devices(count: int) -> list[Any]:
    """Returns `count` virtual CPU devices. The default devices of the process stay what they are.

    Raises:
        ValueError: if JAX is told to run without CPU devices, or is already in use with fewer; their number is fixed at
            first use.
    """
    try:
        if not has_gpu():
            use_cpu()  # an installed CUDA plugin would look for a driver
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
    except RuntimeError:
        pass  # JAX has already created its devices; there may be enough
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms.split(","):
        raise ValueError(
            f"`jax_platforms` is {platforms!r}, but `inspect` compiles with CPU devices. Set "
            f"JAX_PLATFORMS={platforms},cpu before jax is first used; the first platform stays the default."
        )
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"the mesh needs {count} CPU devices, but jax already runs with {len(devices)}. Start a new process, "
            f"or set `jax_num_cpu_devices` to {count} before jax is first used."
        )
    return devices[:count]


def _batch(mesh: Mesh, roles: Roles, batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(roles.batch)))
    return {"tokens": tokens, "targets": tokens}


def _parameters(state: TrainState) -> tuple[Parameter, ...]:
    parameters = []
    layouts = jax.tree.leaves(state.model_def.layouts, is_leaf=lambda node: not isinstance(node, dict))
    shapes = state.model_def.logical_shapes(state.params).values()
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    for (path, leaf), shape, layout in zip(leaves, shapes, layouts, strict=True):
        parameters.append(
            Parameter(
                path=".".join(str(key.key) for key in path),
                logical_shape=shape,
                dtype=str(leaf.dtype),
                partition=tuple(leaf.sharding.spec) + (None,) * (len(leaf.shape) - len(leaf.sharding.spec)),
                bytes_per_device=hlo.bytes_per_device(leaf),
                note="" if layout is None else _note(layout, dict(leaf.sharding.mesh.shape)),
            )
        )
    return tuple(parameters)


def _note(layout: Layout, degrees: dict[str, int]) -> str:
    """Returns which axes store a weight whole, how it is padded in storage and in use, and what its output costs
    outside a chain."""
    notes = []
    split = layout.split
    sharded = (*layout.axes, *layout.experts.axes)
    whole = [axis for axis in layout.roles.weights if degrees[axis] > 1 and axis not in sharded]
    if layout.takes_part and split is not None and split.axis is not None and split.axis not in layout.axes:
        whole.insert(0, split.axis)
    replicas = [axis for axis in layout.roles.over_optimizer if axis not in (*layout.axes, *layout.optimizer.axes)]
    whole += [axis for axis in replicas if degrees[axis] > 1]
    if whole:
        notes.append(f"stored whole on every rank of {', '.join(whole)}")
    if layout.padding.size:
        more = math.prod(layout.array_shape) / math.prod(layout.shape) - 1
        notes.append(f"stored as {'x'.join(map(str, layout.array_shape))}, padded by {more:.1%}")
    if layout.takes_part and split is not None:
        counts = ", ".join(map(str, split.counts))
        notes.append(f"{split.axis} ranks use {counts} of {split.size}, padded by {split.padding:.1%}")
        if layout.split_dim == layout.rows == 1 and len(layout.shape) == 2:  # a `Dense`, not a table or experts
            moved = split.size - max(split.counts)
            notes.append(f"outside a chain, {moved} features per token of its output are gathered over {split.axis}")
    return "; ".join(notes)
