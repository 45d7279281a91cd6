"""Bad input is refused at the door, in words that name the argument, what came, and the remedy."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from messages import naming

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, hugging_face_of, next_token_loss

TINY = LlamaConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=16
)
SGD = optax.sgd(0.1)
ones = np.ones


def make(kind: Any, *sizes: Any, **options: Any) -> Any:
    return kind(*sizes, rngs=nnx.Rngs(0), **options)


def stack(length: Any = 2, layer=lambda rngs: gtp.Dense(8, 8, rngs=rngs), **options: Any) -> gtp.Stack:
    return make(gtp.Stack, layer, length, **options)


def tiny(**fields: Any) -> LlamaConfig:
    return dataclasses.replace(TINY, **fields)


def step(**options: Any) -> Any:
    return gtp.train_step(next_token_loss, SGD, **options)


WITHOUT_A_MESH = {
    "parallel": (lambda: make(gtp.Dense, 8, 8, parallel="rows"), "`parallel` 'rows' 'column' 'row'"),
    "size": (lambda: make(gtp.Dense, 8, 0), "Dense(8, 0) whole 1"),
    "no outputs": (lambda: make(gtp.Dense, 8, {}), "Dense(8, {})"),
    "features": (lambda: make(gtp.Dense, 8, 8)(ones((2, 7))), "Dense 8 (2, 7)"),
    "units": (lambda: make(gtp.Dense, 8, 8, units=3), "`units` 3 divides 8"),
    "norm": (lambda: make(gtp.nn.LayerNormDense, 8, 8, norm="batch"), "`norm` 'batch' 'rms' 'layer'"),
    "norm of a row": (lambda: make(gtp.nn.LayerNormDense, 8, 8, parallel="row"), "`parallel` 'row'"),
    "kv heads": (lambda: make(gtp.Attention, 16, num_heads=4, num_kv_heads=3), "`num_kv_heads` 3 `num_heads` 4"),
    "heads": (lambda: make(gtp.Attention, 15, num_heads=4), "`num_heads` 4 `features` 15 pass `head_dim`"),
    "odd head": (lambda: make(gtp.Attention, 36, num_heads=4), "`head_dim` 9 even"),
    "length": (lambda: stack(2.0), "`length` 2.0 whole"),
    "remat": (lambda: stack(remat="some"), "`remat` 'some' 'activations' 'matmuls' 'offload'"),
    "inner stack": (lambda: stack(layer=lambda rngs: gtp.Stack(lambda rngs: None, 2, rngs=rngs)), "contains `Stack`"),
    "two schedules": (
        lambda: gtp.nn.run_chain(ones((2, 8)), stack(), stack(schedule=gtp.nn.Schedule(keep_gathered=0))),
        "chain different schedules",
    ),
    "roles twice": (lambda: gtp.mesh.Roles(batch=("dp", "dp")), "`batch` ('dp', 'dp') once"),
    "roles of tp": (lambda: gtp.mesh.Roles(weights=("gtp", "tp")), "`tensor` 'tp' `weights` Remove"),
    "unroll 0": (lambda: gtp.nn.Schedule(unroll=0), "`unroll` 0 'full'"),
    "kept -1": (lambda: gtp.nn.Schedule(keep_gathered=-1), "`keep_gathered` -1 'all'"),
    "loss shapes": (
        lambda: gtp.cross_entropy(ones((2, 3, 8)), np.zeros((2, 4), int)),
        "(2, 3, 8) (2, 4) None",
    ),
    "microbatches": (lambda: step(microbatches=True), "`microbatches` True whole"),
    "clipping": (lambda: step(max_grad_norm=0), "`max_grad_norm` 0 `None`"),
    "experts": (lambda: tiny(num_experts=-1), "`num_experts` -1 whole 0"),
    "experts per token": (lambda: tiny(num_experts=4, top_k=5), "`top_k` 5 4"),
    "too large an epsilon": (lambda: tiny(epsilon=10**400), "`epsilon` 3.402823e+38"),
    "too many layers": (lambda: tiny(num_layers=1 << 31), "`num_layers` 2147483648 2**31"),
    "conversion": (lambda: hugging_face_of(tiny(num_experts=4, shared_hidden=8)), "LlamaForCausalLM"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", WITHOUT_A_MESH)
def test_bad_argument_is_named(name):
    call, message = WITHOUT_A_MESH[name]
    with pytest.raises(ValueError, match=naming(message)):
        jax.eval_shape(call)


OF_ANOTHER_TYPE = {
    "tokens": (lambda: make(gtp.Embed, 8, 8)(ones((2, 3), np.float32)), "Embed ids float32 (2, 3)"),
    "targets": (lambda: gtp.cross_entropy(ones((2, 3, 8)), ones((2, 3))), "`targets` ids"),
    "module": (lambda: gtp.nn.run_chain(ones((2, 8)), stack(), lambda x: x), "`run_chain` 1 function"),
    "schedule": (
        lambda: gtp.nn.run_chain(ones((2, 8)), stack(), schedule="full"),
        "`schedule` 'full' `gtp_jax.nn.Schedule`",
    ),
    "state": (
        lambda: gtp.eval_step(next_token_loss)(make(gtp.Dense, 8, 8), {}),
        "`state` Dense `gtp_jax.TrainState`",
    ),
}


@pytest.mark.parametrize("name", OF_ANOTHER_TYPE)
def test_an_argument_of_another_type_is_named(name):
    call, message = OF_ANOTHER_TYPE[name]
    with pytest.raises(TypeError, match=naming(message)):
        jax.eval_shape(call)


def abstract(**options: Any) -> Any:
    """A layer on the mesh in scope, to be called on shapes: no program is compiled for a refusal."""
    layer = gtp.nn.abstract_model(lambda rngs: gtp.Dense(32, 32, rngs=rngs, **options))
    return lambda *shape: jax.eval_shape(lambda x: layer(x), jax.ShapeDtypeStruct(shape, jnp.float32))


ON_A_MESH = {
    "tp heads": (lambda: make(gtp.Attention, 8, num_heads=1), "tp 2 heads 1 Choose"),
    "batch": (lambda: abstract()(6, 32), "Dense (6, 32) dp gtp 4"),
    "sequence": (
        lambda: abstract(parallel="column")(4, 3, 32),
        "Dense (4, 3, 32) tp 2 pass `sequence_parallel=False`",
    ),
    "dimensions": (lambda: abstract(parallel="row")(32), "Dense (32,) batch 2"),
    "attend": (
        lambda: make(gtp.Embed, 32, 8).attend(ones((4, 2, 8))),
        "Embed.attend `TiedHead(embed, norm=None, rngs=rngs)`",
    ),
}


@pytest.mark.parametrize("name", ON_A_MESH)
def test_bad_argument_under_a_mesh_is_named(name):
    call, message = ON_A_MESH[name]
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), pytest.raises(ValueError, match=naming(message)):
        call()


def test_a_model_is_refused_under_another_mesh_than_its_own():
    on_eight, on_tp = gtp.make_mesh(gtp=8), gtp.make_mesh(gtp=4, tp=2)
    x = jax.ShapeDtypeStruct((8, 4, 32), jnp.float32)
    with jax.set_mesh(on_eight):
        model = gtp.nn.abstract_model(lambda rngs: gtp.Dense(32, 32, rngs=rngs))
    with jax.set_mesh(on_tp):
        with pytest.raises(ValueError, match=naming("(32, 32) Dense gtp 8 4 Build")):
            jax.eval_shape(lambda x: model(x), x)
        row = gtp.nn.abstract_model(lambda rngs: gtp.Dense(32, 32, parallel="row", rngs=rngs))
        layers = gtp.nn.abstract_model(lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(32, 8, rngs=rngs), 2, rngs=rngs))
    for module in (row, layers):
        with pytest.raises(ValueError, match=naming("gtp 4 tp 2 no mesh Use")):
            jax.eval_shape(lambda x, module=module: module(x), x)
    alone = make(gtp.Dense, 8, 8, parallel="row", sequence_parallel=False)
    with jax.set_mesh(gtp.make_mesh(tp=2, devices=jax.devices()[:2])):
        local = jax.shard_map(alone, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        with pytest.raises(ValueError, match=naming("built tp 1 2")):
            jax.eval_shape(local, jax.ShapeDtypeStruct((2, 8), jnp.float32))


def test_meshes_without_our_axes_or_manual_over_some_are_refused():
    with jax.set_mesh(Mesh(jax.devices(), ("data",))):
        with pytest.raises(ValueError, match=naming("('data',) 'gtp'")):
            make(gtp.Dense, 8, 8)
    P = jax.sharding.PartitionSpec
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = gtp.nn.abstract_model(lambda rngs: gtp.Dense(32, 32, rngs=rngs))
        part = jax.shard_map(model, in_specs=P("gtp"), out_specs=P("gtp"), axis_names={"gtp"}, check_vma=False)
        with pytest.raises(ValueError, match=naming("manual over")):
            jax.jit(part).trace(jax.ShapeDtypeStruct((8, 32), jnp.float32))


def test_an_nnx_object_as_a_layers_further_input_is_refused():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        layer = gtp.nn.abstract_model(lambda rngs: gtp.Attention(16, num_heads=2, rngs=rngs))
        with pytest.raises(TypeError, match=naming("input layer Rngs array")):
            layer(np.ones((8, 4, 16)), mask=nnx.Rngs(0))


class Noisy(nnx.Module):
    def __init__(self):
        self.dense = make(gtp.Dense, 8, 8)
        self.mean = nnx.BatchStat(jnp.zeros(8))


def test_state_other_than_parameters_is_refused_in_local_view():
    state = gtp.TrainState.create(Noisy(), SGD)
    step = gtp.train_step(lambda model, batch: (jnp.sum(model.dense(batch)), 1), SGD, view="local")
    with pytest.raises(ValueError, match=naming("['mean'] `view='global'`")):
        step.lower(state, np.ones((8, 8)))


def test_views_microbatches_states_and_recipes_are_checked_wherever_they_are_given():
    model = make(gtp.Dense, 8, 8)
    state = gtp.TrainState.create(model, SGD)
    for call in (
        lambda **options: gtp.eval_step(next_token_loss, **options),
        lambda **options: step(**options),
        lambda **options: gtp.train.check(next_token_loss, lambda rngs: gtp.Dense(8, 8, rngs=rngs), {}, **options),
        lambda **options: gtp.train.diagnose(next_token_loss, state, {}, **options),
    ):
        with pytest.raises(ValueError, match=naming("`view` 'ranks' 'global' 'local'")):
            call(view=cast(Any, "ranks"))
        with pytest.raises(ValueError, match=naming("`has_aux` `view='global'`")):
            call(view="local", has_aux=True)
    with pytest.raises(ValueError, match=naming("`microbatches` 0 whole")):
        gtp.train.loss_and_gradients(next_token_loss, state, {}, microbatches=0)
    for call in (gtp.train.diagnose, gtp.train.loss_and_gradients):
        with pytest.raises(TypeError, match=naming("`state` Dense `gtp_jax.TrainState`")):
            call(next_token_loss, cast(Any, model), {})
        with pytest.raises(TypeError, match=naming("`recipe` 'fp8' gtp_jax.recipes.BF16")):
            call(next_token_loss, state, {}, recipe=cast(Any, "fp8"))


def step_on(loss, *shape: int, mesh=None, **options: Any):
    with jax.set_mesh(gtp.make_mesh(**mesh or dict(gtp=8))):
        model = gtp.nn.abstract_model(lambda rngs: Llama(TINY, rngs=rngs))
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "targets")}
        gtp.train_step(loss, SGD, **options).eval_shape(gtp.TrainState.create(model, SGD), batch)


TP = dict(gtp=4, tp=2)
BATCHES = {
    "ranks": ((12, 4), dict(view="local"), "`batch`['targets'] (12, 4) batch"),
    "ranks, in global view": ((12, 4), {}, "Embed + Stack + LayerNormDense (12, 4) batch"),
    "microbatches": ((9, 4), dict(microbatches=2), "`batch`['targets'] (9, 4) microbatches = 2"),
    "no rows": ((0, 4), dict(view="local"), "`batch`['targets'] (0, 4) elements"),
    "no tokens": ((8, 0), {}, "`batch`['targets'] (8, 0) elements"),
    "sequence": ((8, 5), dict(mesh=TP), "tp sequence"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_that_does_not_divide_is_refused(name):
    shape, options, message = BATCHES[name]
    with pytest.raises(ValueError, match=naming(message)):
        step_on(next_token_loss, *shape, **options)


def mean(model, batch):
    return jnp.mean(model(batch["tokens"]))


def by_token(model, batch):
    return jnp.sum(model(batch["tokens"]), -1)


RETURNED = {
    "a mean in local view": (mean, dict(view="local"), "`view='local'` two scalars"),
    "an array": (by_token, {}, "`loss` scalar (8, 4)"),
    "too many": (lambda m, b: ((mean(m, b), jnp.ones(())), jnp.ones(())), {}, "`loss` (((), ()), ())"),
    "no aux": (mean, dict(has_aux=True), "`has_aux=True` `loss` ()"),
    "an integer": (lambda m, b: jnp.sum(b["tokens"]), {}, "`loss` int32 floating-point"),
    "text": (lambda m, b: (mean(m, b), {"seen": "text"}), dict(has_aux=True), "`aux`['seen'] `loss` str array"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_loss_returns_a_scalar_or_a_sum_and_a_number(name):
    loss, options, message = RETURNED[name]
    with pytest.raises(TypeError, match=naming(message)):
        step_on(loss, 8 * options.get("microbatches", 1), 4, **options)


def square(model, x):
    return jnp.mean(model(x) ** 2)


def test_what_is_no_loss_and_no_optimizer_is_refused_by_name():
    factory = lambda rngs: gtp.Dense(8, 8, dtype="float32", rngs=rngs)  # noqa: E731
    model, x = factory(nnx.Rngs(0)), np.ones((4, 2, 8), np.float32)
    state = gtp.TrainState.create(model, SGD)
    for refused in (
        lambda: gtp.train_step(SGD, square),
        lambda: gtp.eval_step(state),
        lambda: gtp.train.loss_and_gradients(x, state, x),
        lambda: gtp.train.check(x, factory, x),
        lambda: gtp.train.diagnose(x, state, x),
    ):
        with pytest.raises(TypeError, match=naming("`loss` called function")):
            refused()
    for refused in (lambda o: gtp.train_step(square, o), lambda o: gtp.TrainState.create(model, o)):
        with pytest.raises(TypeError, match=naming("`optimizer` function `init` `update`")):
            refused(optax.adamw)
        with pytest.raises(TypeError, match=naming("`optimizer` `nnx.Optimizer` `tx`")):
            refused(nnx.Optimizer(model, SGD, wrt=nnx.Param))
    with pytest.raises(TypeError, match="not callable") as raised:
        gtp.eval_step(lambda x, model: square(model, x))(state, x)
    assert "`loss(model, batch)`" in "".join(raised.value.__notes__)


def test_a_state_without_values_is_refused_where_it_is_run():
    x = np.ones((4, 2, 8), np.float32)
    model = gtp.nn.abstract_model(lambda rngs: gtp.Dense(8, 8, dtype="float32", rngs=rngs))
    state = gtp.TrainState.create(model, SGD)
    for refused in (
        lambda: gtp.train_step(square, SGD)(state, x),
        lambda: gtp.eval_step(square)(state, x),
        lambda: gtp.train.loss_and_gradients(square, state, x),
        lambda: gtp.train.diagnose(square, state, x),
    ):
        with pytest.raises(ValueError, match=naming("`state` values 'params.kernel' gtp_jax.init")):
            refused()
    assert gtp.train_step(square, SGD).eval_shape(state, x)[1]["loss"].shape == ()


def test_sizes_may_be_whole_numbers_of_numpy():
    two, x = np.int64(2), jax.ShapeDtypeStruct((1, 4, 16), jnp.float32)
    for factory in (
        lambda rngs: gtp.Attention(16, num_heads=two, num_kv_heads=two, rngs=rngs),
        lambda rngs: gtp.Dense(16, 16, parallel="column", units=np.int32(4), rngs=rngs),
        lambda rngs: gtp.Stack(lambda rngs: gtp.Dense(16, 16, rngs=rngs), two, rngs=rngs),
    ):
        assert jax.eval_shape(lambda x, factory=factory: factory(nnx.Rngs(0))(x), x).shape == x.shape
