"""Connects the processes of a program of one's own."""

from __future__ import annotations

import re

from ._launch import LaunchOptions, find_launch


def distributed(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    join_timeout: float = 120.0,
) -> int:
    """Connects the processes of a program that was started once on every host, or once for every GPU.

    Call it first, in every process. Without arguments, reads what the launcher says: the variables of JAX
    (`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`; Kubeflow sets them), of torchrun, SkyPilot, SLURM
    or Open MPI. Does nothing if the program was started alone, or its processes are connected already, as Ray's
    `JaxTrainer` does. A process uses all GPUs that it sees; of several processes on one host that see the same GPUs,
    each uses the one of its number.

        gtp_jax.distributed()
        mesh = gtp_jax.make_mesh(dp=jax.process_count(), gtp=8)

    Args:
        coordinator: host and free port of process 0, `HOST:PORT`.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        join_timeout: the time within which all processes must come, in seconds. Pods may start minutes apart.

    Returns:
        The number of processes.

    Raises:
        ValueError: if an argument is missing or out of range, launchers disagree about the processes, the processes do
            not find each other in time, or JAX has been used before.
    """
    import jax

    if jax.distributed.is_initialized():
        return jax.process_count()
    options = LaunchOptions(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id, join_timeout=join_timeout
    )
    try:
        launch = find_launch(options)
    except ValueError as error:
        raise ValueError(re.sub(r"--([a-z-]+)", _argument, str(error))) from None
    launch.join(join_timeout)
    return launch.processes


def _argument(flag: re.Match[str]) -> str:
    return f"`{flag[1].replace('-', '_')}`"
