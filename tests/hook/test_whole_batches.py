"""A batch that a step of one's own passes whole is divided among the ranks, as `train_step` divides it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo

from .models import Few, tokens


@nnx.jit
def few():
    return Few()


def gradients(model):
    """Returns the state of a model, and a function of it and of tokens that returns a loss and its gradients."""
    graph, state = nnx.split(model)
    return state, lambda state, x: jax.value_and_grad(lambda state: jnp.sin(nnx.merge(graph, state)(x)).mean())(state)


def facts(program):
    found = sorted((c.kind, c.dtype, *(s.dims for s in c.results)) for c in hlo.collectives(program.as_text()))
    return found, program.cost_analysis()["flops"]


def test_no_rank_computes_more_of_a_whole_batch_than_of_a_divided_one(x64):
    mesh = gtp.make_mesh(dp=2, gtp=4)
    with jax.set_mesh(mesh):
        state, step = gradients(gtp.shard(few(), "blocks.*", min_size=64))
        divided = jax.device_put(tokens(), NamedSharding(mesh, P(("dp", "gtp"))))
        found, wanted = (jax.jit(step).lower(state, x).compile() for x in (tokens(), divided))
    (collectives, flops), (wanted_collectives, wanted_flops) = facts(found), facts(wanted)
    assert collectives == wanted_collectives
    assert flops == pytest.approx(wanted_flops, rel=1e-3)  # a rank finds where its part begins


@pytest.mark.parametrize("rows", others_full([15, 1], [15]))
def test_examples_that_the_ranks_cannot_divide_stay_whole(x64, rows):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state, step = gradients(gtp.shard(few(), "blocks.*", min_size=64))
        found = jax.jit(step)(state, tokens()[:rows])
    wanted, step = gradients(few())
    np.testing.assert_allclose(found[0], jax.jit(step)(wanted, tokens()[:rows])[0], rtol=1e-12)


def test_within_vmap_the_first_dimension_is_not_taken_for_examples(x64):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        state, step = gradients(gtp.shard(few(), "blocks.*", min_size=64))
        several = jnp.stack([tokens()] * 2)
        mapped, one = (
            jax.jit(function).lower(state, x).as_text()
            for function, x in ((jax.vmap(step, (None, 0)), several), (step, tokens()))
        )
    shape = "x".join(map(str, tokens().shape))
    assert f"tensor<{shape}xi64>" in one and "sdy.sharding_constraint %arg" in one
    assert not [line for line in mapped.splitlines() if "sharding_constraint" in line and f"{shape}xi" in line]


class Cudnn(nnx.Module):
    """Attention that only cuDNN computes."""

    def __init__(self, rngs: nnx.Rngs):
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nnx.Linear(256, 256, use_bias=False, dtype=jnp.bfloat16, rngs=rngs))

    def __call__(self, x):
        heads = (f(x).reshape(*x.shape[:2], 4, 64) for f in (self.query, self.key, self.value))
        found = jax.nn.dot_product_attention(*heads, is_causal=True, implementation="cudnn")
        return x + self.out(found.reshape(x.shape))


class Blocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Cudnn(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


missing = hlo.missing_packages()


@pytest.mark.full
@pytest.mark.skipif(bool(missing), reason=f"compiling for H200 needs {', '.join(missing)}")
def test_cudnn_attention_compiles_with_a_batch_that_comes_whole():
    """Otherwise XLA divides queries, keys and values differently, and JAX's partitioner refuses to compile."""
    devices = hlo.topology_devices(hlo.parse_target("h200:2"))
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=devices)):
        graph, state = nnx.split(gtp.shard(nnx.eval_shape(lambda: Blocks(nnx.Rngs(0))), "blocks.*"))

        def step(state, x):
            return jax.grad(lambda state: nnx.merge(graph, state)(x).astype(jnp.float32).var())(state)

        x = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)
        text = jax.jit(step).lower(state, x).compile(hlo.COMPILE_OPTIONS).as_text()
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 2
