"""Describes the step that a benchmark runs, and the environment of the processes that run it."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gtp_jax
from gtp_jax.mesh import CP, EP, has_gpu
from gtp_jax.models import PRESETS, preset_of
from gtp_jax.runner.flags import ExpertOptions, Parallelism, check_knobs, knob, piece

from .contenders.workload import Workload

# The default workload, by platform.
_PRESET = {"gpu": "reference", "cpu": "tiny"}
_SEQ = {"gpu": 8192, "cpu": 128}
VIRTUAL_DEVICES = 4

_GROUP = "step"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of the step to run. Defaults for `None` depend on the platform or the preset.

    Raises:
        ValueError: if a value is out of range.
    """

    preset: str | None = knob(
        None, _GROUP, "the model (default: reference on GPUs, tiny on a CPU)", kind=str, choices=tuple(PRESETS)
    )
    num_layers: int | None = knob(None, _GROUP, "number of layers (default: the preset's)", metavar="N")
    vocab_size: int | None = knob(None, _GROUP, "size of the vocabulary (default: the preset's)", metavar="N")
    seq: int | None = knob(None, _GROUP, "tokens per sequence (default: 8192 on GPUs, 128 on a CPU)", metavar="N")
    tokens: int | None = knob(
        None,
        _GROUP,
        "tokens per step and device (default: one sequence per microbatch for each rank of gtp and ep)",
        metavar="N",
    )
    microbatches: int = knob(1, _GROUP, "microbatches per step", metavar="N")
    parallelism: Parallelism = piece(Parallelism)

    def __post_init__(self) -> None:
        check_knobs(self)

    def workload(self, platform: str, count: int, *, steps: int, experts: ExpertOptions | None = None) -> Workload:
        """Returns the workload on a platform's devices, some of which may be left unused.

        Args:
            platform: `"gpu"` or `"cpu"`.
            count: the number of devices.
            steps: the number of timed steps.
            experts: what differs from the preset's experts; `None` if the benchmark does not support experts.

        Raises:
            ValueError: if there are too few devices, if the tokens do not make up whole sequences, or if the model has
                experts but the benchmark does not support them.
        """
        degrees = degrees_within(self.parallelism, count)
        gtp, cp, ep, tp = degrees["gtp"], degrees.get(CP, 1), degrees.get(EP, 1), degrees["tp"]
        name = self.preset or _PRESET[platform]
        config = preset_of(name)
        if experts is not None:
            config = experts.of(config, name)
        elif getattr(config, "num_experts", 0):
            raise ValueError(
                f"`preset` is {name!r}, whose layers have experts; this command measures only dense models. Use "
                "another preset, or `gtp-jax bench step`."
            )
        seq = self.seq or _SEQ[platform]
        share = gtp * ep * self.microbatches
        total = self.tokens * gtp * cp * ep * tp if self.tokens else share * seq
        if total % (share * seq):
            whole = self.microbatches * seq
            ranks = f"{gtp} gtp ranks" if ep == 1 else f"{gtp * ep} gtp x ep ranks"
            raise ValueError(
                f"`--tokens` is {self.tokens} per device, {total} per step, which is not a whole number of sequences "
                f"of {seq} tokens for each of {ranks} and {self.microbatches} microbatches. Use a multiple of "
                f"{whole // tp if whole % tp == 0 else share * seq}."
            )
        fields = {f.name for f in dataclasses.fields(Workload)} & {f.name for f in dataclasses.fields(config)}
        sizes: dict[str, Any] = {name: getattr(config, name) for name in fields}
        changed = {name: getattr(self, name) for name in ("num_layers", "vocab_size") if getattr(self, name)}
        return Workload(
            **{**sizes, **changed},
            seq=seq,
            sequences=total // seq,
            microbatches=self.microbatches,
            gtp=gtp,
            cp=cp,
            ep=ep,
            tp=tp,
            steps=steps,
        )


def degrees_within(parallelism: Parallelism, count: int) -> dict[str, int]:
    """Returns the degrees of all axes on `count` devices, some of which may be left unused.

    Raises:
        ValueError: if there are too few devices.
    """
    degrees = parallelism.degrees(count)
    needed = math.prod(degrees.values())
    if needed > count:
        words = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if axis != "dp" or degree > 1)
        raise ValueError(f"{words} needs {needed} devices, but there are {count}. Use smaller degrees.")
    return degrees


def describe(work: Workload, device: str) -> str:
    """Returns a one-line description of a step."""
    ep = "".join(f"{name} {size}, " for name, size in (("cp", work.cp), ("ep", work.ep)) if size > 1)
    parts = f", {work.microbatches} microbatches" if work.microbatches > 1 else ""
    experts = f", {work.top_k} of {work.num_experts} experts per token" if work.num_experts else ""
    return (
        f"{work.devices} x {device}, gtp {work.gtp}, {ep}tp {work.tp}: {work.num_layers} layers of width "
        f"{work.hidden_size}{experts}, "
        f"{work.tokens // work.devices} tokens per device, sequences of {work.seq}{parts}"
    )


def environment_of(virtual_devices: int) -> dict[str, str]:
    """Returns the environment of the contenders: that of this process, with this package on Python's path, the given
    number of virtual CPU devices, and no cache of compiled programs, because contenders time compilation. Unless it
    already says otherwise, JAX may use 92 % of a GPU's memory or, without a GPU, uses the CPU. Where JAX uses the CPU,
    PyTorch does too."""
    package = str(Path(gtp_jax.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if not has_gpu():
        environment.setdefault("JAX_PLATFORMS", "cpu")
    if environment.get("JAX_PLATFORMS") == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["JAX_NUM_CPU_DEVICES"] = str(virtual_devices)
    return environment


def probe(environment: dict[str, str]) -> tuple[str, str, int]:
    """Returns the kind, platform and number of devices, found by a separate process so that this one uses no GPU.

    Raises:
        ValueError: if JAX finds no device.
    """
    ask = "import jax; d = jax.devices(); print(d[0].device_kind, d[0].platform, len(d), sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"JAX finds no device here: {done.stderr.strip().splitlines()[-1]}. See `gtp-jax doctor`.")
    kind, platform, count = done.stdout.strip().splitlines()[-1].split("|")
    return kind, platform, int(count)
