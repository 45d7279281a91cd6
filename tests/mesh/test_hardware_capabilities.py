"""What GPUs can do follows from their compute capability, also of those that are not there."""

from __future__ import annotations

import jax
import pytest
from messages import naming

from gtp_jax.mesh import platform, runs_kernels, supports_block_scaled_matmul, supports_fp8_matmul


def mesh_of(kind: str, platform: str = "gpu"):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.parametrize(
    ("kind", "kernels", "fp8", "blocks"),
    [
        ("Tesla V100-SXM2-16GB", False, False, False),
        ("NVIDIA A100-SXM4-80GB", True, False, False),
        ("NVIDIA L40S", True, True, False),
        ("NVIDIA H200", True, True, False),
        ("NVIDIA GB200", True, True, True),
        ("NVIDIA B300", True, True, True),
    ],
)
def test_a_gpu_that_is_not_there_has_the_capability_of_its_name(kind, kernels, fp8, blocks):
    with mesh_of(kind):
        assert platform() == "gpu"
        assert (runs_kernels(), supports_fp8_matmul(), supports_block_scaled_matmul()) == (kernels, fp8, blocks)


def test_a_name_that_says_nothing_is_refused_rather_than_taken_for_the_newest():
    with mesh_of("NVIDIA Z9"), pytest.raises(ValueError, match=naming("'NVIDIA Z9' capability")):
        supports_fp8_matmul()


def test_cpus_have_no_capability_and_run_the_kernels_for_cpus():
    with mesh_of("cpu", "cpu"):
        assert (runs_kernels(), supports_fp8_matmul(), supports_block_scaled_matmul()) == (True, False, False)


@pytest.mark.gpu
def test_a_gpu_that_is_here_says_its_own_capability():
    major, minor = map(int, jax.devices()[0].compute_capability.split("."))
    assert supports_fp8_matmul() == ((major, minor) >= (8, 9))
    assert supports_block_scaled_matmul() == (major == 10)
