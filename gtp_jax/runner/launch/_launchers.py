"""The launchers whose environment variables describe the processes of a run, in one table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

Environment = Mapping[str, str]

# What launchers that name no port use; Kubeflow's PyTorch and JAX runtimes have other ones, which they announce.
_PORT = 29400


@dataclasses.dataclass(frozen=True)
class Launcher:
    """How a launcher describes processes.

    Attributes:
        name: its name in messages.
        processes: the variable that holds the number of processes.
        process: the variable that holds the number of this process.
        address: returns `HOST:PORT` of process 0 from the environment; `None` if the environment does not say.
        on_host: returns the number of this process among those on its host, and how many these are; `None` if the
            environment does not say.
    """

    name: str
    processes: str
    process: str
    address: Callable[[Environment], str | None]
    on_host: Callable[[Environment], tuple[int, int] | None] = lambda environment: None


def _jax_address(environment: Environment) -> str | None:
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if address is None or re.search(r":\d+$", address):
        return address
    return f"{address}:{environment.get('JAX_COORDINATOR_PORT', _PORT)}"


def _torch_address(environment: Environment) -> str | None:
    """Returns the next port after `MASTER_PORT` under torchrun, whose own store listens there; otherwise that port."""
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return None
    return f"{host}:{int(port) + (environment.get('TORCHELASTIC_USE_AGENT_STORE') == 'True')}"


def _first_of_nodes(environment: Environment) -> str | None:
    nodes = environment.get("SKYPILOT_NODE_IPS", "").split()
    return f"{nodes[0]}:{_PORT}" if nodes else None


def _slurm_address(environment: Environment) -> str | None:
    """Returns the first host of a job step, such as `node007` of `node[007-009,12],other`, and a port that depends on
    the job's number."""
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))
    job = environment.get("SLURM_JOB_ID", "")
    return f"{found[1]}{found[2] or ''}:{_port_of(int(job))}" if found and job.isdecimal() else None


def _slurm_on_host(environment: Environment) -> tuple[int, int] | None:
    """Reads the tasks of each node, such as `8(x2),4`."""
    tasks: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks += [int(count)] * int(times or 1)
    local, node = (environment.get(name, "") for name in ("SLURM_LOCALID", "SLURM_NODEID"))
    if not local.isdecimal() or not node.isdecimal() or int(node) >= len(tasks):
        return None
    return int(local), tasks[int(node)]


def _open_mpi_address(environment: Environment) -> str | None:
    """Returns the host of `mpirun`, which Open MPI 4 passes to its processes, and a port that depends on the job's
    number."""
    found = re.match(r"(\d+)\.\d+;tcp://([^,:]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    return f"{found[2]}:{_port_of(int(found[1]) >> 12)}" if found else None


def _port_of(job: int) -> int:
    """Returns one of the last 4096 ports; 4096 consecutive jobs get different ones. JAX does the same."""
    return 65536 - 4096 + job % 4096


def _on_host_by(local: str, size: str) -> Callable[[Environment], tuple[int, int] | None]:
    def found(environment: Environment) -> tuple[int, int] | None:
        numbers = environment.get(local, ""), environment.get(size, "")
        return (int(numbers[0]), int(numbers[1])) if all(map(str.isdecimal, numbers)) else None

    return found


# The first that describes several processes is asked for the address. SLURM's variables are those of a job step,
# because an allocation without `srun` runs a single process, whatever its size.
LAUNCHERS = (
    Launcher("JAX", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", _jax_address),
    Launcher("torchrun", "WORLD_SIZE", "RANK", _torch_address, _on_host_by("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    Launcher("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", _first_of_nodes),
    Launcher("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", _slurm_address, _slurm_on_host),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        _open_mpi_address,
        _on_host_by("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
)


def processes_of(launcher: Launcher, environment: Environment) -> tuple[int, int] | None:
    """Returns the number of this process and of all processes; `None` unless a launcher has started several.

    Raises:
        ValueError: if only the number of processes is there, or a value is not a number in its range.
    """
    count, process = environment.get(launcher.processes), environment.get(launcher.process)
    if count is None or count == "1":
        return None
    if process is None:
        raise ValueError(
            f"{launcher.processes} is {count}, as {launcher.name} sets it, but {launcher.process} is not set. Set "
            f"both, or unset {launcher.processes}."
        )
    if not count.isdecimal() or not process.isdecimal() or not int(process) < int(count):
        raise ValueError(
            f"{launcher.process} is {process!r} and {launcher.processes} is {count!r}; they must be the number of this "
            "process, from 0, and the number of all. Set both, or unset both."
        )
    return int(process), int(count)


def launcher_of(environment: Environment) -> tuple[Launcher, int, int] | None:
    """Returns the launcher of this process, its number and the number of all; `None` if none has started several.

    Raises:
        ValueError: if launchers disagree about one of the numbers, or a variable has no number.
    """
    described = [(one, found) for one in LAUNCHERS if (found := processes_of(one, environment)) is not None]
    if not described:
        return None
    (first, numbers), *others = described
    for other, its in others:
        if its != numbers:
            raise ValueError(
                f"launchers disagree: {_said(first, numbers)}, but {_said(other, its)}. Unset the variables of the one "
                "that did not start these processes, or pass --coordinator, --num-processes and --process-id."
            )
    return first, *numbers


def _said(launcher: Launcher, numbers: tuple[int, int]) -> str:
    process, processes = numbers
    return (
        f"by {launcher.name} this is process {process} of {processes} ({launcher.process}={process}, "
        f"{launcher.processes}={processes})"
    )
