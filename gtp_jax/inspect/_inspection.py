"""What a training step of a preset costs on a mesh, without allocating the model.

The step is compiled from shapes alone, for virtual CPU devices or for GPUs that are not there.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import plan
from ..chain import Remat
from ..mesh import BATCH_AXES, Layout, make_mesh
from ..models import PRESETS, Llama, LlamaConfig, next_token_loss
from ..nn import Explanation, abstract_model, check_heads, explain
from ..recipes import RecipeOptions
from ..train import TrainState, train_step

_DEFAULT_DEVICES = 8
_MAX_GRAD_NORM = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(RecipeOptions):
    """What to inspect; beside what `RecipeOptions` has.

    Attributes:
        preset: a key of `PRESETS`.
        dp, gtp, tp: degrees of the mesh; gtp takes what the others leave over if `None`.
        batch: sequences of a step, over all ranks; one a rank and microbatch if `None`.
        seq: tokens of a sequence.
        microbatches: parts of a rank's batch.
        unroll, prefetch, kept: the chain's schedule.
        remat: what a layer keeps for backward.
        target: GPUs to compile for, `h200:8` for instance; virtual CPU devices if `None`.
    """

    preset: str = "tiny"
    dp: int = 1
    gtp: int | None = None
    tp: int = 1
    batch: int | None = None
    seq: int = 2048
    microbatches: int = 1
    unroll: int | str = "full"
    prefetch: bool = True
    kept: int | str = 1
    remat: Remat = "matmuls"
    target: str | None = None

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise ValueError(f"unknown `preset` {self.preset!r}; known are {', '.join(PRESETS)}.")
        super().__post_init__()
        for name in ("dp", "gtp", "tp", "batch", "seq", "microbatches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` is {value}; it is a whole number of at least 1.")

    def config(self) -> LlamaConfig:
        """The preset with the schedule asked for.

        Raises:
            ValueError: if the schedule is malformed, or tp does not divide the heads or the sequence.
        """
        chosen: Any = {"unroll": self.unroll, "prefetch": self.prefetch, "kept": self.kept, "remat": self.remat}
        config = dataclasses.replace(PRESETS[self.preset], **chosen)
        check_heads(config.heads, config.kv_heads, self.tp)
        if config.sequence_parallel and self.seq % self.tp:
            raise ValueError(f"`seq` is {self.seq}, which tp {self.tp} does not divide; the sequence is cut over tp.")
        return config

    def sequences(self, ranks: int) -> int:
        """Sequences of a step on `ranks` = dp * gtp ranks.

        Raises:
            ValueError: if the ranks and microbatches do not divide `batch`.
        """
        parts = ranks * self.microbatches
        batch = parts if self.batch is None else self.batch
        if batch % parts:
            raise ValueError(f"`batch` is {batch}; it must be a multiple of dp * gtp * microbatches = {parts}.")
        return batch


@dataclasses.dataclass(frozen=True)
class Parameter:
    """How one weight lies on the mesh."""

    path: str
    logical_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: str
    partition: tuple[Any, ...]
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        options: what was inspected.
        degrees: of the mesh's axes.
        batch: sequences of a step.
        param_count: parameters of the model.
        parameters: how each lies on the mesh.
        wire: how each travels.
        memory: bytes a device.
        collectives: of the compiled step.
        flops: operations of a step over all devices, recomputation not counted.
        schedule: the order of launches, for a target.
        timeline: its modelled times.
        compile_s: seconds it took to compile.
    """

    options: InspectOptions
    degrees: dict[str, int]
    batch: int
    param_count: int
    parameters: tuple[Parameter, ...]
    wire: Explanation
    memory: plan.Memory
    collectives: tuple[plan.Collective, ...]
    flops: int
    schedule: plan.Schedule | None
    timeline: plan.Timeline | None
    compile_s: float


