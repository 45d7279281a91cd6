"""What a loss returns is added up over microbatches without loss, and a batch is cut along its examples."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from messages import naming
from placed import placed
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model
from gtp_jax.train import compile_options

ROWS, FEATURES = 1024, 4


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = gtp.Dense(FEATURES, FEATURES, rngs=rngs)

    def __call__(self, x):
        return self.up(x)


def metrics_of(loss, batch, microbatches, **options):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(placed(Model), optax.sgd(0.1))
        return gtp.train_step(loss, optax.sgd(0.1), microbatches=microbatches, **options)(state, batch)[1]


def batch_of(rows=ROWS):
    return jnp.asarray(np.random.default_rng(0).normal(size=(rows, FEATURES)), jnp.float32)


def sum_and_number(model, x):
    """As much as a user may write: the number of tokens is the sum of a mask in bfloat16."""
    errors = jnp.square(model(x).astype(jnp.float32) - 1).mean(-1)
    mask = jnp.ones(errors.shape, jnp.bfloat16)
    return (errors * mask).sum(), mask.sum()


@pytest.mark.parametrize("view", ["global", "local"])
def test_a_bfloat16_number_of_tokens_is_exact_over_many_microbatches(view):
    once = metrics_of(sum_and_number, batch_of(), 1, view=view)
    often = metrics_of(sum_and_number, batch_of(), 512, view=view)
    assert once["tokens"] == often["tokens"] == ROWS
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(often[name], once[name], rtol=1e-2)


def test_a_bfloat16_mean_and_what_is_reported_are_averaged_in_float32():
    def loss(model, x):
        value = jnp.square(model(x).astype(jnp.float32) - 1).mean()
        aux = dict(
            one=jnp.ones((), jnp.bfloat16),
            rows=jnp.uint8(200),
            eighth=jnp.asarray(0.125, jnp.float8_e4m3fn),
            wrong=jnp.bool_(False),
        )
        return value.astype(jnp.bfloat16), aux

    once, often = (metrics_of(loss, batch_of(), count, has_aux=True) for count in (1, 512))
    np.testing.assert_allclose(often["loss"], once["loss"], rtol=1e-2)
    assert (
        often["aux"]["one"] == 1
        and often["aux"]["rows"] == 512 * 200
        and often["aux"]["eighth"] == 0.125
        and not often["aux"]["wrong"]
    )


def test_aux_has_the_same_dtypes_for_every_number_of_microbatches():
    given = {name: name for name in ("bfloat16", "float16", "float32", "complex64", "bool")}
    given |= {"int8": "int32", "uint16": "int32", "int32": "int32", "uint32": "uint32"}

    def loss(model, x):
        return jnp.square(model(x).astype(jnp.float32) - 1).mean(), {name: jnp.ones(3, name) for name in given}

    for count in (1, 2):
        aux = metrics_of(loss, batch_of(8), count, has_aux=True)["aux"]
        assert {name: str(value.dtype) for name, value in aux.items()} == given, count
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(placed(Model), optax.sgd(0.1))
        aux = gtp.eval_step(loss, has_aux=True)(state, batch_of(8))["aux"]
    assert {name: str(value.dtype) for name, value in aux.items()} == given


@pytest.mark.parametrize("view", ["global", "local"])
def test_a_leaf_whose_first_dimension_is_not_the_batch_s_is_refused_where_it_would_be_cut(view):
    def loss(model, batch):
        errors = jnp.square(model(batch["x"]).astype(jnp.float32) - 1) * batch["weights"].sum()
        return errors.sum(), jnp.float32(errors.size)

    batch = {"x": batch_of(8), "weights": jnp.ones(16)}
    message = naming("`batch`['weights'] 16, `batch`['x'] 8. close reshape `(8, 2, ...)`.")
    with pytest.raises(ValueError, match=message):
        metrics_of(loss, batch, 2, view=view)
    if view == "global":
        assert metrics_of(loss, batch, 1)["tokens"] == 32  # nothing is cut
    else:
        with pytest.raises(ValueError, match=message):
            metrics_of(loss, batch, 1, view=view)
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(placed(Model), optax.sgd(0.1))
        with pytest.raises(ValueError, match=message):
            gtp.train.diagnose(loss, state, batch, view=view)
        with pytest.raises(ValueError, match=message):
            gtp.train.check(loss, Model, batch, view=view, microbatches=2)


def test_a_list_of_numbers_in_a_batch_is_named():
    def loss(model, batch):
        return jnp.square(model(batch["x"]).astype(jnp.float32)).mean()

    with pytest.raises(Exception) as caught:  # noqa: PT011  a loss's own, with a note
        metrics_of(loss, {"x": batch_of(4).tolist()}, 2, view="global")
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(naming("`batch['x']` 16 `jnp.asarray(batch['x'])`"), said)


def test_a_number_in_a_batch_is_for_all_examples():
    def loss(model, batch):
        return jnp.square(model(batch["x"]).astype(jnp.float32) * batch["factor"]).mean()

    batch = {"x": batch_of(4).at[2, 1].set(jnp.inf), "factor": 2.0}
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(placed(Model), optax.sgd(0.1))
        assert gtp.train.diagnose(loss, state, batch).sample == 2


def test_what_has_no_sum_is_refused_by_name_in_aux():
    def loss(model, x):
        return jnp.square(model(x).astype(jnp.float32)).mean(), {"key": jax.random.key(0)}

    with pytest.raises(TypeError, match=naming("`aux`['key'] key_data")):
        metrics_of(loss, batch_of(8), 2, has_aux=True)


def square_of_sum(model, x):
    """Its sum over microbatches tells which rows are in each."""
    return jnp.sum(model(x).astype(jnp.float32) ** 0 * x) ** 2, jnp.float32(1)


@pytest.mark.parametrize("view", ["global", "local"])
def test_microbatch_m_has_every_row_that_follows_m_at_their_distance(view):
    x, count = batch_of(16), 4
    ranks = {"global": 1, "local": 2}[view]  # in local view a rank's part is cut
    parts = [part[m::count] for part in np.split(np.asarray(x), ranks) for m in range(count)]
    wanted = np.mean([part.sum() ** 2 for part in parts])
    found = metrics_of(square_of_sum, x, count, view=view)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


CASTS = pairwise([jnp.bfloat16, jnp.float8_e4m3fn], ["global", "local"], ["standard", "strict"])


@pytest.mark.parametrize("dtype, view, promotion", CASTS)
def test_a_gradient_that_ends_in_a_cast_from_few_bits_is_added_in_its_parameters_dtype(dtype, view, promotion):
    class Cast(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jnp.ones((FEATURES, FEATURES)))

        def __call__(self, x):
            return x.astype(jnp.bfloat16) @ self.kernel[...].astype(dtype).astype(jnp.bfloat16)

    def loss(model, x):
        return model(x).astype(jnp.float32).sum(), jnp.float32(len(x))

    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (16, FEATURES)), jnp.float32)  # sums without rounding
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])), jax.numpy_dtype_promotion(promotion):
        state = gtp.TrainState.create(Cast(nnx.Rngs(0)), optax.sgd(0.1))
        run = jax.jit(lambda state, x: gtp.train.loss_and_gradients(loss, state, x, microbatches=4, view=view))
        _, found = run(state, x)
    (gradient,) = jax.tree.leaves(found)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.repeat(x.mean(0)[:, None], FEATURES, 1))


@pytest.mark.full
@pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for an H100 needs packages of the extra `target`")
@pytest.mark.parametrize("view", ["global", "local"])
def test_weights_stay_in_the_layout_in_which_they_are_stored(view):
    """Compiled for H100s: XLA copied all weights into the layout in which they travel, before the loop."""
    mesh = gtp.make_mesh(gtp=2, devices=hlo.topology_devices(hlo.parse_target("h100:2")))
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=512
    )
    with jax.set_mesh(mesh):
        state = gtp.TrainState.create(abstract_model(lambda rngs: Llama(config, rngs=rngs)), optax.sgd(0.1))
        whole = NamedSharding(mesh, PartitionSpec("gtp"))
        tokens = jax.ShapeDtypeStruct((8, 128), jnp.int32, sharding=whole)
        options = {**hlo.COMPILE_OPTIONS, **compile_options("gpu", tp=1)}
        step = gtp.train_step(next_token_loss, optax.sgd(0.1), microbatches=4, view=view, compiler_options=options)
        program = step.lower(state, {"tokens": tokens, "targets": tokens}).compile().as_text()
    (carried,) = re.findall(r"= (\(.*\)) while\(", program)
    layouts = re.findall(r"f32\[2,\d+,\d+\](\{[\d,]+\})", carried)
    assert len(layouts) >= 2 * 7  # seven matrices of two stacked layers, and their gradients
    assert set(layouts) == {"{2,1,0}"}
