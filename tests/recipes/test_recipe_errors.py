"""What recipes refuse, and what they say of a model."""

import json

import jax
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model, groups_of, shards_of
from gtp_jax.weights import quantize

CONFIG = LlamaConfig(
    vocab_size=640, hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384
)


loss = next_token_loss


def abstract_llama():
    return abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs))


class Matmuls(nnx.Module):
    def __init__(self, rngs):
        self.fits = gtp.Dense(64, 96, rngs=rngs)
        self.ragged = gtp.Dense(80, 48, rngs=rngs)


def gpu(kind):
    """A mesh in scope of a GPU that is not there."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


REFUSED = [
    (lambda: gtp.NVFP4(block=(8, 8)), ValueError, "`block` (8, 8) (16, 16) (1, 16)"),
    (lambda: gtp.FP8(grad_wire=["fp8"]), ValueError, "`grad_wire` ['fp8'] 'bf16' 'fp8' 'mxfp8' `None`"),
    (lambda: gtp.FP8(gradient=["e5m2"]), ValueError, "`gradient` ['e5m2'] 'e5m2' 'e4m3'"),
    (lambda: gtp.FP8(matmuls="all"), TypeError, "`matmuls` 'all' True False"),
    (lambda: gtp.MXFP8(exclude="head"), TypeError, "`exclude` 'head' tuple"),
    (lambda: gtp.NVFP4(block=(1, 16), matmuls=True), ValueError, "`matmuls` `block` (16, 16)"),
    (lambda: gtp.NVFP4(high_precision_last=-1), ValueError, "`high_precision_last` -1"),
    (lambda: gtp.NVFP4(override={"down": "mxfp8"}), TypeError, "`override` patterns"),
    (
        lambda: gtp.NVFP4(override={"down": gtp.MXFP8(high_precision_first=2)}),
        ValueError,
        "`override` 'down' `exclude` `high_precision_first` no effect",
    ),
    (lambda: gtp.NVFP4(override=(("down", gtp.MXFP8()), ("down", gtp.FP8()))), ValueError, "pattern twice"),
    (
        lambda: gtp.train_step(loss, optax.sgd(1.0), recipe="nvfp4"),
        TypeError,
        "`recipe` 'nvfp4' gtp_jax.recipes.BF16()",
    ),
    (lambda: gtp.eval_step(loss, recipe=gtp.NVFP4), TypeError, "parentheses"),
]


@pytest.mark.parametrize("make, error, message", REFUSED)
def test_bad_recipes_are_refused_when_they_are_made(make, error, message):
    with pytest.raises(error, match=naming(message)):
        make()


LACKED = [
    (gtp.NVFP4(override={"mlp.dwn": gtp.MXFP8()}), "'mlp.dwn' blocks.layers.mlp.down"),
    (gtp.NVFP4(exclude=("embed", "heads")), "'heads' no module"),
    (gtp.NVFP4(override={"mlp": gtp.MXFP8(), "mlp.down": gtp.recipes.BF16()}), "'mlp.down' before 'mlp'"),
    (gtp.NVFP4(high_precision_first=2, high_precision_last=2), "4 blocks 3"),
]


@pytest.mark.parametrize("recipe, message", LACKED)
def test_recipes_that_speak_of_what_a_model_lacks_are_refused(recipe, message):
    model = abstract_llama()
    with pytest.raises(ValueError, match=naming(message)):
        gtp.explain(model, recipe)
    state = gtp.TrainState.create(model, optax.sgd(1.0))
    tokens = jax.ShapeDtypeStruct((2, 8), "int32")
    with pytest.raises(ValueError, match=naming(message)):
        gtp.train_step(loss, optax.sgd(1.0), recipe=recipe).lower(state, {"tokens": tokens, "targets": tokens})


HIDDEN = {
    "an exclusion after an override": (
        gtp.NVFP4(exclude=("head", "mlp.up"), override={"mlp": gtp.MXFP8()}),
        "`override` `exclude` 'mlp.up': gtp_jax.recipes.BF16() before 'mlp'",
        gtp.NVFP4(exclude=("head",), override={"mlp.up": gtp.recipes.BF16(), "mlp": gtp.MXFP8()}),
    ),
    "an exclusion after overrides of some of its modules": (
        gtp.NVFP4(exclude=("mlp",), override={"qkv": gtp.FP8(), "up": gtp.FP8(), "down": gtp.MXFP8()}),
        "'mlp': gtp_jax.recipes.BF16() before 'up' 'down'",
        gtp.NVFP4(override={"qkv": gtp.FP8(), "up": gtp.FP8(), "down": gtp.MXFP8()}),
    ),
    "a pattern that is both": (
        gtp.NVFP4(exclude=("mlp",), override={"qkv": gtp.FP8(), "mlp": gtp.MXFP8()}),
        "Remove `exclude` `override`",
        gtp.NVFP4(exclude=("mlp",), override={"qkv": gtp.FP8()}),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_the_remedy_for_a_pattern_without_effect_is_possible_and_names_only_patterns_of_its_modules(name):
    hidden, remedy, remedied = HIDDEN[name]
    model = abstract_llama()
    with pytest.raises(ValueError, match=naming("no effect", remedy)) as caught:
        gtp.explain(model, hidden)
    assert "'qkv'" not in str(caught.value)
    assert gtp.explain(model, remedied).facts


def test_models_without_weights_to_quantize_are_refused():
    linear = nnx.Linear(64, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=naming("`recipe` NVFP4 Linear")):
        gtp.explain(linear, gtp.NVFP4())
    assert not gtp.explain(linear, gtp.recipes.BF16()).facts


def test_a_head_that_is_not_there_is_kept_quietly_but_not_overridden():
    model = abstract_model(lambda rngs: gtp.MLP(64, 128, rngs=rngs))
    assert {fact.wire for fact in gtp.explain(model, gtp.NVFP4()).facts} == {"NVFP4"}
    with pytest.raises(ValueError, match=naming("'head' no module down up")):
        gtp.explain(model, gtp.NVFP4(override={"head": gtp.MXFP8()}))


def test_the_first_rule_that_matches_counts():
    down = gtp.MXFP8(matmuls=True)
    recipe = gtp.NVFP4(matmuls=True, exclude=("head", "mlp"), override={"mlp.d*": down, "down": gtp.FP8()})
    path = ("blocks", "layers", "mlp")
    assert recipe.of((*path, "down")) == down
    assert recipe.of((*path, "up")) == gtp.recipes.BF16()
    assert recipe.of(("blocks", "layers", "attention", "out")) == recipe
    assert recipe.of(("attention", "d")) == recipe  # names follow one another
    # of a shared module's paths, that which the first rule matches decides
    assert recipe.rule_of([("head",), (*path, "down")]) == ("mlp.d*", down)
    assert recipe.rule_of([("attention",), ("out",)]) == (None, recipe)
    assert recipe.describe()["override"]["mlp.d*"]["name"] == "MXFP8"
    json.dumps(recipe.describe())


@pytest.mark.parametrize("first, pattern", [("blocks", "blocks.*.{}"), ("head", "{}")])
def test_a_pattern_has_the_same_modules_packed_as_explain_says(first, pattern):
    model = abstract_llama()
    graph, state = nnx.split(model)
    names = [fact.module for fact in gtp.explain(model, None).facts if fact.module.startswith(first)]
    for name in names:
        chosen = pattern.format(name.removeprefix("blocks.layers.") if "*" in pattern else name)
        recipe = gtp.NVFP4(override={chosen: gtp.MXFP8()})
        groups = groups_of(model, recipe)
        packed = jax.eval_shape(lambda s, groups=groups: quantize(groups, shards_of(nnx.merge(graph, s))), state)
        found = {
            ".".join(map(str, ("blocks", "layers", *member) if path[0] == "blocks" else path)): one.wire.format.name
            for path, stretches in packed.items()
            for one in stretches
            for member in one.wire.members
        }
        said = {fact.module: fact.wire for fact in gtp.explain(model, recipe).facts if fact.wire != "bfloat16"}
        assert found == said and found[name] == "MXFP8"


def test_explain_tells_layers_and_operands_apart():
    model = abstract_llama()
    recipe = gtp.NVFP4(matmuls=True, high_precision_last=1, override={"mlp.down": gtp.MXFP8()})
    found = gtp.explain(model, recipe)
    facts = {(f.module.removeprefix("blocks.layers."), f.first): f for f in found.facts}
    up, last, down = facts["mlp.up", 0], facts["mlp.up", 2], facts["mlp.down", 0]
    assert (up.layers, last.layers, down.layers) == (2, 1, 2)
    assert (up.wire, last.wire, down.wire) == ("NVFP4", "bfloat16", "MXFP8")
    assert up.forward == "E2M1 1x16 x E2M1 16x16" and up.wgrad == "E2M1 1x16, stochastic x E2M1 1x16; both Hadamard"
    assert up.matmul == "NVFP4_1D: bfloat16 on dequantized values" and not down.forward and not last.forward
    assert "gradient x input" in str(found) and "0-1" in str(found)


def test_explain_names_what_no_recipe_touches():
    class Foreign(nnx.Module):
        def __init__(self, rngs):
            self.blocks = gtp.Stack(lambda rngs: gtp.nn.MoE(64, 128, num_experts=4, rngs=rngs), length=2, rngs=rngs)
            self.biased = gtp.Dense(64, 64, use_bias=True, rngs=rngs)
            self.linear = nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    found = gtp.explain(abstract_model(Foreign), gtp.NVFP4())
    untouched = {"blocks.layers.router", "blocks.layers.scale", "biased.bias", "linear.kernel"}
    assert set(found.untouched) == untouched and "biased" in {fact.module for fact in found.facts}
    assert all(name in str(found).splitlines()[-1] for name in untouched)


def test_explain_says_which_products_are_scaled_matmuls_where_there_are_any():
    with gpu("NVIDIA B200"):
        model = abstract_model(lambda rngs: Matmuls(rngs))
        found = {fact.module: fact.matmul for fact in gtp.explain(model, gtp.MXFP8(matmuls=True)).facts}
        transformed = gtp.explain(model, gtp.NVFP4(matmuls=True)).facts
    values = "bfloat16 on dequantized values"
    assert found["fits"] == f"MXFP8: scaled_matmul, but wgrad where tokens fill no whole blocks: {values}"
    assert found["ragged"].startswith("MXFP8: scaled_matmul, but forward along 80, dgrad along 48, wgrad")
    assert {fact.matmul for fact in transformed} == {"NVFP4_1D: scaled_matmul"}


@pytest.mark.parametrize("kind, able", [("Tesla T4", False), ("NVIDIA A100-SXM4-80GB", True), ("NVIDIA H200", True)])
def test_gpus_that_no_kernel_is_built_for_run_the_reference(kind, able):
    quantize = jax.jit(lambda x: gtp.ops.quantize(x, gtp.formats.NVFP4))
    with gpu(kind):
        x = jax.ShapeDtypeStruct((64, 64), "float32")
        text = quantize.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        if not able:
            with pytest.raises(NotImplementedError, match=naming("8.0 (A100)")):
                jax.eval_shape(lambda x: gtp.ops.quantize(x, gtp.formats.NVFP4, implementation="native"), x)
    assert ("gtp_quantize" in text) == (able and native.has("gtp_quantize", "CUDA"))


class Otherwise(nnx.Module):
    """Embeddings and heads under the names that other models give them."""

    def __init__(self, rngs):
        self.wte = gtp.Embed(64, 64, rngs=rngs)
        self.position_embedding = gtp.Embed(64, 64, rngs=rngs)
        self.c_fc = gtp.Dense(64, 96, rngs=rngs)
        self.lm_head = gtp.nn.LayerNormDense(96, 64, rngs=rngs)


def test_embeddings_and_heads_stay_in_high_precision_also_by_other_names():
    facts = gtp.explain(abstract_model(Otherwise), gtp.NVFP4()).facts
    wires = {fact.module: fact.wire for fact in facts}
    assert wires.pop("c_fc") == "NVFP4" and set(wires.values()) == {"bfloat16"} and len(wires) == 3
    named = gtp.explain(abstract_model(Otherwise), gtp.NVFP4(exclude=("lm_head",))).facts
    assert {fact.module for fact in named if fact.wire == "bfloat16"} == {"lm_head"}
