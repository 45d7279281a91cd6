"""Finds out which processes make up a run, and connects them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

import jax

from .._exit_codes import RETRY
from ..flags import knob


def _slurm_address(environment: Mapping[str, str]) -> str | None:
    """Returns the first host of a job step, such as `node007` of `node[007-009,12],other`, and a port that depends on
    the job's number; `None` if the environment does not name them."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))
    job = environment.get("SLURM_JOB_ID", "")
    return f"{found[1]}{found[2] or ''}:{_port_of(int(job))}" if found and job.isdecimal() else None


def _open_mpi_address(environment: Mapping[str, str]) -> str | None:
    """Returns the host of `mpirun`, which Open MPI 4 passes to its processes, and a port that depends on the job's
    number; `None` if the environment does not name them."""
    found = re.match(r"(\d+)\.\d+;tcp://([^,:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    return f"{found[2]}:{_port_of(int(found[1]) >> 12)}" if found else None


def _port_of(job: int) -> int:
    """Returns one of the last 4096 ports; 4096 consecutive jobs get different ones. JAX does the same."""
    return 65536 - 4096 + job % 4096


# For each launcher, the environment variables that hold the number of processes and the rank of this one, and the
# function that returns the address of process 0. SLURM's variables are those of a job step, because an allocation
# without `srun` runs a single process, whatever its size.
_LAUNCHERS = {
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", _slurm_address),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", _open_mpi_address),
}

# The name of the group of these flags in the help.
LAUNCH_GROUP = "several processes"

# By default, all processes must come within this many seconds. JAX then has this long to connect them.
_JOIN_S = 120.0
# JAX ends a process this many seconds after a peer fell silent, and says nothing about checkpoints. The watch acts
# sooner and, unlike JAX, tolerates processes that were suspended.
_HEARTBEAT_TIMEOUT_S = 900


class NoCoordinator(ValueError):
    """Raised if the processes of a run do not find each other or lose contact. Starting them again may help.

    Attributes:
        exit_code: the exit code of a process that this error ends.
    """

    exit_code: int = RETRY


@dataclasses.dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Attributes:
        processes: the number of processes.
        process: the index of this process.
        coordinator: the address of process 0, `HOST:PORT`; `None` for a single process.
        local_devices: the number of virtual CPU devices of this process; `None` for an equal part of all.
        join_timeout_s: the time within which all processes must have come, in seconds.
    """

    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    local_devices: int | None = None
    join_timeout_s: float = _JOIN_S

    def join(self) -> None:
        """Connects the processes. Must be called before JAX's backend is first used.

        Raises:
            NoCoordinator: if the processes do not find each other.
        """
        if self.processes == 1:
            return
        # Its SIGTERM handler would take the signal away from this program in all phases except the loop.
        jax.config.update("jax_enable_preemption_service", False)
        if (jax.config.jax_platforms or "").split(",")[0] == "cpu":  # pyright: ignore[reportAttributeAccessIssue]
            # On CPUs, cached programs computed other results than freshly compiled ones; see docs/troubleshooting.md.
            jax.config.update("jax_enable_compilation_cache", False)
        try:
            jax.distributed.initialize(
                coordinator_address=self.coordinator,
                num_processes=self.processes,
                process_id=self.process,
                initialization_timeout=round(_JOIN_S),
                heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
            )
        except RuntimeError as error:
            raise NoCoordinator(
                f"process {self.process} of {self.processes} did not join the others at {self.coordinator}: {error}"
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The command-line options for several processes; `find_launch` checks them."""

    coordinator: str | None = knob(None, LAUNCH_GROUP, "host and free port of process 0", kind=str, metavar="HOST:PORT")
    num_processes: int | None = knob(None, LAUNCH_GROUP, "number of processes", metavar="N")
    process_id: int | None = knob(None, LAUNCH_GROUP, "number of this process, from 0", least=0, metavar="I")
    local_devices: int | None = knob(None, LAUNCH_GROUP, "number of virtual CPU devices of this process", metavar="N")
    join_timeout: float = knob(
        _JOIN_S, LAUNCH_GROUP, "seconds within which all processes must join", kind=float, above=0, metavar="S"
    )


def find_launch(options: LaunchOptions, environment: Mapping[str, str] = os.environ) -> Launch:
    """Returns the processes that the options or a launcher's environment variables describe.

    Raises:
        ValueError: if options are missing or out of range.
    """
    local, join_s = options.local_devices, options.join_timeout
    for flag, number in {"--local-devices": local, "--num-processes": options.num_processes}.items():
        if number is not None and number < 1:
            raise ValueError(f"{flag} is {number}; it must be at least 1.")
    if not 0 < join_s < float("inf"):
        raise ValueError(f"--join-timeout is {join_s:g}; it must be a number of seconds above 0.")
    count, rank, address = options.num_processes, options.process_id, options.coordinator
    if address is not None and not re.fullmatch(r".+:[0-9]+", address):
        raise ValueError(f"--coordinator is {address!r}; it must be HOST:PORT, such as 127.0.0.1:9000.")
    if count is None and rank is None:
        for name, (size, number, find_address) in _LAUNCHERS.items():
            if int(environment.get(size, 1)) > 1:
                address = address or find_address(environment)
                if address is None:
                    raise ValueError(
                        f"{name} does not say where process 0 runs. Add --coordinator HOST:PORT with the address of "
                        "its host and a free port."
                    )
                return Launch(int(environment[size]), int(environment[number]), address, local, join_s)
    flags = {"--coordinator": address, "--num-processes": count, "--process-id": rank}
    missing = [flag for flag, value in flags.items() if value is None]
    if count is not None and rank is not None and address is not None:
        if not 0 <= rank < count:
            raise ValueError(f"--process-id is {rank}; with --num-processes {count}, it must be from 0 to {count - 1}.")
        return Launch(count, rank, address, local, join_s)
    if len(missing) < len(flags):
        raise ValueError(f"{' and '.join(missing)} missing: a run of several processes needs all of {_FLAGS}.")
    return Launch(local_devices=local, join_timeout_s=join_s)


_FLAGS = "--coordinator, --num-processes and --process-id"