def inspect(options: InspectOptions) -> Inspection:
    """Compiles the step from shapes and reads the result.

    Raises:
        ValueError: if degrees, heads, sequence or batch do not fit one another, before anything is compiled.
        ModuleNotFoundError: if a target needs packages that are not installed.
    """
    target = None if options.target is None else plan.parse_target(options.target)
    config = options.config()
    gtp = options.gtp or max(1, (target.devices if target else _DEFAULT_DEVICES) // (options.dp * options.tp))
    batch = options.sequences(options.dp * gtp)
    count = options.dp * gtp * options.tp
    host = _cpu_devices(1 if target else count)  # also for a target: compiling needs no GPU, and takes none
    mesh = make_mesh(dp=options.dp, gtp=gtp, tp=options.tp, devices=plan.topology_devices(target) if target else host)
    optimizer = optax.adamw(1e-3)
    recipe = options.quantization
    with jax.set_mesh(mesh):  # which also decides for what platform's compiler the step has options
        step = train_step(
            next_token_loss,
            optimizer,
            microbatches=options.microbatches,
            max_grad_norm=_MAX_GRAD_NORM,
            recipe=recipe,
            held=options.held,
        )
        model = abstract_model(lambda rngs: Llama(config, rngs=rngs))
        state = TrainState.create(model, optimizer)
        lowered = step.lower(state, _batch(mesh, batch, options.seq))  # pyright: ignore[reportFunctionMemberAccess]
        began = time.perf_counter()
        compiled = lowered.compile(compiler_options=dict(plan.COMPILE_OPTIONS) if target else None)
        compile_s = time.perf_counter() - began
    module = plan.parse(str(compiled.as_text()))
    schedule = plan.schedule(module) if target else None
    return Inspection(
        options=options,
        degrees=dict(mesh.shape),
        batch=batch,
        param_count=config.param_count(),
        parameters=_parameters(state),
        wire=explain(model, recipe),
        memory=plan.memory(compiled, params=state.params, opt_state=state.opt_state),
        collectives=tuple(plan.collectives(module)),
        flops=plan.step_flops(
            matmul_params=config.matmul_params(),
            tokens=batch * options.seq,
            layers=config.layers,
            seq=options.seq,
            heads=config.heads,
            head_dim=config.head_dim,
        ),
        schedule=schedule,
        timeline=plan.timeline(schedule, target.chip) if schedule and target else None,
        compile_s=compile_s,
    )


def _cpu_devices(count: int) -> list[Any]:
    """Virtual CPU devices, as many as asked for.

    Raises:
        ValueError: if jax has been used before with fewer; their number is fixed at first use.
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
    except RuntimeError:
        pass  # jax has its devices already; there may be enough
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(
            f"the mesh needs {count} CPU devices, but jax already runs with {len(devices)}. Start a new process, "
            f"or set `jax_num_cpu_devices` to {count} before jax is first used."
        )
    return devices[:count]


def _batch(mesh: Mesh, batch: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    return {"tokens": tokens, "targets": tokens}


def _parameters(state: TrainState) -> tuple[Parameter, ...]:
    layouts = jax.tree.leaves(state.skeleton.layouts, is_leaf=lambda x: x is None or isinstance(x, Layout))
    found = []
    for (path, leaf), layout in zip(jax.tree_util.tree_leaves_with_path(state.params), layouts, strict=True):
        leading = () if layout is None else leaf.shape[: len(leaf.shape) - len(layout.shape)]
        found.append(
            Parameter(
                path=".".join(str(key.key) for key in path),
                logical_shape=leaf.shape if layout is None else (*leading, *layout.shape),
                stored_shape=leaf.shape,
                dtype=str(leaf.dtype),
                partition=tuple(leaf.sharding.spec) + (None,) * (len(leaf.shape) - len(leaf.sharding.spec)),
                bytes_per_device=plan.bytes_per_device(leaf),
            )
        )
    return tuple(found)
