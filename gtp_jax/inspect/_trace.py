"""Reads what one device did and when, from a trace of `jax.profiler`."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import jax

# The first pattern that a kernel's name, or that of its HLO operation, matches says what kind of work it is. Of XLA's
# kernels on GPUs and CPUs, cuBLAS', cuDNN's, NCCL's and this library's own.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("all-gather", r"all.?gather"),
        ("reduce-scatter", r"reduce.?scatter"),
        ("other collective", r"nccl|all.?reduce|all.?to.?all|collective|\bp(max|sum)\b|send.?recv"),
        ("quantization", r"amax_kernel|quantize_kernel|hadamard"),
        ("attention", r"fmha|flash|sdpa|attention"),
        ("matmul", r"nvjet|gemm|cublas|cutlass|xmma|wgmma|matmul|onednn|ynn|\bdot|_dot"),
        ("copies", r"memcpy|memset|\b(take|transpose)_kernel\b"),
        ("quantization", r"\bgtp_|ffi_call"),  # calls of this library whose kernel says no more
    )
)

COLLECTIVES = ("all-gather", "reduce-scatter", "other collective")
KINDS = ("matmul", "attention", "elementwise", "copies", "quantization", *COLLECTIVES)

# A fusion of nothing but these moves or makes numbers without computing any.
_MOVES = {
    *("copy", "transpose", "bitcast", "bitcast-convert", "slice", "dynamic-slice", "dynamic-update-slice"),
    *("concatenate", "broadcast", "pad", "reshape", "gather", "select", "iota"),
}
_FILLERS = {"loop", "input", "wrapped", "fusion", "async", "start", "done", "clone", ""}

# Control flow that holds other operations, which are recorded by themselves.
_CONTAINERS = {"while", "call", "conditional"}


@dataclasses.dataclass(frozen=True)
class Op:
    """One kernel.

    Attributes:
        name: as recorded.
        kind: one of `KINDS`.
        stream: of the device, or a thread that stands for a part of it.
        start_us: since the first kernel.
        end_us: likewise.
    """

    name: str
    kind: str
    stream: str
    start_us: float
    end_us: float

    @property
    def is_collective(self) -> bool:
        """Returns whether it communicates."""
        return self.kind in COLLECTIVES


def kind_of(name: str, hlo_op: str = "") -> str:
    """Returns which of `KINDS` a kernel is, by its name and that of its HLO operation."""
    for kind, pattern in _PATTERNS:
        if pattern.search(name) or pattern.search(hlo_op):
            return kind
    words = {re.sub(r"dynamic_(update_)?slice", lambda m: m[0].replace("_", "-"), name).split(".")[0]}
    words = {re.sub(r"\d+$", "", word) for part in words for word in part.lower().split("_")}
    return "copies" if words - _FILLERS and words <= _MOVES | _FILLERS else "elementwise"


def read_trace(path: Path, device: int = 0) -> list[Op]:
    """Returns the kernels of one device, in the order of their starts.

    Args:
        path: a folder that `jax.profiler.trace` has written, of which the newest trace is taken, or its `.xplane.pb`.
        device: number of the device on its host.

    Raises:
        FileNotFoundError: if there is no trace.
        ValueError: if it holds no kernel of this device.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"there is no trace in {path}; `gtp-jax profile --keep DIR` writes one.")
    return parse_trace(jax.profiler.ProfileData.from_file(str(files[-1])), device)


def parse_trace(profile: Any, device: int = 0) -> list[Op]:
    """Reads a `jax.profiler.ProfileData` as `read_trace` does."""
    with warnings.catch_warnings():
        # jaxlib's bindings warn of themselves; where warnings are errors, the process would abort
        warnings.simplefilter("ignore", DeprecationWarning)
        raw = [
            (event.name, str(stats.get("hlo_op", "")), stream, event.start_ns, event.start_ns + event.duration_ns)
            for plane in profile.planes
            for stream, event, stats in _kernels(plane, device)
        ]
    if not raw:
        raise ValueError(f"the trace holds no kernel of device {device}: it was taken while nothing ran there.")
    begin = min(start for *_, start, _ in raw)
    ops = [
        Op(name, kind_of(name, hlo_op), stream, (start - begin) / 1e3, (end - begin) / 1e3)
        for name, hlo_op, stream, start, end in raw
    ]
    return sorted(ops, key=lambda op: op.start_us)


def _kernels(plane: Any, device: int):
    """(stream, event, its statistics): of a GPU's plane what runs on streams, of a CPU's the HLO operations."""
    is_gpu = plane.name == f"/device:GPU:{device}"
    for line in plane.lines:
        if is_gpu and "Stream" not in line.name:
            continue  # lines that are summed up from the streams
        if not is_gpu and plane.name != "/host:CPU":
            continue
        for event in line.events:
            stats = dict(event.stats)
            if event.name.split(".")[0] in _CONTAINERS:
                continue
            if is_gpu or ("hlo_op" in stats and str(stats.get("device_ordinal")) == str(device)):
                yield line.name, event, stats
