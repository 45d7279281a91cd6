"""How processes find each other."""

from __future__ import annotations

import argparse

import pytest
from messages import naming

from gtp_jax.runner.flags import add_flags, given
from gtp_jax.runner.trainer import Launch, LaunchOptions, find_launch


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
