"""A layer inside Flax Linen, through Flax's own bridge, is the NNX layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import gtp_jax as gtp


@pytest.mark.parametrize("parallel", ["column", None])
def test_linen_module_gives_the_output_and_gradients_of_the_nnx_module(parallel, key):
    sizes = dict(parallel=parallel, use_bias=True, dtype=jnp.float32)
    x = jax.random.normal(key, (8, 4, 56))
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        bridged = nnx.bridge.to_linen(gtp.Dense, 56, 120, **sizes)
        boxed = jax.jit(bridged.init)(jax.random.key(1), x)
        variables = linen.meta.unbox(boxed)
        kernel = variables["params"]["kernel"]  # where Linen users look for what to train
        module = gtp.init(lambda rngs: gtp.Dense(56, 120, rngs=rngs, **sizes), nnx.Rngs(0))
        assert kernel.shape == module.kernel.get_value().shape == (56, 120)
        module.kernel.set_value(kernel)
        graph, state = nnx.split(module)

        is_box = lambda leaf: isinstance(leaf, linen.meta.AxisMetadata)  # noqa: E731
        arrays = linen.meta.unbox({"params": boxed["params"]})

        def of_linen(arrays, x):
            put = lambda box, v: box.replace_boxed(v) if is_box(box) else v  # noqa: E731
            trained = {k: jax.tree.map(put, boxed[k], v, is_leaf=is_box) for k, v in arrays.items()}
            return jnp.sum(jnp.sin(bridged.apply({**boxed, **trained}, x)))

        def of_nnx(state, x):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

        found, (of_params, of_x) = jax.jit(jax.value_and_grad(of_linen, (0, 1)))(arrays, x)
        wanted, (of_state, of_x_too) = jax.jit(jax.value_and_grad(of_nnx, (0, 1)))(state, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    np.testing.assert_allclose(of_x, of_x_too, atol=1e-6)
    for name in ("kernel", "bias"):
        gradient = np.asarray(of_state[name].get_value())
        assert np.abs(gradient).max() > 0.1
        np.testing.assert_allclose(np.asarray(of_params["params"][name]), gradient, atol=1e-5)
