"""Runs each kind of collective that the library uses on the available devices, and compares results with numpy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._finding import Finding, first_line

_AXIS = "devices"
# The numbers of elements per device. On GPUs, XLA has one kernel for small all-reduces and another for larger ones.
_SIZES = (64, 1 << 17)
_TIMEOUT_S = 180


class Collective(NamedTuple):
    """A collective, and what it must return.

    Attributes:
        name: the name of the function in `jax.lax`.
        dtypes: the dtypes that the library sends with it.
        run: runs the collective on a device's part, a vector.
        expected: returns the results of all devices, `(devices, ...)`, from all parts, `(devices, elements)`.
    """

    name: str
    dtypes: tuple[Any, ...]
    run: Callable[[jax.Array], jax.Array]
    expected: Callable[[np.ndarray], np.ndarray]


def _everywhere(whole: np.ndarray, devices: int) -> np.ndarray:
    return np.broadcast_to(whole, (devices, *whole.shape))


def _around(x: jax.Array) -> jax.Array:
    count = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(i, (i + 1) % count) for i in range(count)])


COLLECTIVES = (
    Collective(
        "all_gather",
        (jnp.float32, jnp.uint16, jnp.uint8),
        lambda x: lax.all_gather(x, _AXIS, tiled=True),
        lambda parts: _everywhere(parts.reshape(-1), len(parts)),
    ),
    Collective(
        "psum",
        (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32),
        lambda x: lax.psum(x, _AXIS),
        lambda parts: _everywhere(parts.sum(0), len(parts)),
    ),
    Collective(
        "pmax",
        (jnp.float32, jnp.bfloat16),
        lambda x: lax.pmax(x, _AXIS),
        lambda parts: _everywhere(parts.max(0), len(parts)),
    ),
    Collective(
        "psum_scatter",
        (jnp.float32, jnp.bfloat16),
        lambda x: lax.psum_scatter(x, _AXIS, tiled=True),
        lambda parts: parts.sum(0).reshape(len(parts), -1),
    ),
    Collective(
        "all_to_all",
        (jnp.float32, jnp.uint16, jnp.uint8),
        lambda x: lax.all_to_all(x, _AXIS, split_axis=0, concat_axis=0, tiled=True),
        lambda parts: parts.reshape(len(parts), len(parts), -1).swapaxes(0, 1).reshape(parts.shape),
    ),
    Collective("ppermute", (jnp.float32, jnp.bfloat16), _around, lambda parts: np.roll(parts, 1, axis=0)),
)


def check_collectives() -> Finding:
    """Runs every collective over all devices, in each of its dtypes, each in a separate program."""
    failures = dict(_failures())
    if not failures:
        return Finding("collectives", "ok", f"{', '.join(c.name for c in COLLECTIVES)}: results are correct")
    listed = "; ".join(f"{name}: {error}" for name, error in failures.items())
    return Finding("collectives", "broken", listed, "see the lines on versions; NCCL_DEBUG=INFO says more")


def _failures() -> Iterator[tuple[str, str]]:
    mesh = Mesh(np.array(jax.devices()), (_AXIS,))
    for collective in COLLECTIVES:
        for dtype in collective.dtypes:
            for size in _SIZES if mesh.devices.flat[0].platform == "gpu" else _SIZES[:1]:
                error = _error(collective, mesh, dtype, size)
                if error:
                    yield collective.name, f"{error} ({np.dtype(dtype).name}, {size} elements per device)"
                    break
            else:
                continue
            break


def _error(collective: Collective, mesh: Mesh, dtype: jax.typing.DTypeLike, size: int) -> str | None:
    """Returns what went wrong; `None` if nothing did."""
    count, spec = mesh.size, PartitionSpec(_AXIS)
    size = -(-size // count) * count
    # small integers, which every dtype adds exactly; neighboring devices have different ones
    parts = (np.arange(count * size) * 7 // 3 % 5).reshape(count, size) + np.arange(count)[:, None] % 2
    try:
        given = jax.device_put(parts.reshape(-1).astype(dtype), NamedSharding(mesh, spec))
        mapped = jax.shard_map(collective.run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        values = np.asarray(jax.jit(mapped)(given)).astype(np.int64)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return first_line(error)
    expected = collective.expected(parts).reshape(-1)
    wrong = int((values != expected).sum())
    return f"{wrong} of {expected.size} values are wrong" if wrong else None


def check_processes(gpus: int) -> Finding:
    """Starts a process for each GPU, or two on the CPU, and checks that they meet in `sync_global_devices`.

    Args:
        gpus: the number of GPUs; 0 for the CPU.
    """
    name, count = "processes", gpus or 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    runs, outputs = [], [tempfile.TemporaryFile("w+") for _ in range(count)]
    for rank, output in enumerate(outputs):
        own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = visible[rank] if len(visible) >= count else str(rank)
        else:
            own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        command = [sys.executable, "-c", _MEETING, address, str(count), str(rank)]
        runs.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | own))
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        for run in runs:
            run.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        remedy = "check whether a firewall blocks local ports; NCCL_DEBUG=INFO says more"
        return Finding(name, "broken", f"{count} processes did not meet within {_TIMEOUT_S} s", remedy)
    finally:
        for run in runs:
            run.kill()
            run.wait()
    for rank, (run, output) in enumerate(zip(runs, outputs, strict=True)):
        if run.returncode:
            output.seek(0)
            lines = [line for line in output.read().splitlines() if "Error" in line]
            line = lines[-1] if lines else f"exit status {run.returncode}"
            failure = f"process {rank} of {count} fails in sync_global_devices: {line.strip()}"
            return Finding(name, "broken", failure, "see the lines on versions; NCCL_DEBUG=INFO says more")
    return Finding(name, "ok", f"{count} processes meet in sync_global_devices")


_MEETING = """
import sys
import jax
address, count, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
jax.distributed.initialize(address, count, rank, initialization_timeout=60)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("gtp_jax doctor")
total = multihost_utils.process_allgather(rank).tolist()
assert total == list(range(count)), f"AssertionError: processes gathered {total}"
"""
