"""Bad input is refused at the door, in words that name the argument, what came, and the remedy."""

import dataclasses
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, hugging_face_of, next_token_loss

TINY = LlamaConfig(
    vocab_size=32, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, intermediate_size=16
)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


def stack(rngs: nnx.Rngs, **options) -> gtp.Stack:
    return gtp.Stack(lambda rngs: gtp.Dense(8, 8, rngs=rngs), 2, rngs=rngs, **options)


def tokens(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


WITHOUT_A_MESH = {
    "parallel": (
        lambda: gtp.Dense(8, 8, parallel="rows", rngs=rngs()),
        "`parallel` is 'rows'; it must be 'column', 'row'",
    ),
    "size": (lambda: gtp.Dense(8, 0, rngs=rngs()), r"Dense\(8, 0\): feature sizes must be whole numbers of at least 1"),
    "features": (lambda: gtp.Dense(8, 8, rngs=rngs())(jnp.ones((2, 7))), r"Dense takes 8 input features; got shape"),
    "norm": (
        lambda: gtp.LayerNormDense(8, 8, norm="batch", rngs=rngs()),
        "`norm` is 'batch'; it must be 'rms', 'layer'",
    ),
    "kv heads": (
        lambda: gtp.Attention(16, num_heads=4, num_kv_heads=3, rngs=rngs()),
        "`num_kv_heads` 3 does not divide `num_heads` 4",
    ),
    "heads": (
        lambda: gtp.Attention(15, num_heads=4, rngs=rngs()),
        "`num_heads` 4 does not divide `features` 15; pass `head_",
    ),
    "no heads": (
        lambda: gtp.Attention(16, num_heads=0, rngs=rngs()),
        "`num_heads` is 0 and `num_kv_heads` is 0; both must be whole",
    ),
    "odd head": (
        lambda: gtp.Attention(36, num_heads=4, rngs=rngs()),
        "`head_dim` is 9; rotary embedding needs an even",
    ),
    "no sequence": (
        lambda: gtp.Attention(16, num_heads=2, rngs=rngs())(jnp.ones((2, 16))),
        r"Attention takes \(batch, seq",
    ),
    "no outputs": (lambda: gtp.Dense(8, {}, rngs=rngs()), r"Dense\(8, {}\): feature sizes must be whole numbers"),
    "heads in floats": (
        lambda: gtp.Attention(16, num_heads=4.0, rngs=rngs()),  # type: ignore[arg-type]
        "`num_heads` is 4.0 and `num_kv_heads` is 4.0; both must be whole numbers of at least 1",
    ),
    "head in floats": (
        lambda: gtp.Attention(16, num_heads=2, head_dim=8.0, rngs=rngs()),  # type: ignore[arg-type]
        "`head_dim` is 8.0; it must be a whole number of at least 1",
    ),
    "features in floats": (
        lambda: gtp.Dense(8.0, 8, rngs=rngs()),  # type: ignore[arg-type]
        r"Dense\(8.0, 8\): feature sizes must be whole numbers of at least 1",
    ),
    "table in floats": (
        lambda: gtp.Embed(8.0, 8, rngs=rngs()),  # type: ignore[arg-type]
        r"Embed\(8.0, 8\): sizes must be whole numbers of at least 1",
    ),
    "length in floats": (
        lambda: gtp.Stack(lambda rngs: gtp.Dense(8, 8, rngs=rngs), 2.0, rngs=rngs()),  # type: ignore[arg-type]
        "`length` is 2.0; it must be a whole number of at least 1",
    ),
    "no unit of a kernel": (
        lambda: gtp.Dense(8, {"a": 8, "b": 4}, parallel="column", units={"a": 8}, rngs=rngs()),
        "`units` is {'a': 8}; it must be a whole number of features that divides the 4 features of 'b', or a dict",
    ),
    "units": (
        lambda: gtp.Dense(8, 8, units=3, rngs=rngs()),
        "`units` is 3; it must be a whole number of features that divides 8, or a dict with one number per name",
    ),
    "roles twice": (
        lambda: gtp.Roles(batch=("dp", "dp")),
        r"`batch` is \('dp', 'dp'\), which contains an axis twice; list each axis once",
    ),
    "roles of tp": (
        lambda: gtp.Roles(weights=("gtp", "tp")),
        "`tensor` is 'tp', which is also in `weights` .* Remove it from one of the two",
    ),
    "role of text": (lambda: gtp.Roles(batch="dp"), "`batch` is 'dp'; it must be a tuple of mesh axes"),
    "table": (lambda: gtp.Embed(0, 8, rngs=rngs()), r"Embed\(0, 8\): sizes must be whole numbers of at least 1"),
    "norm of a row": (
        lambda: gtp.LayerNormDense(8, 8, parallel="row", rngs=rngs()),
        "`parallel` is 'row', so the input",
    ),
    "length": (
        lambda: gtp.Stack(lambda rngs: None, 0, rngs=rngs()),
        "`length` is 0; it must be a whole number of at least 1",
    ),
    "remat": (
        lambda: gtp.Stack(lambda rngs: None, 1, remat="some", rngs=rngs()),
        r"`remat` is 'some'; it must be one of \['activations', 'everything', 'matmuls', 'nothing', 'offload'",
    ),
    "no modules": (lambda: gtp.run_chain(jnp.ones(1)), "`run_chain` got no modules; pass at least one"),
    "unroll 0": (lambda: gtp.Schedule(unroll=0), "`unroll` is 0; it must be a number of layers, at least 1, or 'full'"),
    "unroll true": (lambda: gtp.Schedule(unroll=True), "`unroll` is True; it must be a number of layers"),
    "unroll 2.5": (
        lambda: gtp.Schedule(unroll=2.5),
        "`unroll` is 2.5; it must be a number of layers, at least 1, or 'full'",
    ),
    "unroll all": (
        lambda: gtp.Schedule(unroll="all"),
        "`unroll` is 'all'; it must be a number of layers, at least 1, or",
    ),
    "kept none": (
        lambda: gtp.Schedule(keep_gathered="none"),
        "`keep_gathered` is 'none'; it must be a number of layers, at least 0, or",
    ),
    "inner stack": (
        lambda: gtp.Stack(lambda rngs: stack(rngs), 2, rngs=rngs()),
        "Stack contains a `Stack`, which cannot",
    ),
    "two schedules": (
        lambda: gtp.run_chain(jnp.ones((2, 8)), stack(rngs()), stack(rngs(), schedule=gtp.Schedule(keep_gathered=0))),
        "the stacks of a chain have different schedules",
    ),
    "kept -1": (
        lambda: gtp.Schedule(keep_gathered=-1),
        "`keep_gathered` is -1; it must be a number of layers, at least 0, or 'all' or",
    ),
    "kept true": (lambda: gtp.Schedule(keep_gathered=True), "`keep_gathered` is True; it must be a number of layers"),
    "loss shapes": (
        lambda: gtp.cross_entropy(jnp.ones((2, 3, 8)), tokens(2, 4)),
        r"logits \(2, 3, 8\), targets \(2, 4\), weights None: targets and weights must have the shape",
    ),
    "microbatches": (
        lambda: gtp.train_step(next_token_loss, optax.sgd(1), microbatches=0),
        "`microbatches` is 0; it must be a whole number of at least 1",
    ),
    "clipping": (
        lambda: gtp.train_step(next_token_loss, optax.sgd(1), max_grad_norm=0),
        "`max_grad_norm` is 0; it must be a finite number above 0, or `None` for no limit",
    ),
    "clipping by a text": (
        lambda: gtp.train_step(next_token_loss, optax.sgd(1), max_grad_norm=cast(Any, "1")),
        "`max_grad_norm` is '1'; it must be a finite number above 0",
    ),
    "microbatches True": (
        lambda: gtp.train_step(next_token_loss, optax.sgd(1), microbatches=True),
        "`microbatches` is True; it must be a whole number of at least 1",
    ),
    "experts": (
        lambda: dataclasses.replace(TINY, num_experts=-1),
        "`num_experts` is -1; it must be a whole number, 0 for an MLP",
    ),
    "too large an epsilon": (
        lambda: dataclasses.replace(TINY, epsilon=10**400),
        r"`epsilon` is 10+\.\.\.0+; it must be a number of at least 0, at most 3.402823e\+38",
    ),
    "too large a base": (
        lambda: dataclasses.replace(TINY, rope_theta=1e39),
        r"`rope_theta` is 1e\+39; it must be a number above 0, at most 3.402823e\+38",
    ),
    "too many layers": (
        lambda: dataclasses.replace(TINY, num_layers=1 << 31),
        r"`num_layers` is 2147483648; it must be a whole number of at least 1, below 2\*\*31",
    ),
    "experts per token": (
        lambda: dataclasses.replace(TINY, num_experts=4, top_k=5),
        "`top_k` is 5 of 4 experts; it must be at",
    ),
    "conversion": (
        lambda: hugging_face_of(dataclasses.replace(TINY, num_experts=4, shared_hidden=8)),
        "the model is none of LlamaForCausalLM, Mistr",
    ),
    "degree": (lambda: gtp.make_mesh(gtp=8.0), "`gtp` is 8.0; a degree is a whole number of at least 1"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", WITHOUT_A_MESH)
def test_bad_argument_is_named(name):
    call, message = WITHOUT_A_MESH[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_and_targets_are_integers():
    with pytest.raises(TypeError, match="Embed takes integer tokens; got float32"):
        gtp.Embed(8, 8, rngs=rngs())(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="`targets` are float32; they must be token ids"):
        gtp.cross_entropy(jnp.ones((2, 3, 8)), jnp.ones((2, 3)))


def test_what_is_no_module_or_schedule_is_refused():
    with pytest.raises(TypeError, match="`run_chain` takes gtp_jax modules, but module 1 is a function. Derive it"):
        gtp.run_chain(jnp.ones((2, 8)), stack(rngs()), lambda x: x)
    with pytest.raises(TypeError, match="`schedule` is 'full'; it must be a `gtp_jax.Schedule`"):
        gtp.run_chain(jnp.ones((2, 8)), stack(rngs()), schedule="full")
    with pytest.raises(TypeError, match="`state` is a Dense; it must be a `gtp_jax.TrainState`, such as"):
        gtp.eval_step(next_token_loss)(gtp.Dense(8, 8, rngs=rngs()), {})


def dense(**options) -> gtp.Dense:
    return gtp.init(lambda rngs: gtp.Dense(32, 32, rngs=rngs, **options), rngs())


ON_A_MESH = {
    "tp heads": (
        lambda: gtp.Attention(8, num_heads=1, rngs=rngs()),
        "tp 2 exceeds the number of key-value heads, 1 .* Choose a tp degree of at most 1",
    ),
    "batch": (lambda: dense()(jnp.ones((6, 32))), r"input of Dense has shape \(6, 32\).* multiple of dp \* gtp = 4"),
    "sequence": (
        lambda: dense(parallel="column")(jnp.ones((4, 3, 32))),
        r"the input of Dense has shape \(4, 3, 32\); .* multiple of tp = 2.* pass `sequence_parallel=False`",
    ),
    "dimensions": (
        lambda: dense(parallel="row")(jnp.ones(32)),
        r"input of Dense has shape \(32,\); on this mesh it needs a batch as dimension 0, and at least 2 dimensions",
    ),
    "attend": (
        lambda: gtp.Embed(32, 8, rngs=rngs()).attend(jnp.ones((4, 2, 8))),
        r"Embed.attend is called on global .* `TiedHead\(embed, norm=None, rngs=rngs\)`",
    ),
}


@pytest.mark.parametrize("name", ON_A_MESH)
def test_bad_argument_under_a_mesh_is_named(name):
    call, message = ON_A_MESH[name]
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), pytest.raises(ValueError, match=message):
        call()


def test_model_built_for_another_mesh_is_refused():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = dense()
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        with pytest.raises(
            ValueError, match=r"\(32, 32\) of Dense was built for a mesh with gtp 8; the mesh in scope has gtp 4. Build"
        ):
            model(jnp.ones((8, 32)))


def test_an_nnx_object_as_a_layers_further_input_is_refused():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        layer = gtp.Attention(16, num_heads=2, rngs=rngs())
        with pytest.raises(
            TypeError, match="an additional input of a layer or a `Stack` is a Rngs; it must be an array"
        ):
            layer(jnp.ones((8, 4, 16)), mask=rngs())


def test_mesh_without_an_axis_is_refused():
    with jax.set_mesh(Mesh(jax.devices(), ("data",))):
        with pytest.raises(ValueError, match=r"the mesh in scope has the axes \('data',\), and none named 'gtp'"):
            gtp.Dense(8, 8, rngs=rngs())


def test_shard_map_over_some_axes_only_is_refused():
    P = jax.sharding.PartitionSpec
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = dense()
        part = jax.shard_map(model, in_specs=P("gtp"), out_specs=P("gtp"), axis_names={"gtp"}, check_vma=False)
        with pytest.raises(ValueError, match="manual over only|manual over every mesh axis"):
            jax.jit(part)(jnp.ones((8, 32)))


class Noisy(nnx.Module):
    def __init__(self):
        self.dense = gtp.Dense(8, 8, rngs=rngs())
        self.mean = nnx.BatchStat(jnp.zeros(8))


def test_state_other_than_parameters_is_refused_in_local_view():
    state = gtp.TrainState.create(Noisy(), optax.sgd(1.0))
    step = gtp.train_step(lambda model, batch: (jnp.sum(model.dense(batch)), 1), optax.sgd(1.0), view="local")
    with pytest.raises(ValueError, match=r"variables other than parameters \(\['mean'\]\).*Use `view='global'`"):
        step.lower(state, jnp.ones((8, 8)))


def test_views_are_known_and_aux_is_for_global_view():
    for make in (gtp.eval_step, lambda loss, **options: gtp.train_step(loss, optax.sgd(1.0), **options)):
        with pytest.raises(ValueError, match=r"`view` is 'ranks'; it must be one of 'global', 'local'"):
            make(next_token_loss, view="ranks")
        with pytest.raises(ValueError, match=r"`has_aux` is for `view='global'`"):
            make(next_token_loss, view="local", has_aux=True)


def test_views_and_microbatches_are_checked_where_there_is_no_step():
    view = r"`view` is 'ranks'; it must be one of 'global', 'local'"
    with pytest.raises(ValueError, match=view):
        gtp.check(lambda rngs: gtp.Dense(8, 8, rngs=rngs), next_token_loss, {}, view=cast(Any, "ranks"))
    with pytest.raises(ValueError, match=r"`has_aux` is for `view='global'`"):
        gtp.check(next_token_loss, lambda rngs: gtp.Dense(8, 8, rngs=rngs), {}, view="local", has_aux=True)
    state = gtp.TrainState.create(gtp.Dense(8, 8, rngs=nnx.Rngs(0)), optax.sgd(1.0))
    with pytest.raises(ValueError, match=view):
        gtp.diagnose(next_token_loss, state, {}, view=cast(Any, "ranks"))
    with pytest.raises(ValueError, match=r"`has_aux` is for `view='global'`"):
        gtp.diagnose(next_token_loss, state, {}, view="local", has_aux=True)
    with pytest.raises(ValueError, match="`microbatches` is 0; it must be a whole number of at least 1"):
        gtp.loss_and_gradients(next_token_loss, state, {}, microbatches=0)


def test_a_state_and_a_recipe_are_checked_where_there_is_no_step():
    model = gtp.Dense(8, 8, rngs=nnx.Rngs(0))
    state = gtp.TrainState.create(model, optax.sgd(1.0))
    for call in (gtp.diagnose, gtp.loss_and_gradients):
        with pytest.raises(TypeError, match="`state` is a Dense; it must be a `gtp_jax.TrainState`, such as"):
            call(next_token_loss, cast(Any, model), {})
        with pytest.raises(TypeError, match="`recipe` is 'fp8'; it must be one of gtp_jax.BF16"):
            call(next_token_loss, state, {}, recipe=cast(Any, "fp8"))


def step_on(loss, *shape: int, microbatches: int = 1, view="global", has_aux=False, mesh=None):
    with jax.set_mesh(gtp.make_mesh(**mesh or dict(gtp=8))):
        optimizer = optax.sgd(0.1)
        model = gtp.nn.abstract_model(lambda rngs: Llama(dataclasses.replace(TINY), rngs=rngs))
        state = gtp.TrainState.create(model, optimizer)
        batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "targets")}
        step = gtp.train_step(loss, optimizer, microbatches=microbatches, view=view, has_aux=has_aux)
        step.lower(state, batch)


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"`batch`\['targets'\] has shape \(12, 4\); its first dimension is the batch"):
        step_on(next_token_loss, 12, 4, view="local")
    with pytest.raises(ValueError, match=r"`batch`\['targets'\] has shape \(8, 4\); its first dimension"):
        step_on(next_token_loss, 8, 4, microbatches=2, view="local")
    with pytest.raises(
        ValueError,
        match=r"the input of Embed \+ Stack \+ LayerNormDense has shape \(12, 4\); its first dimension is the batch",
    ):
        step_on(next_token_loss, 12, 4)
    with pytest.raises(ValueError, match=r"`batch`\['targets'\] has shape \(9, 4\); .* a multiple of microbatches = 2"):
        step_on(next_token_loss, 9, 4, microbatches=2)


