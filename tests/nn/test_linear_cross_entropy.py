"""The loss of a head without the logits of all tokens equals `cross_entropy(head(x))`, and needs little memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from .test_cross_entropy import MESHES, close, under

P = jax.sharding.PartitionSpec
WIDE = dict(dtype=jnp.float64, param_dtype=jnp.float64)
FEATURES, VOCAB = 16, 49  # tp does not divide the vocabulary
HEADS = {
    "Dense": lambda rngs, embed: gtp.Dense(FEATURES, VOCAB, parallel="column", use_bias=True, rngs=rngs, **WIDE),
    "stock Linear": lambda rngs, embed: nnx.Linear(FEATURES, VOCAB, rngs=rngs, **WIDE),
    "TiedHead": lambda rngs, embed: gtp.nn.TiedHead(embed, param_dtype=jnp.float64, rngs=rngs),
    "stock Embed": lambda rngs, embed: nnx.Embed(VOCAB, FEATURES, rngs=rngs, **WIDE),
    "whole Dense": lambda rngs, embed: gtp.Dense(FEATURES, VOCAB, rngs=rngs, **WIDE),
    "even Dense": lambda rngs, embed: gtp.nn.LayerNormDense(FEATURES, VOCAB - 1, rngs=rngs, **WIDE),
}
STOCK = (nnx.Linear, nnx.Embed)


class Model(nnx.Module):
    def __init__(self, head, rngs):
        parallel = head not in ("whole Dense", "stock Linear", "stock Embed")
        self.embed = gtp.Embed(VOCAB, FEATURES, sequence_parallel=parallel, rngs=rngs, **WIDE)
        self.head = HEADS[head](rngs, self.embed)

    def logits(self, x):
        return self.head.attend(x) if isinstance(self.head, nnx.Embed) else self.head(x)


def of_logits(model, batch):
    return gtp.cross_entropy(
        model.logits(model.embed(batch["tokens"])),
        batch["targets"],
        batch["weights"],
        vocab_size=VOCAB - isinstance(model.head, gtp.nn.LayerNormDense),
    )


def without_logits(model, batch):
    x = model.embed(batch["tokens"])
    return gtp.nn.linear_cross_entropy(x, model.head, batch["targets"], batch["weights"], chunk=5)


@pytest.mark.parametrize(
    ("head", "mesh", "view"), pairwise(HEADS, ["tp 2", "gtp 8", "tp 4", "no mesh"], ["local", "global"], usual=3)
)
def test_every_head_in_every_view_has_the_loss_and_gradients_of_its_logits(head, mesh, view, x64):
    rng = np.random.default_rng(0)
    targets = rng.integers(0, VOCAB - 1, (8, 12))
    targets[1, :3], targets[5] = -1, -100
    batch = {"tokens": rng.integers(0, VOCAB, (8, 12)), "targets": targets, "weights": rng.uniform(size=(8, 12))}

    def make(rngs):
        model = Model(head, rngs)
        return gtp.shard(model, STOCK, min_size=1) if head.startswith("stock") and MESHES[mesh] else model

    with under(MESHES[mesh]):
        state = gtp.TrainState.create(placed(make), optax.identity())
        found, wanted = (
            jax.jit(lambda state, batch, loss=loss: gtp.train.loss_and_gradients(loss, state, batch, view=view))(
                state, batch
            )
            for loss in (without_logits, of_logits)
        )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("view", ["local", "global"])
def test_without_jit_a_loss_is_that_of_a_traced_call(view, x64):
    x, targets, kernel = (np.random.default_rng(0).normal(size=shape) for shape in ((8, 4, 6), (8, 4), (6, 11)))

    def loss(x, targets):
        total, count = gtp.nn.linear_cross_entropy(x, kernel, targets.astype(int))
        return total[None], count[None]

    with under({"gtp": 8}):
        on_ranks = jax.shard_map(loss, in_specs=P("gtp"), out_specs=P("gtp"))
        call = on_ranks if view == "local" else loss
        for found, wanted in zip(call(x, targets), jax.jit(call)(x, targets), strict=True):
            close(np.asarray(found), np.asarray(wanted))


def example(tokens=37):
    rng = np.random.default_rng(1)
    x, kernel = rng.normal(size=(tokens, 6)), rng.normal(size=(6, 11))
    targets = rng.integers(-1, 11, tokens)
    return x, kernel, targets, rng.uniform(size=tokens)


OPTIONS = {"soft_cap": 3.0, "z_loss": 0.1, "label_smoothing": 0.2}


def formula(x, kernel, targets, weights, soft_cap=None, z_loss=0.0, label_smoothing=0.0):
    logits = x @ kernel
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    losses = total - (1 - label_smoothing) * picked - label_smoothing * jnp.mean(logits, axis=-1) + z_loss * total**2
    counts = targets >= 0
    return jnp.sum(jnp.where(counts, losses * weights, 0)), jnp.sum(jnp.where(counts, weights, 0))


@pytest.mark.parametrize("options", [OPTIONS, {}], ids=["all options", "none"])
@pytest.mark.parametrize("mesh", ["no mesh", pytest.param("tp 2", marks=pytest.mark.full)])
def test_two_derivatives_equal_the_formula_whatever_the_options_and_the_last_chunk(options, mesh, x64):
    x, kernel, targets, weights = example()

    def derivatives(loss):
        value = jax.value_and_grad(lambda *a: loss(*a)[0], argnums=(0, 1, 2))
        gradients = lambda x, kernel: value(x, kernel, weights)[1][:2]  # noqa: E731
        along = jax.jvp(gradients, (x, kernel), (jnp.cos(x), jnp.sin(kernel)))[1]
        penalty = lambda x, kernel: sum(jnp.sum(jnp.sin(one)) for one in gradients(x, kernel))  # noqa: E731
        return loss(x, kernel, weights), value(x, kernel, weights), along, jax.grad(penalty, argnums=(0, 1))(x, kernel)

    with under(MESHES[mesh]):
        wanted = jax.jit(lambda: derivatives(lambda x, k, w: formula(x, k, targets, w, **options)))()
        for chunk in (5, 37):  # chunks that do not divide the tokens, and one that has all of them
            ours = lambda x, k, w: gtp.nn.linear_cross_entropy(x, k, targets, w, chunk=chunk, **options)  # noqa: B023, E731
            found = jax.jit(lambda: derivatives(ours))()  # noqa: B023
            jax.tree.map(close, found, wanted)


def test_a_token_left_out_affects_nothing_even_if_its_input_is_not_finite(x64):
    x, kernel, targets, weights = example()
    left_out = targets < 0
    wanted = jax.jit(jax.value_and_grad(formula, argnums=(0, 1), has_aux=True))(x, kernel, targets, weights)
    loss = jax.jit(
        jax.value_and_grad(lambda *a: gtp.nn.linear_cross_entropy(*a, chunk=5), argnums=(0, 1), has_aux=True)
    )
    found = loss(np.where(left_out[:, None], np.nan, x), kernel, targets, weights)
    jax.tree.map(close, found, wanted)
    found = loss(np.full_like(x, np.nan), kernel, np.maximum(targets, 0), np.zeros_like(weights))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found)), "a batch without tokens has zeros"


def test_a_target_beyond_the_vocabulary_makes_the_loss_nan_and_leaves_gradients_finite(x64):
    x, kernel, targets, _ = example()
    loss = jax.jit(jax.value_and_grad(lambda x, k, t: gtp.nn.linear_cross_entropy(x, k, t)[0], argnums=(0, 1)))
    targets[3] = 11
    total, gradients = jax.tree.map(np.asarray, loss(x, kernel, targets))
    assert np.isnan(total)
    assert all(np.isfinite(leaf).all() for leaf in gradients)
    with pytest.raises(ValueError, match=naming("`targets` 11")):
        gtp.nn.linear_cross_entropy(x, kernel, targets)


def test_in_bfloat16_statistics_and_the_sum_over_chunks_are_in_float32():
    rng = np.random.default_rng(2)
    x = (1 + 0.01 * rng.normal(size=(4096, 8))).astype(jnp.bfloat16)
    kernel = (0.1 * rng.normal(size=(8, 16))).astype(jnp.bfloat16)
    targets = np.zeros(4096, np.int32)
    loss = lambda x, k: gtp.nn.linear_cross_entropy(x, k, targets, chunk=8)[0]  # noqa: E731
    logits = lambda x, k: gtp.cross_entropy(jnp.dot(x, k).astype(jnp.float32), targets)[0]  # noqa: E731
    found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernel)
    wanted = jax.jit(jax.value_and_grad(logits, argnums=(0, 1)))(*(a.astype(np.float32) for a in (x, kernel)))
    assert found[0].dtype == jnp.float32
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # each of 512 chunks adds 1/512: a sum in bfloat16 would stop near half of the total
        one, other = np.float32(one), np.asarray(other)
        assert np.abs(one - other).max() < 0.01 * np.abs(other).max()


@pytest.mark.full
def test_under_vmap_and_checkpoint_gradients_stay_and_forward_mode_is_refused(x64):
    x, kernel, targets, weights = example()
    loss = lambda x: gtp.nn.linear_cross_entropy(x, kernel, targets, weights, chunk=5)[0]  # noqa: E731
    wanted = jax.jit(jax.vmap(jax.grad(lambda x: formula(x, kernel, targets, weights)[0])))(jnp.stack([x, 2 * x]))
    close(jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(jnp.stack([x, 2 * x])), wanted)
    with pytest.raises(TypeError, match=naming("jvp custom_vjp")):
        jax.jvp(loss, (x,), (x,))


def test_only_gradients_that_are_asked_for_are_computed():
    x, kernel, targets, _ = example()
    loss = lambda x, k: gtp.nn.linear_cross_entropy(x, k, targets, chunk=5)[0]  # noqa: E731
    products = lambda f: str(jax.make_jaxpr(f)(x, kernel)).count("dot_general[")  # noqa: E731
    assert [products(f) for f in (loss, jax.grad(loss), jax.grad(loss, 1), jax.grad(loss, (0, 1)))] == [1, 2, 2, 3]


@pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for H200 needs the `target` extra")
def test_a_head_is_gathered_once_and_its_gradient_is_reduced_once_without_logits_of_all_tokens():
    tokens, vocab = 65536, 32768  # of each rank
    with jax.set_mesh(gtp.make_mesh(gtp=8, devices=hlo.topology_devices(hlo.parse_target("h200:8")))):
        make = lambda rngs: gtp.Dense(1024, vocab, parallel="column", rngs=rngs)  # noqa: E731
        graph, params = nnx.split(gtp.nn.abstract_model(make))
        batch = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), P("gtp"))
        x = jax.ShapeDtypeStruct((8, tokens, 1024), jnp.bfloat16, sharding=batch)
        targets = jax.ShapeDtypeStruct((8, tokens), jnp.int32, sharding=batch)
        loss = lambda params, x, t: gtp.nn.linear_cross_entropy(x, nnx.merge(graph, params), t)[0]  # noqa: E731
        lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x, targets)
        compiled = lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS))
    text = compiled.as_text()
    assert text.count(" all-gather-start(") + text.count(" all-gather(") == 1
    assert text.count(" reduce-scatter(") + text.count("reduce-scatter-start(") == 1
    assert f"{tokens},{vocab}]" not in text
    weight, logits = 2 * 1024 * vocab, 2 * 4096 * vocab
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * weight + 2.2 * logits


def refused_heads():
    make = lambda kind, *args, **options: nnx.eval_shape(lambda: kind(*args, rngs=nnx.Rngs(0), **options))  # noqa: E731
    embed, dense = make(gtp.Embed, 8, 4), lambda out=8, **options: make(gtp.Dense, 4, out, **options)
    adapted = nnx.eval_shape(
        lambda: gtp.nn.lora(
            nnx.Dict(head=gtp.Dense(4, 8, rngs=nnx.Rngs(0))), 2, 2.0, targets=("head",), rngs=nnx.Rngs(1)
        )
    ).head
    return {
        "row": (dense(parallel="row"), {}, ValueError, "`head` row-parallel 'column'"),
        "two kernels": (dense({"a": 4, "b": 4}), {}, ValueError, "`head` 'a' 'b' one"),
        "adapters": (adapted, {}, ValueError, "`head` adapters"),
        "own product": (make(nnx.Linear, 4, 8, preferred_element_type=jnp.float32), {}, ValueError, "own"),
        "own class": (make(nnx.LoRALinear, 4, 8, lora_rank=2), {}, ValueError, "`head` LoRALinear"),
        "a function": (lambda x: x, {}, TypeError, "`head` function `gtp_jax.cross_entropy(head(x), targets)`"),
        "a vector": (np.ones(4), {}, TypeError, "`head` (4,)"),
        "features": (np.ones((5, 8)), {}, ValueError, "`x` (2, 3, 4) 5"),
        "size": (embed, {"vocab_size": 9}, ValueError, "`vocab_size` 9 8"),
        "cap": (embed, {"soft_cap": 0}, ValueError, "`soft_cap` 0"),
        "z": (embed, {"z_loss": -1}, ValueError, "`z_loss` -1"),
        "smoothing": (embed, {"label_smoothing": 1}, ValueError, "`label_smoothing` 1"),
        "chunk": (embed, {"chunk": 0}, ValueError, "`chunk` 0"),
        "targets": (embed, {"targets": np.zeros((2, 4), int)}, ValueError, "(2, 3, 4) (2, 4) (2, 3)"),
    }


@pytest.mark.bad_input
@pytest.mark.filterwarnings("ignore:no mesh is in scope")
def test_a_head_or_an_option_that_does_not_fit_is_named():
    x, targets = np.ones((2, 3, 4), np.float32), np.zeros((2, 3), int)
    for head, options, kind, message in refused_heads().values():
        with pytest.raises(kind, match=naming(message)):
            gtp.nn.linear_cross_entropy(x, head, **{"targets": targets, **options})


@pytest.mark.parametrize("stock", [False, True])
def test_a_head_whose_recipe_multiplies_in_a_format_is_refused(stock):
    with under(MESHES["gtp 8"]), gtp.use_recipe(gtp.FP8(matmuls=True, exclude=())):
        if stock:
            model = nnx.eval_shape(lambda: nnx.Dict(head=nnx.Linear(128, 128, rngs=nnx.Rngs(0))))
            head = gtp.shard(model, nnx.Linear, min_size=1).head
        else:
            head = gtp.nn.abstract_model(lambda rngs: gtp.Dense(128, 128, rngs=rngs))
        with pytest.raises(ValueError, match=naming("recipe `head` Exclude `gtp_jax.cross_entropy(head(x), targets)`")):
            jax.eval_shape(lambda x: gtp.nn.linear_cross_entropy(x, head, np.zeros((8, 3), int)), jnp.ones((8, 3, 128)))


def llama(**options):
    sizes = dict(hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=32)
    config = LlamaConfig(vocab_size=49, **sizes, dtype="float64", **options)
    return lambda rngs: Llama(config, rngs=rngs)


def packed_batch():
    rng = np.random.default_rng(3)
    tokens, targets = rng.integers(0, 49, (8, 12)), rng.integers(-1, 49, (8, 12))
    return {"tokens": tokens, "targets": targets, "segment_ids": np.repeat([[0] * 5 + [1] * 7], 8, axis=0)}


@pytest.mark.full
@pytest.mark.parametrize(("view", "tied"), [("local", True), pytest.param("global", False, marks=pytest.mark.full)])
def test_a_llama_with_a_loss_chunk_trains_as_without(view, tied, x64):
    optimizer, found = optax.sgd(1.0), []
    with under(dict(dp=2, gtp=2, tp=2)):
        for chunk in (0, 5):
            model = placed(llama(tie_embeddings=tied, loss_chunk=chunk))
            state = gtp.TrainState.create(model, optimizer)
            step = gtp.train_step(next_token_loss, optimizer, view=view, microbatches=2)
            state, metrics = step(state, packed_batch())
            found.append((metrics["loss"], metrics["tokens"], state.params))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        close(np.asarray(one), np.asarray(other))


@pytest.mark.filterwarnings("ignore:no mesh is in scope")
@pytest.mark.parametrize("chunk", [0, 5])
def test_a_llama_with_a_loss_chunk_has_no_logits_of_all_tokens(chunk, x64):
    graph, params = nnx.split(nnx.eval_shape(lambda: llama(loss_chunk=chunk)(nnx.Rngs(0))))
    loss = lambda params, batch: next_token_loss(nnx.merge(graph, params), batch)  # noqa: E731
    traced = jax.make_jaxpr(loss)(params, packed_batch())
    assert any(shape in str(traced) for shape in ("[8,12,49]", "[96,49]")) == (chunk == 0)
