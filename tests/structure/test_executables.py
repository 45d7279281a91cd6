"""Tests share the executables of equal programs, and of no others."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

on_gpu = os.environ.get("GTP_TEST_PLATFORM") == "gpu"
pytestmark = pytest.mark.skipif(on_gpu, reason="executables are shared on CPUs alone")


def compiled(by, device=0, dtype="float32", name="sum", options=None):
    @jax.named_scope(name)
    def plus(x):
        return x + by

    x = jax.ShapeDtypeStruct((2,), dtype, sharding=SingleDeviceSharding(jax.devices()[device]))
    return jax.jit(plus, compiler_options=options).lower(x).compile()


def test_equal_programs_have_one_executable():
    assert compiled(2).runtime_executable() is compiled(2).runtime_executable()


@pytest.mark.parametrize(
    "change",
    [
        dict(by=3),
        dict(device=1),
        dict(dtype="int32"),
        dict(name="another"),
        dict(options={"xla_cpu_enable_fast_math": True}),
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_program_that_differs_has_its_own(change):
    first, other = compiled(2), compiled(**{"by": 2, **change})
    assert first.runtime_executable() is not other.runtime_executable()
    if "name" in change:
        assert "another" in other.as_text() and "another" not in first.as_text()


def test_programs_that_call_python_are_not_shared():
    def of(seen):
        return lambda x: jax.pure_callback(lambda x: seen.append(x) or x, x, x)

    first, second = [], []
    for seen in (first, second):
        jax.block_until_ready(jax.jit(of(seen))(np.float32(1)))
    assert first and second