def test_a_batch_without_rows_or_tokens_is_refused():
    for shape, view in (((0, 4), "local"), ((8, 0), "global")):
        with pytest.raises(
            ValueError, match=rf"`batch`\['targets'\] has shape {re.escape(str(shape))}, so it has no elements"
        ):
            step_on(next_token_loss, *shape, view=view)


@pytest.mark.parametrize("view", ["local", "global"])
def test_a_sequence_that_tp_does_not_divide_is_refused(view):
    with pytest.raises(ValueError, match=r"which tp 2 does not divide|must be a multiple of tp|does not divide it"):
        step_on(next_token_loss, 8, 5, view=view, mesh=dict(gtp=4, tp=2))


def test_loss_returns_a_scalar_or_a_sum_and_a_number():
    mean = lambda model, batch: jnp.mean(model(batch["tokens"]))  # noqa: E731
    step_on(mean, 8, 4)
    with pytest.raises(
        TypeError, match=r"in `view='local'` a loss must return two scalars, \(sum of token losses, number of tokens\)"
    ):
        step_on(mean, 8, 4, view="local")
    message = r"`loss` must return a scalar, such as a mean; or two scalars, \(sum of token losses, .* It returned "
    with pytest.raises(TypeError, match=message + r"ArrayImpl|JitTracer|.* of shapes \(8, 4\)"):
        step_on(lambda model, batch: jnp.sum(model(batch["tokens"]), -1), 8, 4)
    with pytest.raises(TypeError, match=message + r"tuple of shapes \(\(8, 4\), \(\)\)"):
        step_on(lambda model, batch: (jnp.sum(model(batch["tokens"]), -1), jnp.ones(())), 8, 4)
    with pytest.raises(TypeError, match=message + r"tuple of shapes \(\(\(\), \(\)\), \(\)\)\. If it returns more"):
        step_on(lambda model, batch: ((mean(model, batch), jnp.ones(())), jnp.ones(())), 8, 4)
    with pytest.raises(
        TypeError, match=r"with `has_aux=True`, `loss` must return a pair \(loss, aux\).*of shapes \(\)"
    ):
        step_on(mean, 8, 4, has_aux=True)
    with pytest.raises(
        TypeError, match=r"`loss` returns int32; a step differentiates it, so it must be a real floating-point number"
    ):
        step_on(lambda model, batch: jnp.sum(batch["tokens"]), 8, 4)


