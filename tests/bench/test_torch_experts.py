"""FSDP2's mixture of experts computes what it says: `GTP_TEST_TORCH_PYTHON` names a Python that has PyTorch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("GTP_TEST_TORCH_PYTHON", sys.executable)
SCRIPT = Path(__file__).with_name("experts_in_torch.py")


@pytest.fixture(scope="module", autouse=True)
def torch():
    if subprocess.run([PYTHON, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("this Python has no PyTorch; name one that has in GTP_TEST_TORCH_PYTHON")


def check(processes: int, *words: str, gpu: bool = False) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})}
    command = [PYTHON, *(launch if processes > 1 else []), str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_layer_equals_every_token_through_every_expert():
    check(1, "layer")


@pytest.mark.parametrize("gtp, ep", [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_two_processes_equal_one(gtp, ep):
    check(2, "ranks", str(gtp), str(ep))


@pytest.mark.slow
def test_four_processes_that_divide_experts_and_shard_them_equal_one():
    check(4, "ranks", "2", "2")


@pytest.mark.gpu
def test_a_gpus_grouped_matmuls_equal_every_token_through_every_expert():
    check(1, "gpu", gpu=True)
