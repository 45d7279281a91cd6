"""With cached keys and values, logits and tokens equal those of the whole sequence recomputed, on every mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.generation._caches import make_caches, put_caches, taken_caches
from gtp_jax.generation._weights import prepared
from gtp_jax.nn import split_model

from .models import DENSE, Windowed, forward, greedy, model_of, scope_of

EXPERTS = dataclasses.replace(DENSE, num_experts=4, top_k=2, qk_norm=False, shared_hidden=16)
# Qwen2 has biases; with YaRN, and a window that the sequences outgrow
QWEN2 = dataclasses.replace(
    DENSE,
    qk_norm=False,
    qkv_bias=True,
    window=5,
    rope_theta=100.0,
    rope_scaling=gtp.nn.RopeScaling(kind="yarn", factor=4.0, original_length=16),
)
CASES = {
    "no mesh": (None, DENSE, "once"),
    "gtp 8, each token": (dict(gtp=8), DENSE, "each_token"),
    "gtp 4 x tp 2": (dict(gtp=4, tp=2), DENSE, "once"),
    "dp 2 x gtp 2 x tp 2, looped": (dict(dp=2, gtp=2, tp=2), dataclasses.replace(DENSE, unroll=1), "each_token"),
    "gtp 2 x tp 3, heads divided unevenly": (dict(gtp=2, tp=3), DENSE, "once"),
    "experts, gtp 2 x ep 2": (dict(gtp=2, ep=2), EXPERTS, "once"),
    "experts, ep 2 x tp 2, each token": (dict(ep=2, tp=2), EXPERTS, "each_token"),
    "tied, gtp 4 x tp 2": (dict(gtp=4, tp=2), dataclasses.replace(DENSE, tie_embeddings=True), "once"),
    "Qwen2, gtp 4 x tp 2": (dict(gtp=4, tp=2), QWEN2, "once"),
    "Qwen2, gtp 2 x tp 3, each token": (dict(gtp=2, tp=3), QWEN2, "each_token"),
    "windows, gtp 4 x tp 2": (dict(gtp=4, tp=2), Windowed, "once"),
    "windows, gtp 8, each token": (dict(gtp=8), Windowed, "each_token"),
}
FEW = ["no mesh", "gtp 8, each token", "Qwen2, gtp 4 x tp 2", "windows, gtp 8, each token"]
ROWS, LENGTH, SIZES = 8, 16, np.array([5, 1, 8, 3, 7, 2, 8, 4])
TOKENS = np.random.default_rng(0).integers(0, 97, (ROWS, LENGTH))


@functools.cache
def whole(make):
    """Logits of the whole sequences, without a mesh and without caches."""
    return forward(model_of(make), TOKENS.tolist())[:, :LENGTH]


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_whole_sequence(name, x64):
    degrees, make, gather = CASES[name]
    wanted = whole(make)
    with scope_of(degrees):
        model, _ = prepared(model_of(make), gather)
        graph, state = nnx.split(model)

        def run(state, tokens, places, caches):
            model = nnx.merge(graph, state)
            begins = caches is None
            put_caches(model, make_caches(model, ROWS, LENGTH) if begins else caches, filled=not begins)
            logits = model(tokens, positions=places)
            return jax.lax.with_sharding_constraint(logits, PartitionSpec()) if degrees else logits, taken_caches(model)

        step, each = jax.jit(run), np.arange(ROWS)
        places = np.minimum(np.arange(8), SIZES[:, None] - 1)
        logits, caches = step(state, jnp.asarray(TOKENS[:, :8]), jnp.asarray(places), None)
        begun = np.asarray(logits)
        for row, size in enumerate(SIZES):
            np.testing.assert_allclose(begun[row, :size], wanted[row, :size], rtol=0, atol=1e-12)
        for further in range(8):  # rows of different lengths continue with their next tokens
            at = SIZES + further
            logits, caches = step(state, jnp.asarray(TOKENS[each, at])[:, None], jnp.asarray(at)[:, None], caches)
            np.testing.assert_allclose(np.asarray(logits)[:, 0], wanted[each, at], rtol=0, atol=1e-12)


PROMPTS = [[5, 3, 8, 1, 90], [7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@functools.cache
def oracle(make):
    return greedy(model_of(make), PROMPTS, 20)


@pytest.mark.parametrize("name", others_full(FEW, ["Qwen2, gtp 4 x tp 2"]))
def test_greedy_tokens_are_those_of_the_whole_sequence_alone_and_in_a_batch(name, x64):
    degrees, make, gather = CASES[name]
    wanted = oracle(make)
    with scope_of(degrees):
        model = model_of(make)
        before = nnx.state(model)
        found = gtp.generation.generate(model, PROMPTS, max_new_tokens=20, gather=gather)
        assert found.tokens.tolist() == wanted and found.lengths.tolist() == [20] * 3
        alone = gtp.generation.generate(model, PROMPTS[:1], max_new_tokens=20, gather=gather)
        assert alone.tokens.tolist() == wanted[:1]
        parts = list(gtp.generation.generate_stream(model, PROMPTS, max_new_tokens=20, gather=gather))
        assert [part.shape[1] for part in parts] == [1, 16, 3]
        assert np.concatenate(parts, 1).tolist() == wanted
        # the model is unchanged: its arrays, shardings and metadata
        after = nnx.state(model)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))


def test_a_row_ends_with_a_token_that_stops_it_and_the_others_go_on(x64):
    wanted = oracle(DENSE)
    model = model_of(DENSE)
    stops = (wanted[0][3], wanted[2][17])
    found = gtp.generation.generate(model, PROMPTS, max_new_tokens=20, stop=stops)
    for row, tokens in enumerate(wanted):
        length = next((i + 1 for i, token in enumerate(tokens) if token in stops), 20)
        assert found.lengths[row] == length
        assert found.tokens[row].tolist() == [*tokens[:length], *[-1] * (20 - length)]
    assert len(set(found.lengths.tolist())) > 1


class Letters:
    """A tokenizer whose tokens are two letters each, the second of which is `.`, `,` or nothing."""

    def decode(self, tokens):
        return "".join(chr(0x4E00 + token) + ("", ".", ",")[token % 3] for token in tokens)


@pytest.mark.parametrize("degrees", others_full([None, dict(gtp=4, tp=2)], [None]), ids=["no mesh", "gtp 4 x tp 2"])
def test_a_row_ends_with_the_token_that_completes_a_text_and_the_others_go_on(degrees, x64):
    wanted, text = oracle(DENSE), Letters()
    # a text over two tokens of one row; the beginning of one token of another; and a token of the third's prompt
    stops = [text.decode(wanted[0][2:4])[1:], text.decode(wanted[2][17:18])[:1], text.decode(PROMPTS[1][:1])]
    ends = [next((n for n in range(1, 21) if any(s in text.decode(row[:n]) for s in stops)), 20) for row in wanted]
    assert len(set(ends)) > 1 and ends[0] <= 4 and ends[2] <= 18
    with scope_of(degrees):
        model = model_of(DENSE)
        found = gtp.generation.generate(model, PROMPTS, max_new_tokens=20, stop=stops, tokenizer=text)
        assert found.lengths.tolist() == ends
        for row, tokens, end in zip(found.tokens, wanted, ends, strict=True):
            assert row.tolist() == [*tokens[:end], *[-1] * (20 - end)]
        # nothing is computed for rows that have ended
        alone = list(
            gtp.generation.generate_stream(model, PROMPTS[:1], max_new_tokens=20, stop=stops[0], tokenizer=text)
        )
        assert len(alone) == 2 and (np.concatenate(alone, 1) >= 0).sum() == ends[0]
        both = gtp.generation.generate(
            model, PROMPTS[:1], max_new_tokens=20, stop=[stops[0], wanted[0][1]], tokenizer=text
        )
        assert both.tokens[0, :2].tolist() == wanted[0][:2] and both.lengths[0] == 2


def test_one_token_of_a_padded_prompt(x64):
    padded = np.array([[5, 3, 8, 1, 90, 11, 12], [7, 7, 96, 95, 94, 93, 92]])
    found = gtp.generation.generate(model_of(DENSE), padded, lengths=[5, 2], max_new_tokens=1)
    assert found.tokens.tolist() == [row[:1] for row in oracle(DENSE)[:2]]


FROZEN = {"cast": (None, "each_token"), "MXFP8": (gtp.MXFP8(), "once"), "products": (gtp.FP8(matmuls=True), "once")}


@pytest.mark.full
@pytest.mark.parametrize("name", others_full(FROZEN, ["MXFP8"]))
def test_frozen_weights_generate_what_a_model_of_their_values_generates(name):
    recipe, in_scope = FROZEN[name]
    sizes = dict(num_layers=1, hidden_size=64, head_dim=8, intermediate_size=128, dtype="float32")
    config = dataclasses.replace(DENSE, **sizes)
    with scope_of(dict(gtp=2, tp=2)):
        frozen = gtp.nn.freeze(model_of(config), recipe, trained=lambda path, _: "scale" in path[-1])
        values = model_of(config)
        of_values = dict(nnx.to_flat_state(nnx.state(values)))
        codes = 0
        for path, v in nnx.to_flat_state(nnx.state(frozen, gtp.nn.Frozen)):
            held, layout = v.get_raw_value(), v.get_metadata()["layout"]
            if isinstance(held, gtp.formats.QuantizedArray):
                codes += 1
                array = gtp.ops.dequantize(held, dtype=jnp.float32)  # output features first
                array = jnp.swapaxes(array, -1, -2) if layout.rows == 1 else array
                of_values[path].set_value(jax.device_put(array, of_values[path].get_value().sharding))
        assert (codes > 0) == (recipe is not None)
        wanted = gtp.generation.generate(values, PROMPTS, max_new_tokens=12).tokens
        for gather in ("once", "each_token"):
            np.testing.assert_array_equal(
                gtp.generation.generate(frozen, PROMPTS, max_new_tokens=12, gather=gather).tokens, wanted
            )
        # a recipe in scope applies to training only
        with gtp.use_recipe(gtp.MXFP8()):
            again = gtp.generation.generate(values, PROMPTS, max_new_tokens=12, gather=in_scope)
        np.testing.assert_array_equal(again.tokens, wanted)


@pytest.mark.full
@pytest.mark.parametrize("gather", ["once", "each_token"])
def test_tokens_of_padded_codes_are_those_of_one_device(gather, x64):
    found = []
    for degrees in (dict(gtp=1), dict(gtp=7)):
        with scope_of(degrees), gtp.layout.even_shares():
            model = gtp.nn.freeze(model_of(DENSE), gtp.NVFP4(), trained=lambda path, _: "scale" in path[-1])
            stored = model.blocks.layers.mlp.down.kernel.get_raw_value().codes.shape
            found.append(gtp.generation.generate(model, PROMPTS[:2], max_new_tokens=6, gather=gather).tokens.tolist())
    assert stored == (2, 32, 56), "2 layers of 48 columns, padded to a block of 16 per rank"
    assert found[1] == found[0]


PADDED = [dict(gtp=7), dict(gtp=1, dp=7), dict(gtp=2, tp=3)]


@pytest.mark.full
@pytest.mark.parametrize(("degrees", "gather"), pairwise(PADDED, ["once", "each_token"]), ids=str)
def test_tokens_of_padded_models_are_those_without_a_mesh(degrees, gather, x64):
    wanted = [row[:6] for row in oracle(DENSE)[:2]]
    with scope_of(degrees), gtp.layout.even_shares():
        model = model_of(DENSE)
        assert split_model(model).model_def.padded
        before = nnx.state(model)
        found = gtp.generation.generate(model, PROMPTS[:2], max_new_tokens=6, gather=gather)
        assert found.tokens.tolist() == wanted
        after = nnx.state(model)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