def test_what_is_no_loss_and_no_optimizer_is_refused_by_name():
    make = lambda rngs: gtp.Dense(8, 8, dtype="float32", rngs=rngs)  # noqa: E731
    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    model, sgd, x = make(nnx.Rngs(0)), optax.sgd(0.1), jnp.ones((4, 2, 8))
    state = gtp.TrainState.create(model, sgd)
    for refused in (
        lambda: gtp.train_step(sgd, loss),
        lambda: gtp.eval_step(state),
        lambda: gtp.loss_and_gradients(x, state, x),
        lambda: gtp.check(x, make, x),
        lambda: gtp.diagnose(x, state, x),
    ):
        with pytest.raises(TypeError, match="`loss` is a .*, which cannot be called; it must be a function of the"):
            refused()
    for refused in (lambda o: gtp.train_step(loss, o), lambda o: gtp.TrainState.create(model, o)):
        with pytest.raises(TypeError, match="`optimizer` is a function, which does not have both `init` and `update`"):
            refused(optax.adamw)
        with pytest.raises(TypeError, match="`optimizer` is a Optimizer, which .*`nnx.Optimizer`, pass its `tx`"):
            refused(nnx.Optimizer(model, sgd, wrt=nnx.Param))
    with pytest.raises(TypeError, match="not callable") as raised:
        gtp.eval_step(lambda x, model: loss(model, x))(state, x)
    assert "A loss is called as `loss(model, batch)`: the model is its first argument." in raised.value.__notes__


