"""What a step promises beside its numbers: donation, one compilation, a mesh, batches without tokens, its form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from messages import naming
from placed import placed
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn._init import _birth

SIZES = dict(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48
)
CONFIG = LlamaConfig(**SIZES, dtype="float32")


# several tests share their programs
MESH, ADAMW, SGD = dict(dp=2, gtp=2, tp=2), optax.adamw(1e-2), optax.sgd(1.0)
STEP, EVALUATE = gtp.train_step(next_token_loss, SGD), gtp.eval_step(next_token_loss)


@functools.cache
def created(mesh, optimizer):
    """Returns the first state on a mesh, which is in scope: its values, and where they are."""
    model = placed(lambda rngs: Llama(CONFIG, rngs=rngs), 1)
    state = gtp.TrainState.create(model, optimizer)
    return jax.tree.map(np.asarray, state), jax.tree.map(lambda a: a.sharding, state)


def make_state(optimizer=SGD):
    """Returns a state of its own arrays, which may be donated."""
    return jax.device_put(*created(jax.sharding.get_mesh(), optimizer))


def make_batch(size=8, length=8, **weights):
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (size, length + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **weights}


def host(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_the_state_is_donated_and_a_step_is_compiled_once():
    compiled = []

    def listen(event: str, seconds: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(seconds)

    with jax.set_mesh(gtp.make_mesh(**MESH)):
        state, batch = make_state(), make_batch(weights=np.ones((8, 8), np.float32))
        state, _ = STEP(state, batch)
        before = jax.tree.leaves((state.params, state.opt_state))
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            state, _ = STEP(state, batch)
            state, _ = STEP(state, batch)
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
    assert all(array.is_deleted() for array in before)
    assert not compiled


def test_a_batch_without_tokens_is_no_loss_and_moves_nothing():
    with jax.set_mesh(gtp.make_mesh(**MESH)):
        state = make_state()
        before = host(state.params)
        batch = make_batch(weights=np.zeros((8, 8), np.float32))
        assert float(EVALUATE(state, batch)["loss"]) == 0
        state, metrics = STEP(state, batch)
    assert {name: float(v) for name, v in metrics.items()} == dict(loss=0, tokens=0, grad_norm=0, skipped=0)
    for a, b in zip(host(state.params), before, strict=True):
        np.testing.assert_array_equal(a, b)


def dense(rngs):
    return gtp.Dense(8, 8, dtype="float32", rngs=rngs)


def squares(model, x):
    return jnp.mean(model(x) ** 2)


def test_arguments_by_name_are_those_by_place():
    optimizer, x = optax.adam(1e-2), np.ones((4, 8), np.float32)
    state = gtp.TrainState.create(placed(dense), optimizer)
    step, evaluate = gtp.train_step(squares, optimizer), gtp.eval_step(squares)
    assert float(evaluate(state=state, batch=x)["loss"]) == float(evaluate(state, x)["loss"])
    assert step.eval_shape(batch=x, state=state)[0].step.shape == ()
    after, metrics = step(skip=True, batch=x, state=state)
    assert bool(metrics["skipped"]) and all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    with pytest.raises(TypeError, match=naming("'skipp'")):
        step(after, x, skipp=True)
    for run in (step, evaluate):  # after the first call too
        with pytest.raises(ValueError, match=naming("`state` 'params.kernel' state, metrics = step(state, batch)")):
            run(state, x)
        with pytest.raises(ValueError, match=naming("`state` no values 'params.kernel'")):
            run(jax.eval_shape(lambda: after), x)


def test_weight_decay_moves_weights_in_a_batch_without_tokens_unless_it_is_skipped():
    optimizer, x = optax.adamw(0.1, weight_decay=0.5), np.ones((4, 8), np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        step = gtp.train_step(lambda model, x: (0 * jnp.sum(model(x)), jnp.float32(0)), optimizer)
        state = gtp.TrainState.create(placed(dense), optimizer)
        before = host(state.params)
        for skip in (True, False):
            state, metrics = step(state, x, skip=skip)
            assert bool(metrics["skipped"]) == skip
            for a, b in zip(host(state.params), before, strict=True):
                np.testing.assert_allclose(a, b if skip else (1 - 0.1 * 0.5) * b, rtol=0 if skip else 1e-5)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0


class Stock(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(256, 128, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def test_a_model_that_is_not_sharded_is_warned_of_and_a_class_or_a_state_is_refused_as_a_model():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        abstract = gtp.nn.abstract_model(Stock)
        with pytest.warns(UserWarning, match="no weight of this model is sharded over gtp, of degree 8"):
            state = gtp.TrainState.create(abstract, SGD)
        with pytest.raises(TypeError, match=naming("`model` class Stock `nnx.Module`")):
            gtp.TrainState.create(Stock, SGD)  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=naming("`model` `TrainState`")):
            gtp.TrainState.create(state, SGD)


@pytest.mark.parametrize(
    ("loss", "said"),
    [(lambda model, x: None, "`loss` None `return`"), (lambda model, x: model(x)[:, 0], "`loss` array shape 12")],
    ids=["nothing", "a loss for each row"],
)
def test_a_loss_that_returns_no_number_is_refused_by_what_it_returned(loss, said):
    state = gtp.TrainState.create(gtp.nn.abstract_model(Stock), SGD)
    with pytest.raises(TypeError, match=naming(said)):
        gtp.train_step(loss, SGD).lower(state, jax.ShapeDtypeStruct((12, 256), jnp.float32))  # pyright: ignore


@pytest.mark.parametrize(("microbatches", "rows"), [(1, 12), (3, 4)])
def test_a_batch_that_the_ranks_cannot_divide_is_warned_of(microbatches, rows):
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=4)):
        state = gtp.TrainState.create(gtp.nn.abstract_model(Stock), SGD)
        step = gtp.train_step(lambda model, x: jnp.mean(model(x)), SGD, microbatches=microbatches)
        with pytest.warns(UserWarning, match=f"`batch` has {rows} rows.* 8 ranks of dp x gtp"):
            step.lower(state, jax.ShapeDtypeStruct((12, 256), jnp.float32))  # pyright: ignore


def test_a_batch_of_nothing_is_refused():
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        state = make_state()
        for view in ("global", "local"):
            step = gtp.train_step(next_token_loss, SGD, view=view)
            for size, length in ((0, 8), (8, 0)):
                message = naming(f"`batch`['targets'] ({size}, {length}) elements")
                for run in (step, gtp.eval_step(next_token_loss, view=view)):
                    with pytest.raises(ValueError, match=message):
                        run(state, make_batch(size, length))


TEXTS = {
    "a list": (["one", "two"], "`batch`['text'][0] str 'one'"),
    "an array of text": (np.array(["one", "two"]), "`batch`['text'] array <U3"),
    "an array of objects": (np.array([None, 3]), "`batch`['text'] array object"),
    "bytes": (b"one", "`batch`['text'] bytes b'one'"),
}


@functools.cache
def dense_state():
    return gtp.TrainState.create(placed(dense), SGD)


@pytest.mark.parametrize("text", TEXTS)
def test_text_in_a_batch_is_refused_by_the_name_of_its_leaf(text):
    state, (leaf, named) = dense_state(), TEXTS[text]
    mean = lambda model, batch: squares(model, batch["x"])  # noqa: E731
    runs = gtp.train_step(mean, SGD), gtp.eval_step(mean), lambda *args: gtp.train.loss_and_gradients(mean, *args)
    for run in (*runs, lambda *args: gtp.train.diagnose(mean, *args)):
        with pytest.raises(TypeError, match=naming(named, "numbers Leave it out encode")):
            run(state, {"x": np.ones((2, 8), np.float32), "text": leaf})


class Bigrams(nnx.Module):
    def __init__(self, embed):
        self.block = nnx.Sequential(embed(64, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 64, rngs=nnx.Rngs(1)))

    def __call__(self, tokens):
        return self.block(tokens)


bigrams = nnx.jit(Bigrams, static_argnums=0)
FLAX_IDS = "`nnx.Embed` block.layers.0.embedding"
# a model, its blocks if it is sharded, and the words for its embedding
BIGRAMS = {
    "outside of blocks": (nnx.Embed, nnx.Linear, FLAX_IDS),
    "in a block": (nnx.Embed, "block", FLAX_IDS),
    "not sharded": (nnx.Embed, None, "`nnx.Embed`"),
    "own": (gtp.Embed, None, "Embed"),
}


@pytest.mark.parametrize("model", BIGRAMS)
def test_float_token_ids_are_refused_by_the_embedding_and_the_leaf(model):
    embed, blocks, named = BIGRAMS[model]
    ids, came = np.ones((8, 8), np.float32), f"{named} float32 integers `ids.astype(jnp.int32)`"
    batch = {"weights": np.ones(8, np.float32), "ids": ids, "targets": np.ones((8, 8), np.int32)}
    loss = lambda model, batch: squares(model, batch["ids"][:, 1:])  # noqa: E731
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = bigrams(embed) if blocks is None else gtp.shard(bigrams(embed), blocks, min_size=64)
        state = gtp.TrainState.create(model, SGD)
        for microbatches, view in ((1, "global"), (2, "global"), (1, "local")):
            step = gtp.train_step(loss, SGD, microbatches=microbatches, view=view)
            with pytest.raises((TypeError, ValueError), match=naming(came, "`batch`['ids'] is")):
                step(state, batch)
        if blocks is not None or embed is gtp.Embed:
            with pytest.raises((TypeError, ValueError), match=naming(came, "(8, 8)")):
                model(ids)


def test_a_negative_target_is_left_out_like_a_weight_of_zero():
    with jax.set_mesh(gtp.make_mesh(**MESH)):
        state, batch = make_state(), make_batch()
        out, ones = np.random.default_rng(1).random((8, 8)) < 0.3, np.ones((8, 8), np.float32)
        marked = EVALUATE(state, {**batch, "targets": np.where(out, -100, batch["targets"]), "weights": ones})
        weighed = EVALUATE(state, {**batch, "weights": np.float32(~out)})
    assert float(marked["tokens"]) == float(weighed["tokens"]) == np.sum(~out)
    assert float(marked["loss"]) == float(weighed["loss"])


@pytest.mark.full
def test_gradients_outside_of_jit_are_those_within():
    x = np.random.default_rng(0).normal(size=(4, 2, 8)).astype(np.float32)
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        state = gtp.TrainState.create(
            placed(lambda rngs: gtp.MLP(8, 16, dtype="float32", rngs=rngs), 1), optax.sgd(0.1)
        )
        for count in (1, 2):
            call = lambda state, x, count=count: gtp.train.loss_and_gradients(squares, state, x, microbatches=count)  # noqa: E731
            for found, wanted in zip(host(call(state, x)), host(jax.jit(call)(state, x)), strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-5)


class Brings:
    """Remembers what was requested."""

    def __init__(self, step):
        self.step = step

    def own_step(self, request, optimizer, **limits):
        self.request, self.optimizer, self.limits = request, optimizer, limits
        return self.step


def test_a_step_that_replicas_bring_is_returned_as_it_is_and_is_told_what_was_asked_for():
    step, optimizer = lambda state, batch: (state, {}), optax.sgd(0.1)
    brings = Brings(step)
    options = dict(microbatches=2, seed=3, view="local", max_grad_norm=2.0, skip_nonfinite=False)
    assert gtp.train_step(squares, optimizer, replicas=brings, **options) is step and brings.optimizer is optimizer
    request = brings.request
    assert (request.loss, request.view, request.microbatches, request.seed) == (squares, "local", 2, 3)
    assert brings.limits.pop("options")() == gtp.train.compile_options("cpu", None, tp=1, fp8=False)
    assert brings.limits == {"max_grad_norm": 2.0, "skip_nonfinite": False}
    of_one_mesh = gtp.train_step(squares, optimizer, replicas=Brings(None))
    assert type(of_one_mesh) is type(gtp.train_step(squares, optimizer))


def test_a_state_made_for_another_mesh_is_refused():
    state = dense_state()
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        for run in (gtp.train_step(squares, SGD), gtp.eval_step(squares)):
            with pytest.raises(ValueError, match=naming("gtp 1 8 Build")):
                run(state, np.ones((8, 8), np.float32))


@pytest.mark.parametrize("degrees", others_full([dict(gtp=8), dict(gtp=4, tp=2)], [dict(gtp=4, tp=2)]), ids=str)
def test_no_device_holds_a_whole_model_at_birth(degrees):
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=64, intermediate_size=768
    )
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        _, make, keys = _birth(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(0))
        memory = make.lower(keys).compile().memory_analysis()
    whole = 4 * config.param_count()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < whole / 2


class Tokens(nnx.Module):
    def __init__(self, rngs):
        self.embed = gtp.Embed(8, 16, dtype="float32", rngs=rngs)
        self.layers = gtp.Stack(lambda rngs: gtp.MLP(16, 32, dtype="float32", rngs=rngs), 2, rngs=rngs)
        self.head = gtp.Dense(16, 8, dtype="float32", rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def counted(count):
    """A loss of tokens with a count of its own, which is given the logits of each example and its tokens."""

    def loss(model, batch):
        logits = model(batch)
        return jnp.sum(jax.nn.logsumexp(logits, -1)), count(logits, batch)

    return loss


def in_a_loop(count):
    """The same, added up example by example, as a loss in chunks does."""

    def loss(model, batch):
        def one(sums, example):
            return (sums[0] + jnp.sum(jax.nn.logsumexp(example[0], -1)), sums[1] + count(*example)), None

        return lax.scan(jax.checkpoint(one), (jnp.float32(0), jnp.float32(0)), (model(batch), batch))[0]

    return loss


@jax.custom_vjp
def both(losses, weights):
    return jnp.sum(losses * weights), jnp.sum(weights)


both.defvjp(lambda losses, weights: (both(losses, weights), weights), lambda weights, g: (g[0] * weights, None))


def of_one_function(weights):
    """The same, of a function with a derivative of its own."""

    def loss(model, batch):
        logits = model(batch)
        return both(jax.nn.logsumexp(logits, -1), jnp.float32(weights(logits, batch)))

    return loss


def right(logits, tokens):
    return jnp.argmax(logits, -1) == tokens


def in_a_branch(which):
    return counted(lambda *given: lax.cond(which(*given) > 9, lambda: 9.0, lambda: 7.0))


COUNTS = {
    "tokens": counted(lambda logits, tokens: jnp.sum(tokens > 1)),
    "a number": counted(lambda logits, tokens: tokens.size),
    "of the form of logits": counted(lambda logits, tokens: jnp.ones_like(logits[..., 0]).sum()),
    "in a loop": in_a_loop(lambda logits, tokens: jnp.sum(tokens > 1, dtype=jnp.float32)),
    "in a branch": in_a_branch(lambda logits, tokens: jnp.sum(tokens)),
    "of one function": of_one_function(lambda logits, tokens: tokens > 1),
    "declared": counted(lambda logits, tokens: gtp.train.as_count(jnp.sum(right(logits, tokens)))),
    "declared, with a gradient": counted(lambda logits, tokens: gtp.train.as_count(jnp.sum(logits))),
}
METRICS = {
    "an accuracy": counted(lambda logits, tokens: jnp.mean(right(logits, tokens))),
    "a number of tokens that are right": counted(lambda logits, tokens: jnp.sum(right(logits, tokens))),
    "with a gradient": counted(lambda logits, tokens: jnp.exp(jnp.mean(logits))),
    "without a gradient": counted(lambda logits, tokens: lax.stop_gradient(jnp.mean(logits))),
    "in a loop": in_a_loop(lambda logits, tokens: jnp.mean(right(logits, tokens))),
    "in a branch": in_a_branch(lambda logits, tokens: jnp.sum(logits)),
    "of one function": of_one_function(right),
}
WAYS = {
    "a step": lambda loss: gtp.train_step(loss, SGD),
    "microbatches": lambda loss: gtp.train_step(loss, SGD, microbatches=2),
    "an evaluation": gtp.eval_step,
    "a step in local view": lambda loss: gtp.train_step(loss, SGD, view="local", microbatches=2),
    "an evaluation in local view": lambda loss: gtp.eval_step(loss, view="local"),
    "codes": lambda loss: gtp.train_step(loss, SGD, recipe=gtp.FP8()),
    "codes in microbatches": lambda loss: gtp.train_step(loss, SGD, recipe=gtp.FP8(), microbatches=2),
    "an evaluation of codes": lambda loss: gtp.eval_step(loss, recipe=gtp.FP8()),
}
REFUSED = naming("second `has_aux=True` `gtp_jax.train.as_count(number)`")


@functools.cache
def tokens_state():
    return gtp.TrainState.create(placed(Tokens), SGD), np.ones((8, 4), np.int32)


@pytest.mark.parametrize("way, count", pairwise(WAYS, COUNTS, usual=8))
def test_a_count_of_the_batch_is_taken_as_a_count(way, count):
    with jax.set_mesh(gtp.make_mesh(gtp=2, dp=2, devices=jax.devices()[:4])):
        jax.eval_shape(WAYS[way](COUNTS[count]), *tokens_state())


@pytest.mark.parametrize("way, metric", pairwise(WAYS, METRICS, usual=8))
def test_a_metric_that_depends_on_weights_is_refused_as_a_count(way, metric):
    with jax.set_mesh(gtp.make_mesh(gtp=2, dp=2, devices=jax.devices()[:4])):
        with pytest.raises(TypeError, match=REFUSED):
            jax.eval_shape(WAYS[way](METRICS[metric]), *tokens_state())


class Kept(nnx.Module):
    """A model with variables of its own: weights of classes, and averages over steps."""

    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.classes, self.average = nnx.BatchStat(jnp.ones(4)), nnx.Variable(jnp.zeros(()))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def kept_loss(second):
    def loss(model, batch):
        before = model.average.get_value()
        logits = model.norm(model.linear(model.dropout(batch["x"])))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        model.average.set_value(0.9 * before + 0.1 * jnp.mean(losses))
        weights = model.classes.get_value()[batch["y"]]
        kept = jax.random.bernoulli(model.dropout.rngs(), 0.5, losses.shape)
        return jnp.sum(losses * weights), second(model, before, weights, kept)

    return loss


def test_a_count_may_come_from_variables_unless_they_are_computed_from_weights():
    batch = {"x": np.ones((4, 8), np.float32), "y": np.arange(4)}
    state = gtp.TrainState.create(nnx.jit(lambda: Kept(nnx.Rngs(0, dropout=1)))(), SGD)
    for make in (WAYS[way] for way in ("a step", "microbatches", "an evaluation")):
        jax.eval_shape(make(kept_loss(lambda model, before, weights, kept: jnp.sum(weights))), state, batch)
        jax.eval_shape(make(kept_loss(lambda model, before, weights, kept: jnp.sum(kept))), state, batch)
        for second in (
            lambda model, before, weights, kept: before,  # of the steps before this one
            lambda model, before, weights, kept: jnp.mean(model.norm.mean.get_value()),
        ):
            with pytest.raises(TypeError, match=REFUSED):
                jax.eval_shape(make(kept_loss(second)), state, batch)


class Writes(nnx.Module):
    def __init__(self, seen, rngs):
        self.linear = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)
        self.seen = seen

    def __call__(self, x):
        y = self.linear(x)
        before = self.seen.get_value()
        self.seen.set_value(y.mean() if before is None or before.ndim == 0 else jnp.concatenate([before, y[:1]]))
        return y


def stepped(make, **options):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(nnx.jit(make)(), optimizer)
    return gtp.train_step(squares, optimizer, **options)(state, np.ones((4, 4)))


CHANGES_OF_FORM = {
    "nothing yet": (lambda: nnx.Variable(None), "seen: from None to float64[]"),
    "another dtype": (lambda: gtp.nn.AuxLoss(jnp.zeros((), "float32")), "seen: from float32[] to float64[]"),
    "longer": (lambda: nnx.Cache(jnp.zeros((0, 4))), "seen: from float64[0, 4] to float64[1, 4]"),
}


@pytest.mark.parametrize("case, microbatches", pairwise(CHANGES_OF_FORM, [1, 2], usual=2))
def test_a_call_that_changes_the_form_of_a_variable_is_refused_by_name(case, microbatches, x64):
    make, line = CHANGES_OF_FORM[case]
    with pytest.raises(ValueError, match=naming("variables", "Create shape dtype")) as error:
        stepped(lambda: Writes(make(), nnx.Rngs(0)), microbatches=microbatches, skip_nonfinite=microbatches == 1)
    assert f"\n  {line}\n" in str(error.value)


def test_sown_values_are_dropped_by_a_step_and_refused_if_an_earlier_call_left_some(x64):
    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", y.mean())
            return y

    def called():
        model = Sows(nnx.Rngs(0))
        model(np.ones((4, 4)))
        return model

    assert stepped(lambda: Sows(nnx.Rngs(0)))[0].model_state == {}
    with pytest.raises(ValueError, match=naming("hidden.1 float64 nnx.pop nnx.Intermediate")):
        stepped(called)


def test_without_a_branch_or_a_mesh_a_step_returns_the_new_form(x64):
    state, _ = stepped(lambda: Writes(nnx.Cache(jnp.zeros((0, 4))), nnx.Rngs(0)), skip_nonfinite=False)
    assert jax.tree.map(jnp.shape, state.model_state) == {"seen": (1, 4)}
