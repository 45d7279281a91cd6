"""Finds out which processes make up a run, and connects them."""

from __future__ import annotations

import dataclasses
import os
import re

from .._exit_codes import RETRY
from ..flags import knob
from ._launchers import Environment, Launcher, launcher_of

# The name of the group of these flags in the help.
LAUNCH_GROUP = "several processes"

# By default, all processes must come within this many seconds. JAX then has this long to connect them.
_JOIN_S = 120.0
# JAX ends a process this many seconds after a peer fell silent, and says nothing about checkpoints. The trainer's watch
# acts sooner and, unlike JAX, tolerates processes that were suspended and wall clocks that are set: JAX ends all
# processes if that of process 0 is set ahead by more than this.
_HEARTBEAT_TIMEOUT_S = 900
_WATCHED_HEARTBEAT_TIMEOUT_S = 7 * 24 * 3600

# The processes that this one has joined.
_joined: Launch | None = None


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
        device: the number of the only GPU of its host that this process uses; `None` for all that it sees.
    """

    processes: int = 1
    process: int = 0
    coordinator: str | None = None
    local_devices: int | None = None
    join_timeout_s: float = _JOIN_S
    device: int | None = None

    def join(self, timeout_s: float = _JOIN_S, *, watched: bool = False) -> None:
        """Connects the processes, unless the program has done so. Must be called before JAX's backend is first used.

        Args:
            timeout_s: the time that JAX has to connect them, in seconds.
            watched: whether the caller notices by itself that a process is gone.

        Raises:
            NoCoordinator: if the processes do not find each other.
            ValueError: if JAX's backend has been used.
        """
        if self.processes == 1:
            return
        import jax

        if jax.distributed.is_initialized():
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
                local_device_ids=self.device,
                cluster_detection_method="deactivate",  # `find_launch` has looked; in pods, JAX would ask Kubernetes
                initialization_timeout=max(1, round(timeout_s)),
                heartbeat_timeout_seconds=_WATCHED_HEARTBEAT_TIMEOUT_S if watched else _HEARTBEAT_TIMEOUT_S,
            )
        except RuntimeError as error:
            if "must be called before" in str(error):
                raise ValueError(
                    "JAX was used before the processes were connected. Connect them first, before anything makes an "
                    "array or asks for devices."
                ) from error
            raise NoCoordinator(
                f"process {self.process} of {self.processes} did not join the others at {self.coordinator}: {error}"
            ) from error
        global _joined
        _joined = self


def host_of_first() -> str | None:
    """Returns the host of process 0, as the processes of this program were told when they joined; `None` if JAX was
    connected in another way."""
    return None if _joined is None else str(_joined.coordinator).rpartition(":")[0]


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


def find_launch(options: LaunchOptions, environment: Environment = os.environ) -> Launch:
    """Returns the processes that the options or, without them, a launcher's environment variables describe.

    Raises:
        ValueError: if options are missing or out of range, or launchers disagree about the processes.
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
    if count is None and rank is None and (found := launcher_of(environment)) is not None:
        launcher, process, processes = found
        address = address or launcher.address(environment)
        if address is None:
            raise ValueError(
                f"{launcher.name} does not say where process 0 runs. Add --coordinator HOST:PORT with the address of "
                "its host and a free port."
            )
        return Launch(processes, process, address, local, join_s, _device_of(launcher, environment))
    flags = {"--coordinator": address, "--num-processes": count, "--process-id": rank}
    missing = [flag for flag, value in flags.items() if value is None]
    if count is not None and rank is not None and address is not None:
        if not 0 <= rank < count:
            raise ValueError(f"--process-id is {rank}; with --num-processes {count}, it must be from 0 to {count - 1}.")
        return Launch(count, rank, address, local, join_s)
    if len(missing) < len(flags):
        raise ValueError(f"{' and '.join(missing)} missing: a run of several processes needs all of {_FLAGS}.")
    return Launch(local_devices=local, join_timeout_s=join_s)


def _device_of(launcher: Launcher, environment: Environment) -> int | None:
    """Returns the GPU of a process that shares its host, and the sight of the host's GPUs, with others."""
    local, on_host = launcher.on_host(environment) or (0, 1)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    sees_several = visible is None or "," in visible
    return local if on_host > 1 and sees_several else None


_FLAGS = "--coordinator, --num-processes and --process-id"
