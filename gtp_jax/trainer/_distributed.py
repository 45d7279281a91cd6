"""Several processes: how they find each other, and how they agree."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._flags import knob

# Environment variables with the number and the rank of processes, by launcher. SLURM's are those of a step: an
# allocation without `srun` runs one process, whatever it has room for.
_LAUNCHERS = {
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}

# The group of these flags in the help.
LAUNCH_GROUP = "several processes"

_JOIN_TIMEOUT_S = 120
# jax ends a process this long after its peer died, and says nothing about checkpoints. The watch is quicker.
_HEARTBEAT_TIMEOUT_S = 60


class NoCoordinator(ValueError):
    """The processes of a run do not find each other."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Attributes:
        processes: how many there are.
        process: number of this one.
        coordinator: address of process 0, `HOST:PORT`; `None` if jax finds it through the launcher.
        local_devices: virtual CPU devices of this process; `None` for an even share.
    """

    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    local_devices: int | None = None

    def join(self) -> None:
        """Connects the processes. To be called before jax is first used.

        Raises:
            NoCoordinator: if they do not find each other.
        """
        if self.processes == 1:
            return
        if (jax.config.jax_platforms or "").split(",")[0] == "cpu":  # pyright: ignore[reportAttributeAccessIssue]
            # With the persistent cache, 2 of 9 runs of several processes on CPU had gradients that were wrong by 2e-5
            # from their first step on (jax 0.11.2); without it, none did.
            jax.config.update("jax_enable_compilation_cache", False)
        explicit: dict[str, Any] = {}
        if self.coordinator is not None:
            explicit = dict(coordinator_address=self.coordinator, num_processes=self.processes, process_id=self.process)
        try:
            jax.distributed.initialize(
                **explicit,
                initialization_timeout=_JOIN_TIMEOUT_S,
                heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
            )
        except RuntimeError as error:
            raise NoCoordinator(
                f"process {self.process} of {self.processes} found no coordinator"
                f"{f' at {self.coordinator}' if self.coordinator else ''}: {error}. Start all processes with the "
                "same --coordinator, the address of process 0 and a free port."
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The command line's settings of several processes; `find_launch` checks them."""

    coordinator: str | None = knob(
        None, LAUNCH_GROUP, "address of process 0, with a free port", kind=str, metavar="HOST:PORT"
    )
    num_processes: int | None = knob(None, LAUNCH_GROUP, "how many there are", metavar="N")
    process_id: int | None = knob(None, LAUNCH_GROUP, "number of this one, from 0", least=0, metavar="I")
    local_devices: int | None = knob(None, LAUNCH_GROUP, "virtual CPU devices of this process", metavar="N")


def find_launch(options: LaunchOptions, environment: Mapping[str, str] = os.environ) -> Launch:
    """Returns the processes that options or a launcher describe.

    Raises:
        ValueError: if flags are missing or out of range.
    """
    local = options.local_devices
    if local is not None and local < 1:
        raise ValueError(f"--local-devices is {local}; it must be at least 1.")
    count, rank, address = options.num_processes, options.process_id, options.coordinator
    flags = {"--coordinator": address, "--num-processes": count, "--process-id": rank}
    missing = [flag for flag, value in flags.items() if value is None]
    if count is not None and rank is not None and address is not None:
        if not 0 <= rank < count:
            raise ValueError(f"--process-id is {rank}; with --num-processes {count} it is from 0 to {count - 1}.")
        if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
            raise ValueError(f"--coordinator is {address!r}; it must be HOST:PORT, 127.0.0.1:9000 for instance.")
        return Launch(count, rank, address, local)
    if len(missing) < len(flags):
        raise ValueError(f"{' and '.join(missing)} missing: several processes need all of {_FLAGS}.")
    for size, number in _LAUNCHERS.values():
        if int(environment.get(size, 1)) > 1:
            return Launch(int(environment[size]), int(environment[number]), None, local)
    return Launch(local_devices=local)


_FLAGS = "--coordinator, --num-processes and --process-id"


def barrier(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def together[T](check: Callable[[], T]) -> T:
    """Runs a check that may refuse in one process only, and lets all processes refuse if one does.

    Raises:
        ValueError: what `check` raised, or that another process raised something.
    """
    if jax.process_count() == 1:
        return check()
    refusal: Exception | None = None
    result: Any = None
    try:
        result = check()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        refusal = error
    refused = np.ravel(multihost_utils.process_allgather(np.int32(refusal is not None)))
    if refusal is not None:
        raise refusal
    if refused.any():
        raise ValueError(f"process {int(refused.argmax())} refused to start; its own output says why.")
    return result


def check_same(fingerprint: str, difference: str, remedy: str) -> None:
    """Checks that all processes have the same of something.

    Args:
        fingerprint: of it, hexadecimal digits.
        difference: what a process does that has another.
        remedy: what to do about it.

    Raises:
        ValueError: naming the processes that differ from process 0.
    """
    if jax.process_count() == 1:
        return
    mine = np.frombuffer(bytes.fromhex(fingerprint), np.uint8).astype(np.int32)
    every = np.asarray(multihost_utils.process_allgather(mine)).reshape(jax.process_count(), -1)
    others = np.flatnonzero((every != every[0]).any(axis=1)).tolist()
    if others:
        raise ValueError(f"processes {others} {difference} than process 0. {remedy}")