def test_a_state_without_values_is_refused_where_it_is_run():
    make = lambda rngs: gtp.Dense(8, 8, dtype="float32", rngs=rngs)  # noqa: E731
    loss, sgd, x = lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), jnp.ones((4, 2, 8))  # noqa: E731
    state = gtp.TrainState.create(gtp.nn.abstract_model(make), sgd)
    for refused in (
        lambda: gtp.train_step(loss, sgd)(state, x),
        lambda: gtp.eval_step(loss)(state, x),
        lambda: gtp.loss_and_gradients(loss, state, x),
        lambda: gtp.diagnose(loss, state, x),
    ):
        with pytest.raises(ValueError, match=r"`state` has no values, .* such as at 'params.kernel'.*`gtp_jax.init"):
            refused()
    assert gtp.train_step(loss, sgd).eval_shape(state, x)[1]["loss"].shape == ()


@pytest.mark.parametrize("microbatches", [1, 2])
def test_text_in_aux_is_refused_by_name(microbatches):
    loss = lambda model, batch: (jnp.mean(model(batch["tokens"])), {"seen": "text"})  # noqa: E731
    with pytest.raises(TypeError, match=r"`aux`\['seen'\], which `loss` returned, is a str; it must be an array"):
        step_on(loss, 16, 4, microbatches=microbatches, has_aux=True)


