"""Reads what one device did and when, from a trace of `jax.profiler`."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import jax

# The first pattern that matches the name of a kernel, or of its HLO operation, determines its kind. The patterns cover
# kernels of XLA on GPUs and CPUs, of cuBLAS, cuDNN and NCCL, and of this library.
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
        ("quantization", r"\bgtp_|ffi_call"),  # other calls of this library
    )
)

COLLECTIVES = ("all-gather", "reduce-scatter", "other collective")
KINDS = ("matmul", "attention", "elementwise", "copies", "quantization", *COLLECTIVES)

# A fusion of these operations alone moves or fills memory and computes nothing.
_MOVES = {
    *("copy", "transpose", "bitcast", "bitcast-convert", "slice", "dynamic-slice", "dynamic-update-slice"),
    *("concatenate", "broadcast", "pad", "reshape", "gather", "select", "iota"),
}
_FILLERS = {"loop", "input", "wrapped", "fusion", "async", "start", "done", "clone", ""}

# Control flow that contains other operations, which are recorded separately.
_CONTAINERS = {"while", "call", "conditional"}


@dataclasses.dataclass(frozen=True)
class Op:
    """One kernel.

    Attributes:
        name: the name in the trace.
        kind: one of `KINDS`.
        stream: the stream of a GPU, or the host thread of a CPU device.
        start_us: the start, in microseconds after the start of the first kernel.
        end_us: the end, in microseconds after the start of the first kernel.
    """

    name: str
    kind: str
    stream: str
    start_us: float
    end_us: float

    @property
    def is_collective(self) -> bool:
        """Whether the kernel communicates."""
        return self.kind in COLLECTIVES


def kind_of(name: str, hlo_op: str = "") -> str:
    """Returns which of `KINDS` a kernel is, judged by its name and the name of its HLO operation."""
    for kind, pattern in _PATTERNS:
        if pattern.search(name) or pattern.search(hlo_op):
            return kind
    words = {re.sub(r"dynamic_(update_)?slice", lambda m: m[0].replace("_", "-"), name).split(".")[0]}
    words = {re.sub(r"\d+$", "", word) for part in words for word in part.lower().split("_")}
    return "copies" if words - _FILLERS and words <= _MOVES | _FILLERS else "elementwise"


def read_trace(path: Path) -> list[Op]:
    """Returns the kernels of a host's first device, in the order in which they started.

    Args:
        path: an `.xplane.pb` file, or a folder that `jax.profiler.trace` has written, whose newest trace is read.

    Raises:
        FileNotFoundError: if there is no trace.
        ValueError: if the trace holds no kernel of this device.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"there is no trace in {path}; `gtp-jax profile --keep DIR` writes one.")
    return parse_trace(jax.profiler.ProfileData.from_file(str(files[-1])))


def parse_trace(profile: Any) -> list[Op]:
    """Reads a `jax.profiler.ProfileData` as `read_trace` does."""
    with warnings.catch_warnings():
        # jaxlib's own bindings raise deprecation warnings, which would abort the process if warnings are errors
        warnings.simplefilter("ignore", DeprecationWarning)
        raw = [
            (event.name, str(stats.get("hlo_op", "")), stream, event.start_ns, event.start_ns + event.duration_ns)
            for plane in profile.planes
            for stream, event, stats in _kernels(plane)
        ]
    if not raw:
        raise ValueError("the trace holds no kernel of device 0: it was taken while nothing ran there.")
    begin = min(start for *_, start, _ in raw)
    ops = [
        Op(name, kind_of(name, hlo_op), stream, (start - begin) / 1e3, (end - begin) / 1e3)
        for name, hlo_op, stream, start, end in raw
    ]
    return sorted(ops, key=lambda op: op.start_us)


def _kernels(plane: Any):
    """Yields (stream, event, statistics) for everything that runs on the streams of device 0 if it is a GPU, or for its
    HLO operations if it is a CPU."""
    is_gpu = plane.name == "/device:GPU:0"
    for line in plane.lines:
        if is_gpu and "Stream" not in line.name:
            continue  # lines that summarize the streams
        if not is_gpu and plane.name != "/host:CPU":
            continue
        for event in line.events:
            stats = dict(event.stats)
            if event.name.split(".")[0] in _CONTAINERS:
                continue
            if is_gpu or ("hlo_op" in stats and str(stats.get("device_ordinal")) == "0"):
                yield line.name, event, stats
