"""The files of `examples/launch`: each fits the schema of the system that reads it, and its command and environment
start processes that train a step together."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import gtp_jax
from gtp_jax.runner.cli import main

from ..trainer.runs import logged, small, write_text

CHECKOUT = Path(__file__).parents[2]
FILES = CHECKOUT / "examples" / "launch"
HOSTS = 4


def read(name: str) -> Any:
    return yaml.safe_load((FILES / name).read_text())


def pod_of(jobset: Any) -> tuple[Any, Any]:
    """Returns the job of a JobSet, and its only container."""
    [job] = jobset["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    return job, container


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Machines:
    """Runs the command of a file once for each host, as a process with one CPU device."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "run"
        text = write_text(folder / "text")
        # later flags replace those of the file, except that texts are added
        self.flags = [*small(text, self.out, steps=2, dp=HOSTS, gtp=1, dtype="float32"), "--preset=tiny"]
        self.flags += ["--tokenizer=bytes", "--local-devices=1"]
        commands = folder / "bin"
        commands.mkdir()
        there, *others = self.flags
        here = f'"${{@/--data=\\/shared\\/text/{there}}}"'
        command = f"exec {shlex.quote(sys.executable)} -m gtp_jax {here} {shlex.join(others)}"
        self.command(commands / "gtp-jax", command)
        self.environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
        self.environment["PYTHONPATH"] = str(Path(gtp_jax.__file__).parents[1])

    def command(self, path: Path, script: str) -> None:
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(self, command: list[str], environments: list[dict[str, str]]) -> None:
        """Checks that all processes train the steps and end well."""
        first = shutil.which(command[0], path=self.environment["PATH"])
        assert first is not None, command
        runs = []
        for i, environment in enumerate(environments):
            output = (self.folder / f"{i}.txt").open("w")
            env = {**self.environment, **environment}
            runs.append(
                subprocess.Popen(
                    [first, *command[1:]], env=env, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT
                )
            )
        try:
            codes = [run.wait(400) for run in runs]
        finally:
            for run in runs:
                run.kill()
        assert codes == [0] * len(runs), (self.folder / "0.txt").read_text()[-3000:]
        assert logged(self.out, 2)


@pytest.fixture
def machines(tmp_path):
    return Machines(tmp_path)


def test_the_jobset_and_the_trainjob_fit_their_schemas():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    for name, model in {
        "jobset.yaml": models.JobsetV1alpha2JobSet,
        "trainjob.yaml": models.TrainerV1alpha1TrainJob,
    }.items():
        found = model.from_dict(read(name)).to_dict()
        assert _missing(read(name), found) == [], f"{name} has fields that the schema does not know"


def _missing(given: Any, known: Any, path: str = "") -> list[str]:
    """Returns the paths of what a schema has dropped."""
    if isinstance(given, dict):
        return [p for key in given for p in _missing(given[key], (known or {}).get(key), f"{path}.{key}")]
    if isinstance(given, list):
        pairs = zip(given, known or [None] * len(given), strict=True)
        return [p for i, (a, b) in enumerate(pairs) for p in _missing(a, b, f"{path}[{i}]")]
    return [] if given == known or str(given) == str(known) else [f"{path}: {given!r} became {known!r}"]