def test_a_model_built_under_a_mesh_is_refused_without_it():
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        row = gtp.init(lambda rngs: gtp.Dense(8, 8, parallel="row", rngs=rngs), rngs())
        stack = gtp.init(lambda rngs: gtp.Stack(lambda rngs: gtp.MLP(8, 8, rngs=rngs), 2, rngs=rngs), rngs())
    for module in (row, stack):
        with pytest.raises(
            ValueError, match=r"was built for a mesh with gtp 4 x tp 2; no mesh is in scope. Use the model under its"
        ):
            module(jnp.ones((2, 4, 8)))


def test_a_layer_built_without_a_mesh_is_refused_inside_another_shard_map():
    row = gtp.Dense(8, 8, parallel="row", sequence_parallel=False, rngs=rngs())
    with jax.set_mesh(gtp.make_mesh(tp=2, devices=jax.devices()[:2])):
        local = jax.shard_map(row, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
        with pytest.raises(
            ValueError, match="was built for a mesh with gtp 1 x tp 1; the mesh in scope has gtp 1 x tp 2"
        ):
            jax.jit(local)(jnp.ones((2, 8)))


class Writes(nnx.Module):
    def __init__(self, rngs, held, written):
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.term = gtp.AuxLoss(held)
        self.written = written

    def __call__(self, x):
        y = self.dense(x)
        self.term.set_value(jnp.broadcast_to(jnp.mean(y**2), self.written.shape).astype(self.written.dtype))
        return y


NARROW, LONG = jax.ShapeDtypeStruct((), jnp.bfloat16), jax.ShapeDtypeStruct((3,), jnp.float32)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    ("held", "written", "message"),
    [
        (0.0, NARROW, r"changes the form.*\n  term: from float32\[\] to bfloat16\[\]\n.*dtype"),
        (0.0, LONG, r"changes the form.*\n  term: from float32\[\] to float32\[3\]\n.*shape"),
        (None, LONG, r"changes the form.*\n  term: from None to float32\[3\]\n"),
    ],
)
def test_a_variable_that_is_written_in_another_dtype_or_shape_is_named(held, written, message, microbatches):
    held = None if held is None else jnp.zeros(())
    state = gtp.TrainState.create(Writes(rngs(), held, written), optax.sgd(0.1))
    step = gtp.train_step(lambda model, x: jnp.mean(model(x)), optax.sgd(0.1), microbatches=microbatches)
    with pytest.raises(ValueError, match=message):
        step.lower(state, jnp.ones((4, 4)))


def test_sizes_may_be_whole_numbers_of_numpy():
    heads, units = np.int64(2), np.int32(4)
    layer = gtp.Attention(16, num_heads=heads, num_kv_heads=heads, rngs=rngs())
    assert layer(jnp.ones((1, 4, 16))).shape == (1, 4, 16)
    assert gtp.Dense(8, 8, parallel="column", units=units, rngs=rngs())(jnp.ones((2, 8))).shape == (2, 8)
    assert gtp.Stack(lambda rngs: gtp.Dense(8, 8, rngs=rngs), np.int64(2), rngs=rngs())(jnp.ones((2, 8))).shape == (
        2,
        8,
    )
