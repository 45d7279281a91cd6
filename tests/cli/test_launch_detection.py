"""How processes find each other."""

from __future__ import annotations

import argparse

import pytest
from messages import naming

from gtp_jax.runner.flags import add_flags, given
from gtp_jax.runner.launch import Launch, LaunchOptions, distributed, find_launch


def launch(*flags: str, **environment: str) -> Launch:
    parser = argparse.ArgumentParser()
    add_flags(parser, LaunchOptions)
    return find_launch(LaunchOptions(**given(parser.parse_args(flags), LaunchOptions)), environment)


def slurm(hosts: str) -> dict[str, str]:
    return dict(SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="3", SLURM_STEP_NODELIST=hosts, SLURM_JOB_ID="8195")


def open_mpi(**more: str) -> dict[str, str]:
    return dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1", **more)


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], {}, Launch()),
        (["--local-devices=4"], {}, Launch(local_devices=4)),
        (["--join-timeout=900"], slurm("n1"), Launch(16, 3, "n1:61443", join_timeout_s=900)),
        ([], slurm("n[007-009,12],other"), Launch(16, 3, "n007:61443")),
        ([], slurm("gpu-1,gpu-2"), Launch(16, 3, "gpu-1:61443")),
        ([], open_mpi(OMPI_MCA_orte_hnp_uri="12288.0;tcp://10.0.0.1,10.1.0.1:34911"), Launch(2, 1, "10.0.0.1:61443")),
        (["--coordinator=h:9"], open_mpi(), Launch(2, 1, "h:9")),
        (["--coordinator=h:9"], slurm("n1"), Launch(16, 3, "h:9")),
        ([], dict(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"), Launch()),
        ([], dict(SLURM_NTASKS="16", SLURM_PROCID="0"), Launch()),  # an allocation, but no srun
        (["--coordinator=[::1]:9", "--num-processes=2", "--process-id=1"], {}, Launch(2, 1, "[::1]:9")),
        (["--coordinator=h:9", "--num-processes=4", "--process-id=0"], slurm("n1"), Launch(4, 0, "h:9")),
    ],
)
def test_processes_are_found(flags, environment, expected):
    assert launch(*flags, **environment) == expected


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        ([], open_mpi(), "MPI process 0 --coordinator HOST:PORT"),
        ([], {**slurm("n1"), "SLURM_JOB_ID": "²"}, "SLURM process 0 --coordinator HOST:PORT"),
        (["--coordinator=h:²", "--num-processes=2", "--process-id=1"], {}, "--coordinator 'h:²' HOST:PORT"),
    ],
)
def test_an_address_that_is_not_said_or_no_address_is_refused(flags, environment, message):
    with pytest.raises(ValueError, match=naming(message)):
        launch(*flags, **environment)


def torchrun(**more: str) -> dict[str, str]:
    found = dict(RANK="3", WORLD_SIZE="16", LOCAL_RANK="3", LOCAL_WORLD_SIZE="8", MASTER_ADDR="a", MASTER_PORT="29500")
    return {**found, **more}


KUBEFLOW = dict(JAX_NUM_PROCESSES="16", JAX_PROCESS_ID="3", JAX_COORDINATOR_ADDRESS="job-node-0-0.job:6666")
SKY = dict(SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (KUBEFLOW, Launch(16, 3, "job-node-0-0.job:6666")),
        ({**KUBEFLOW, "JAX_COORDINATOR_ADDRESS": "h", "JAX_COORDINATOR_PORT": "7"}, Launch(16, 3, "h:7")),
        ({**KUBEFLOW, **slurm("n1")}, Launch(16, 3, "job-node-0-0.job:6666")),  # they agree
        (SKY, Launch(2, 1, "10.0.0.4:29400")),
        (torchrun(), Launch(16, 3, "a:29500", device=3)),
        (torchrun(TORCHELASTIC_USE_AGENT_STORE="True"), Launch(16, 3, "a:29501", device=3)),
        (torchrun(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0"), Launch(16, 3, "a:29500")),
        (torchrun(CUDA_VISIBLE_DEVICES="5"), Launch(16, 3, "a:29500")),
        (torchrun(CUDA_VISIBLE_DEVICES="4,5,6,7"), Launch(16, 3, "a:29500", device=3)),
        (torchrun(WORLD_SIZE="1", RANK="0"), Launch()),
        (
            {**slurm("n1"), "SLURM_STEP_TASKS_PER_NODE": "2(x7),1(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "1"},
            Launch(16, 3, "n1:61443", device=1),
        ),
        (
            {**slurm("n1"), "SLURM_STEP_TASKS_PER_NODE": "1(x16)", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            Launch(16, 3, "n1:61443"),
        ),
    ],
)
def test_a_launcher_says_who_a_process_is_and_which_gpu_of_a_shared_host_it_uses(environment, expected):
    assert launch(**environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {**KUBEFLOW, **torchrun(RANK="4")},
            "JAX process 3 16 JAX_PROCESS_ID=3 torchrun process 4 RANK=4 Unset --num-processes",
        ),
        ({**slurm("n1"), **SKY}, "SkyPilot process 1 2 SKYPILOT_NUM_NODES=2 SLURM process 3 16"),
        (dict(WORLD_SIZE="16"), "WORLD_SIZE 16 torchrun RANK"),
        (torchrun(RANK="16"), "RANK '16' WORLD_SIZE"),
        (dict(JAX_NUM_PROCESSES="two", JAX_PROCESS_ID="0"), "JAX_NUM_PROCESSES 'two'"),
        (dict(JAX_NUM_PROCESSES="2", JAX_PROCESS_ID="0"), "JAX process 0 --coordinator HOST:PORT"),
    ],
)
def test_launchers_that_disagree_or_say_too_little_are_refused_by_name(environment, message):
    with pytest.raises(ValueError, match=naming(message)):
        launch(**environment)


def test_flags_replace_what_launchers_say():
    flags = ("--coordinator=h:9", "--num-processes=4", "--process-id=0")
    assert launch(*flags, **KUBEFLOW, **torchrun(RANK="4")) == Launch(4, 0, "h:9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_processes=2), "`coordinator` `process_id` missing `num_processes`"),
        (dict(coordinator="h:9", num_processes=2, process_id=2), "`process_id` 2 `num_processes` 0 to 1"),
        (dict(join_timeout=0), "`join_timeout` 0"),
    ],
)
def test_a_program_of_ones_own_is_told_of_its_arguments(arguments, message):
    with pytest.raises(ValueError, match=naming(message)):
        distributed(**arguments)
