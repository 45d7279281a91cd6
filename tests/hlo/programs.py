"""Small programs to compile: a stack of layers whose weights are gathered over `gtp`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gtp_jax import hlo, native

MISSING = hlo.missing_packages()
needs_target = pytest.mark.skipif(bool(MISSING), reason=f"compiling for a GPU needs {', '.join(MISSING)}")


def cpu_mesh(**axes: int) -> Mesh:
    """A mesh of the CPU devices."""
    count = int(np.prod(list(axes.values())))
    return Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


def h200_mesh(devices: int = 8) -> Mesh:
    """A mesh of H200s that are not there."""
    return Mesh(np.array(hlo.topology_devices(hlo.parse_target(f"h200:{devices}"))), ("gtp",))


def grouped_kernels(text: str) -> int:
    """Counts grouped matmuls in a program for H200s: CUDA kernels where they were built, else Pallas's."""
    own = text.count('custom_call_target="gtp_grouped_')
    others = text.count('custom_call_target="__gpu$xla.gpu.triton"')
    assert not (own and others) and bool(own) == native.has("gtp_grouped_product", "CUDA")
    return own + others


def array(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Shape of a sharded array."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def gather(w: jax.Array) -> jax.Array:
    """All-gather of the first dimension as 16-bit integers, which no backend widens."""
    bits = lax.bitcast_convert_type(w, jnp.uint16)
    return lax.bitcast_convert_type(lax.all_gather(bits, "gtp", axis=0, tiled=True), w.dtype)


@jax.custom_vjp
def gathered(w: jax.Array) -> jax.Array:
    """`gather` with a reduce-scatter as its transpose."""
    return gather(w)


def _scatter(_: None, g: jax.Array) -> tuple[jax.Array]:
    return (lax.psum_scatter(g, "gtp", scatter_dimension=0, tiled=True),)


gathered.defvjp(lambda w: (gather(w), None), _scatter)


def stack(
    mesh: Mesh, *, layers: int, size: int, rows: int, how: Literal["scan", "unrolled"], grad: bool = False
) -> Any:
    """A lowered stack of `layers` square matmuls with `rows` rows on each device."""

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        if how == "scan":
            return lax.scan(lambda h, s: (jnp.tanh(h @ gathered(s)), None), x, w)[0]
        for i in range(layers):
            x = jnp.tanh(x @ gathered(w[i]))
        return x

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(forward(x, w).astype(jnp.float32))

    where = (P("gtp"), P(None, "gtp"))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=where, out_specs=where[1] if grad else where[0], check_vma=False)
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(loss)(w, x) if grad else forward(x, w)

    ranks = mesh.shape["gtp"]
    return run.lower(array(mesh, (ranks * rows, size), where[0]), array(mesh, (layers, size, size), where[1]))


def compiled_text(lowered: Any) -> str:
    """The text compiled for the target."""
    return lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS)).as_text()
