"""Bytes a device of a compiled step, part by part."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming

from gtp_jax import hlo

from .programs import array, cpu_mesh

SIZE = 1024


@functools.cache
def step_and_state():
    """A donated step of SGD with momentum on one weight sharded eight ways, the batch likewise."""
    mesh = cpu_mesh(gtp=8)
    w = array(mesh, (SIZE, SIZE), P(None, "gtp"), jnp.float32)
    x = array(mesh, (64, SIZE), P("gtp"), jnp.float32)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(w.sharding, w.sharding))
    def step(w, m, x):
        g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        m = 0.9 * m + g
        return w - m, m

    return step.lower(w, w, x).compile(), w, x


def test_parts_are_those_of_the_state_and_add_up_to_the_peak():
    compiled, w, x = step_and_state()
    found = hlo.memory(compiled, params={"w": w}, opt_state=(w,))
    stats: Any = compiled.memory_analysis()
    assert found.weights_bytes == found.optimizer_bytes == SIZE * SIZE * 4 // 8
    assert found.other_bytes == 64 * SIZE * 4 // 8
    assert found.output_bytes < 1024  # both results reuse the donated arguments
    assert found.gradients_bytes + found.activations_bytes == stats.temp_size_in_bytes
    whole = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert found.peak_bytes == whole - stats.alias_size_in_bytes


def test_frozen_weights_have_a_part_of_their_own():
    compiled, w, x = step_and_state()
    without = hlo.memory(compiled, params=(), opt_state=(w,))
    found = hlo.memory(compiled, params=(), opt_state=(w,), frozen={"w": w})
    assert (found.weights_bytes, found.frozen_bytes) == (0, SIZE * SIZE * 4 // 8)
    assert found.other_bytes == hlo.bytes_per_device(x) == without.other_bytes - found.frozen_bytes
    assert found.peak_bytes == without.peak_bytes
    assert "\nfrozen" in found.table() and "\nfrozen" not in without.table()


def test_a_state_on_the_host_has_a_part_of_its_own_that_the_peak_does_not_count():
    mesh = cpu_mesh(gtp=8)
    near = array(mesh, (64, SIZE), P("gtp"), jnp.float32)
    away = jax.ShapeDtypeStruct(near.shape, near.dtype, sharding=near.sharding.with_memory_kind("pinned_host"))
    compiled = jax.jit(lambda p, m: (p + jax.device_put(m, jax.memory.Space.Device), m)).lower(near, away).compile()
    found = hlo.memory(compiled, params=near, opt_state=away)
    size = 64 * SIZE * 4 // 8
    assert (found.weights_bytes, found.optimizer_bytes, found.host_bytes, found.other_bytes) == (size, 0, size, 0)
    assert found.peak_bytes == sum(vars(found).values()) - size
    assert "\non its host" in found.table() and hlo.bytes_on_host((near, away)) == size


def test_bytes_of_a_leaf_are_those_of_its_shard():
    mesh = cpu_mesh(dp=2, gtp=4)
    tree = {"cut": array(mesh, (16, 8), P("gtp"), jnp.bfloat16), "whole": array(mesh, (5,), P(), jnp.float32)}
    assert hlo.bytes_per_device(tree) == 2 * 16 * 8 // 4 + 20
    assert hlo.bytes_per_device(jax.ShapeDtypeStruct((3,), jnp.int32)) == 12
    assert hlo.bytes_per_device(jnp.ones((2, 2))) == 16


def test_state_of_another_step_is_refused():
    compiled, w, _ = step_and_state()
    with pytest.raises(ValueError, match=naming("`params` `opt_state` `frozen` Pass state")):
        hlo.memory(compiled, params=[w] * 20)
