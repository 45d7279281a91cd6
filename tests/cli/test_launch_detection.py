"""How processes find each other."""

from __future__ import annotations

import argparse

import pytest

from gtp_jax._flags import add_flags, given
from gtp_jax.trainer import Launch, LaunchOptions, find_launch


def launch(*flags: str, **environment: str) -> Launch:
    parser = argparse.ArgumentParser()
    add_flags(parser, LaunchOptions)
    return find_launch(LaunchOptions(**given(parser.parse_args(flags), LaunchOptions)), environment)


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ([], {}, Launch()),
        (["--local-devices=4"], {}, Launch(local_devices=4)),
        ([], dict(SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="3"), Launch(16, 3)),
        ([], dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1"), Launch(2, 1)),
        ([], dict(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"), Launch()),
        ([], dict(SLURM_NTASKS="16", SLURM_PROCID="0"), Launch()),  # an allocation, but no srun
        (["--coordinator=[::1]:9", "--num-processes=2", "--process-id=1"], {}, Launch(2, 1, "[::1]:9")),
    ],
)
def test_processes_are_found(flags, environment, expected):
    assert launch(*flags, **environment) == expected


def test_flags_win_over_the_launcher():
    flags = ("--coordinator=h:9", "--num-processes=4", "--process-id=0")
    assert launch(*flags, SLURM_STEP_NUM_TASKS="16", SLURM_PROCID="3") == Launch(4, 0, "h:9")