def test_pods_restart_after_what_may_pass_and_not_after_a_mistake():
    from gtp_jax.runner import _exit_codes as codes

    jobset = read("jobset.yaml")
    job, container = pod_of(jobset)
    [rule] = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["containerName"] == container["name"]
    assert set(rule["onExitCodes"]["values"]) == {codes.FAILED, codes.MISTAKE, codes.DIVERGED}
    sky = read("skypilot.yaml")["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert sky == [codes.RETRY]
    assert f'"$status" -eq {codes.RETRY}' in (FILES / "slurm.sbatch").read_text()


def test_the_task_fits_the_schema_of_skypilot():
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    import jsonschema

    jsonschema.validate(read("skypilot.yaml"), schemas.get_task_schema())


def test_the_image_installs_extras_that_exist_and_signals_reach_the_run():
    text = (FILES / "Dockerfile").read_text()
    extras = re.findall(r"\[([\w,]+)\]'", text)[0].split(",")
    known = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert json.loads(entry) == ["gtp-jax"]


def test_the_flags_of_every_file_are_known(capsys):
    commands = [
        pod_of(read("jobset.yaml"))[1]["args"],
        read("trainjob.yaml")["spec"]["trainer"]["args"],
        *(shlex.split(found) for found in _commands((FILES / "slurm.sbatch").read_text())),
        *(shlex.split(found) for found in _commands(read("skypilot.yaml")["run"])),
    ]
    assert len(commands) == 4
    for flags in commands:  # refused for a file that is not here, and not for a flag
        assert main(["train", *flags]) == 2
        assert "/shared/" in capsys.readouterr().err


def _commands(script: str) -> list[str]:
    return re.findall(r"gtp-jax train (.*)", script.replace("\\\n", " "))


@pytest.mark.slow
def test_the_pods_of_the_jobset_train_together(machines):
    jobset = read("jobset.yaml")
    job, container = pod_of(jobset)
    name, spec = jobset["metadata"]["name"], job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == HOSTS
    address = free_address()
    environments = []
    for pod in range(HOSTS):
        env = {}
        for one in container["env"]:
            if "value" not in one:
                path = one["valueFrom"]["fieldRef"]["fieldPath"]
                assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            env[one["name"]] = one.get("value", str(pod))
        host, port = env["JAX_COORDINATOR_ADDRESS"].split(":")
        assert host == f"{name}-{job['name']}-0-0.{name}"  # JobSet's name of the first pod of the first job
        assert int(port) in [each["containerPort"] for each in container["ports"]]
        environments.append({**env, "JAX_COORDINATOR_ADDRESS": address})
    machines.run([*container["command"], *container["args"]], environments)


@pytest.mark.slow
def test_the_nodes_of_the_trainjob_train_together(machines):
    trainer, address = read("trainjob.yaml")["spec"]["trainer"], free_address()
    assert trainer["numNodes"] == HOSTS
    environments = [
        {"JAX_NUM_PROCESSES": str(HOSTS), "JAX_PROCESS_ID": str(i), "JAX_COORDINATOR_ADDRESS": address}
        for i in range(HOSTS)
    ]
    machines.run([*trainer["command"], *trainer["args"]], environments)


@pytest.mark.slow
def test_the_tasks_of_the_batch_script_train_together_and_a_passing_failure_requeues_it(machines):
    script = FILES / "slurm.sbatch"
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    assert int(options["nodes"]) == HOSTS and options["ntasks-per-node"] == "1"
    address = free_address()
    port = int(address.rpartition(":")[2])
    # what `srun` does: one process for each task, with SLURM's variables
    tasks = f"""
        while [[ $1 == --* ]]; do shift; done
        export SLURM_STEP_NUM_TASKS={HOSTS} SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_TASKS_PER_NODE='1(x{HOSTS})'
        for i in $(seq 0 {HOSTS - 1}); do
            SLURM_PROCID=$i SLURM_NODEID=$i SLURM_LOCALID=0 "$@" --coordinator=127.0.0.1:{port} > $SLURM_JOB_ID.$i &
            pids="$pids $!"
        done
        for pid in $pids; do wait $pid || status=$?; done
        exit ${{FAIL_WITH:-$status}}"""
    machines.command(machines.folder / "bin" / "srun", tasks)
    requeued = machines.folder / "requeued"
    machines.command(machines.folder / "bin" / "scontrol", f'echo "$@" >> {requeued}')
    machines.run(["bash", str(script)], [{"SLURM_JOB_ID": "7"}])
    assert not requeued.exists()
    machines.command(machines.folder / "bin" / "srun", "exit 75")
    env = {**machines.environment, "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", str(script)], env=env).returncode == 75
    assert requeued.read_text() == "requeue 7\n"


@pytest.mark.slow
def test_the_nodes_of_the_task_train_together(machines):
    task = read("skypilot.yaml")
    assert task["num_nodes"] == HOSTS
    nodes = {"SKYPILOT_NUM_NODES": str(HOSTS), "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * HOSTS)}
    machines.run(["bash", "-ec", task["run"]], [{**nodes, "SKYPILOT_NODE_RANK": str(i)} for i in range(HOSTS)])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_workers_of_ray_train_together(machines):
    command = [sys.executable, str(FILES / "ray_job.py"), f"--hosts={HOSTS}", "--restarts=0"]
    machines.run([*command, f"--storage={machines.folder / 'ray'}", "--", *machines.flags], [{}])


_PROGRAM = """
import jax, jax.numpy as jnp, gtp_jax as gtp
jax.config.update("jax_num_cpu_devices", 2)
assert gtp.distributed() == 2
assert gtp.distributed() == 2  # the processes are connected already
with jax.set_mesh(gtp.make_mesh(gtp=4)):
    print(jax.process_index(), jax.device_count(), float(jax.jit(lambda: jnp.arange(4.0).sum())()))
"""


@pytest.mark.slow
def test_a_program_of_ones_own_finds_the_processes_that_torchrun_describes():
    host, _, port = free_address().rpartition(":")
    shared = dict(WORLD_SIZE="2", MASTER_ADDR=host, MASTER_PORT=port, LOCAL_WORLD_SIZE="2", JAX_PLATFORMS="cpu")
    shared["PYTHONPATH"] = str(Path(gtp_jax.__file__).parents[1])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, **shared, "RANK": str(i), "LOCAL_RANK": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    found = [run.communicate(timeout=200)[0].splitlines()[-1] for run in runs]
    assert found == ["0 4 6.0", "1 4 6.0"]
