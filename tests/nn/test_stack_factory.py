"""Layers that a `Stack`'s factory makes: those that draw or grow run as in a loop; others are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp

WIDTH, LENGTH = 4, 3


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, param_dtype=jnp.float64, rngs=rngs)


class Noisy(Layer):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.rngs = rngs

    def __call__(self, x):
        return x + self.linear(x) + jax.random.normal(self.rngs.noise(), x.shape, x.dtype)


class Growing(Layer):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.seen = nnx.Variable(jnp.zeros((0, WIDTH)))

    def __call__(self, x):
        y = self.linear(x)
        self.seen.set_value(jnp.concatenate([self.seen.get_value(), y[:1]]))
        return x + y


def unstacked(stack):
    """The layers of a stack, as modules of stock Flax."""
    graph, state = nnx.split(stack.layers)
    states = jax.jit(lambda state: [jax.tree.map(lambda a, i=i: a[i], state) for i in range(LENGTH)])(state)
    return [nnx.merge(graph, one) for one in states]


def in_a_loop(layers, x):
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("kind", [Noisy, Growing])
def test_a_stack_equals_a_loop_over_its_layers_call_after_call(kind, x64):
    stack = nnx.jit(lambda: gtp.Stack(kind, LENGTH, rngs=nnx.Rngs(0, noise=1)))()
    layers = nnx.List(unstacked(stack))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, WIDTH)))
    of_stack = nnx.jit(nnx.value_and_grad(lambda stack: jnp.sum(jnp.sin(stack(x)))))
    of_layers = nnx.jit(nnx.value_and_grad(lambda layers: jnp.sum(jnp.sin(in_a_loop(layers, x)))))
    for _ in range(2):
        found, wanted = of_stack(stack), of_layers(layers)
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
        kernels = [wanted[1][i].linear.kernel.get_value() for i in range(LENGTH)]
        np.testing.assert_allclose(found[1].layers.linear.kernel.get_value(), kernels, rtol=1e-12)
        if kind is not Noisy:
            seen = [layer.seen.get_value() for layer in layers]
            np.testing.assert_allclose(stack.layers.seen.get_value(), seen, rtol=1e-12)
    if kind is Noisy:
        assert list(stack.layers.rngs.noise.count.get_value()) == [2] * LENGTH
        draws = {float(jax.random.normal(layer.rngs.noise())) for layer in layers}
        assert len(draws) == LENGTH, "layers share a stream"


class Powers(Layer):
    def __call__(self, x, power=1):
        return x + self.linear(x) ** power


def test_each_layer_gets_arguments_of_its_own_also_where_layers_run_in_a_loop(x64):
    powers = (2, 2, 3)
    stack = gtp.Stack(
        Powers,
        LENGTH,
        schedule=gtp.nn.Schedule(unroll=1),
        each=[{"power": power} for power in powers],
        rngs=nnx.Rngs(0),
    )
    layers = nnx.List(unstacked(stack))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, WIDTH)))

    def in_turn(layers):
        y = x
        for layer, power in zip(layers, powers, strict=True):
            y = layer(y, power)
        return jnp.sum(jnp.sin(y))

    found = nnx.jit(nnx.value_and_grad(lambda stack: jnp.sum(jnp.sin(stack(x)))))(stack)
    wanted = nnx.jit(nnx.value_and_grad(in_turn))(layers)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    kernels = [wanted[1][i].linear.kernel.get_value() for i in range(LENGTH)]
    np.testing.assert_allclose(found[1].layers.linear.kernel.get_value(), kernels, rtol=1e-12)
    with pytest.raises(ValueError, match=naming("`each` 2 `length` 3")):
        gtp.Stack(Powers, LENGTH, each=[{}, {}], rngs=nnx.Rngs(0))


def test_variables_made_outside_of_the_factory_are_refused_by_path():
    shared = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))

    class Sharing(Layer):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.shared = shared

    remedy = "`nnx.List([factory(rngs=rngs) for _ in range(length)])`"
    with pytest.raises(ValueError, match=naming("Sharing Param shared outside", remedy)):
        gtp.Stack(Sharing, LENGTH, rngs=nnx.Rngs(0))
