"""XLA's all-reduce kernels are avoided where the NCCL is too old for them, and nowhere else."""

from __future__ import annotations

import importlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gtp_jax import hlo, mesh
from gtp_jax.runner.cli import _doctor_report, main
from gtp_jax.train import COLLECTIVE_KERNELS, Nccl, _nccl, compile_options

OLD = Nccl("2.28.9", False)
NEW = Nccl("2.29.2", True)
ALIAS = "xla_gpu_unsupported_use_all_reduce_one_shot_kernel"

NCCL_SOURCE = """
int ncclGetVersion(int* version) { *version = %d; return 0; }
%s
"""


@pytest.fixture
def versions(monkeypatch):
    """Sets the NCCL and the jaxlib that the library sees."""

    def see(nccl, jaxlib):
        monkeypatch.setattr(_nccl, "find_nccl", lambda: nccl)
        monkeypatch.setattr(_nccl, "_jaxlib", lambda: jaxlib)

    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return see


@pytest.mark.parametrize(
    "nccl, jaxlib, avoided",
    [(OLD, (0, 12), True), (OLD, (0, 11), False), (NEW, (0, 12), False), (NEW, (0, 11), False), (None, (0, 12), False)],
)
def test_the_option_is_set_for_an_old_nccl_with_a_new_jaxlib_only(nccl, jaxlib, avoided, versions):
    versions(nccl, jaxlib)
    assert (compile_options("gpu").get(COLLECTIVE_KERNELS) == "") is avoided
    assert COLLECTIVE_KERNELS not in compile_options("cpu")


def kernels_in(options):
    """Whether an all-reduce compiled for two H200s uses a kernel of XLA's."""
    mesh = Mesh(np.array(hlo.topology_devices(hlo.parse_target("h200:2"))), ("x",))
    shape = jax.ShapeDtypeStruct((4096,), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
    )
    return "KERNEL_STRATEGY_TRITON" in jax.jit(total, compiler_options=options).lower(shape).compile().as_text()


@pytest.mark.skipif(bool(hlo.missing_packages()), reason="needs gtp_jax[target]")
def test_the_option_takes_xlas_kernels_out_of_the_program(versions):
    versions(OLD, (0, 12))
    assert kernels_in({})
    assert kernels_in({ALIAS: False})  # accepted, and without effect: this is why the library uses the newer name
    assert not kernels_in({COLLECTIVE_KERNELS: compile_options("gpu")[COLLECTIVE_KERNELS]})


@pytest.mark.parametrize("named", [f"--{COLLECTIVE_KERNELS}=ALL_REDUCE", f"--{ALIAS}=false"])
def test_what_the_users_flags_say_of_collective_kernels_stays(named, versions, monkeypatch):
    versions(OLD, (0, 12))
    monkeypatch.setenv("XLA_FLAGS", named)
    assert COLLECTIVE_KERNELS not in compile_options("gpu")
    assert not _nccl.all_reduce_with_nccl()
    assert _nccl.os.environ["XLA_FLAGS"] == named


def test_the_command_line_sets_the_flag_before_the_backend_starts_beside_the_users_own(versions, monkeypatch, capsys):
    versions(OLD, (0, 12))
    monkeypatch.setattr(mesh, "has_gpu", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    flags = []
    monkeypatch.setattr(_doctor_report, "run", lambda args: flags.append(_nccl.os.environ["XLA_FLAGS"]) or 0)
    assert main(["doctor"]) == 0
    assert flags == [f"--xla_dump_to= --{COLLECTIVE_KERNELS}="]
    assert _nccl.flags_in_environment() == {"xla_dump_to": "", COLLECTIVE_KERNELS: ""}
    assert not _nccl.all_reduce_with_nccl()  # once is enough
    versions(NEW, (0, 12))
    monkeypatch.setenv("XLA_FLAGS", "")
    assert not _nccl.all_reduce_with_nccl() and _nccl.os.environ["XLA_FLAGS"] == ""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    "number, function, expected",
    [
        (22809, "", Nccl("2.28.9", False)),
        (22902, "int ncclGetPeerDevicePointer(void) { return 0; }", Nccl("2.29.2", True)),
    ],
)
def test_nccl_is_that_of_the_package_and_known_by_what_it_exports(number, function, expected, tmp_path, monkeypatch):
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (tmp_path / "nccl.c").write_text(NCCL_SOURCE % (number, function))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnccl.so.2", tmp_path / "nccl.c"], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert _nccl.find_nccl.__wrapped__() == expected
