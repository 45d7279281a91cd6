"""Annotations of shapes are checked in tests, and cost nothing elsewhere."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from gtp_jax.collectives import gather_sequence
from gtp_jax.ops import linear, rms_norm, to_weight
from gtp_jax.weights import key_for

WRONG = {
    "sizes that differ": lambda: to_weight(jnp.ones((3, 4)), jnp.ones((5, 6)), jnp.dtype("float32")),
    "a dimension too many": lambda: linear(jnp.ones((3, 4)), jnp.ones((2, 5, 4))),
    "inside a trace": lambda: jax.eval_shape(rms_norm, jnp.ones((3, 4)), jnp.ones(5)),
    "integers": lambda: gather_sequence(jnp.ones((2, 3, 4), jnp.int32), None, sequence_parallel=True),
    "a key of one word": lambda: key_for(jnp.zeros(1, jnp.uint32), ()),
}


on_cpus = pytest.mark.skipif(os.environ.get("GTP_TEST_PLATFORM") == "gpu", reason="shapes are checked on CPUs alone")


@on_cpus
@pytest.mark.parametrize("name", WRONG)
def test_a_shape_that_the_signature_forbids_fails(name):
    with pytest.raises(jaxtyping.TypeCheckError):
        WRONG[name]()


@pytest.mark.full
def test_users_calls_are_not_checked():
    script = (
        "import sys, gtp_jax.ops as o; assert not hasattr(o.linear, '__wrapped__') and 'beartype' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
