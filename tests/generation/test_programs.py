"""The programs that generation compiles, the weights that they gather, and the memory that they need."""

import dataclasses
from collections import Counter

import jax.numpy as jnp
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.generation import _generate, _programs, _weights
from gtp_jax.mesh import DeviceMemory
from gtp_jax.models import LlamaConfig

from .models import DENSE, greedy, model_of, scope_of

LAYERS = 2
# each kind of weight has a shape of its own; the embedding and the head share one
SIZES = LlamaConfig(
    vocab_size=640, hidden_size=128, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=384,
)  # fmt: skip
WEIGHTS = {(512, 128): LAYERS, (128, 256): LAYERS, (768, 128): LAYERS, (128, 384): LAYERS, (640, 128): 2}


@pytest.fixture
def programs(monkeypatch):
    """The compiled text of every program of generation that runs, by name."""
    found = {}
    for owner, name in ((_generate, "prefill"), (_generate, "decode"), (_weights, "_fused"), (_weights, "_whole")):
        jitted = getattr(owner, name)

        def run(*args, jitted=jitted, name=name, **kwargs):
            found[name] = jitted.lower(*args, **kwargs).compile()
            return jitted(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)
    return found


def gathers(program):
    """The weights that a program gathers, by shape; and those among them in its loop."""
    found = [c for c in hlo.collectives(program.as_text()) if c.kind == "all-gather"]
    counts = Counter(), Counter()
    for c in found:
        for shape in c.results:
            if shape.dims in WEIGHTS:
                counts[0][shape.dims] += 1
                counts[1][shape.dims] += not c.exact
    return counts


@pytest.mark.parametrize("degrees", others_full([dict(gtp=1, tp=2), dict(gtp=8)], [dict(gtp=8)]), ids=str)
def test_no_token_gathers_a_weight_that_is_whole(degrees, programs):
    with scope_of(degrees):
        gtp.generation.generate(model_of(SIZES), [[1, 2, 3]], max_new_tokens=4)
    for name in ("prefill", "decode"):
        assert gathers(programs[name])[0] == {}
    moved = [c for c in hlo.collectives(programs["_fused"].as_text()) if c.kind == "all-gather"]
    if degrees["gtp"] == 1:
        assert not moved
    else:  # each weight is gathered once, after it has been cast
        assert gathers(programs["_fused"])[0] == WEIGHTS
        assert {c.dtype for c in moved} == {"u16"}
    assert "_whole" not in programs


@pytest.mark.full
def test_codes_are_gathered_once_as_codes(programs):
    with scope_of(dict(gtp=8)):
        frozen = gtp.nn.freeze(model_of(SIZES), gtp.MXFP8(), trained=lambda path, _: path[-1] == "scale")
        gtp.generation.generate(frozen, [[1, 2, 3]], max_new_tokens=4)
    moved = [c for c in hlo.collectives(programs["_whole"].as_text()) if c.kind == "all-gather"]
    sent = sum(c.result_bytes for c in moved)
    elements = sum(rows * cols * count for (rows, cols), count in WEIGHTS.items())
    table = 2 * 640 * 128  # embedding and head stay in bfloat16
    assert sent == (elements - table) * (1 + 1 / 32) + 2 * table
    assert gathers(programs["decode"])[0] == {} and "_fused" not in programs


@pytest.mark.full
def test_every_token_gathers_each_weight_of_each_layer_once(programs):
    with scope_of(dict(gtp=8)):
        gtp.generation.generate(model_of(SIZES), [[1, 2, 3]], max_new_tokens=4, gather="each_token")
    everywhere, in_loop = gathers(programs["decode"])
    assert everywhere == in_loop == WEIGHTS
    assert gathers(programs["prefill"])[0] == WEIGHTS
    assert "_whole" not in programs and "_fused" not in programs


@pytest.mark.full
def test_the_caches_are_donated_and_prefill_computes_one_row_of_logits(programs):
    with scope_of(dict(gtp=8)):
        gtp.generation.generate(model_of(SIZES), [[1] * 60], max_new_tokens=4)
    caches = 2 * LAYERS * 64 * 2 * 64 * 2  # keys and values: 64 slots for one row per device
    fills = 4 * LAYERS
    assert programs["decode"].memory_analysis().alias_size_in_bytes == caches + fills
    text = programs["prefill"].as_text()
    assert "64,640]" not in text and "[1,640]" in text  # one of the 64 positions of each device's row


@pytest.mark.full
def test_there_are_two_programs_for_all_that_fits_into_a_power_of_two():
    sizes = lambda: (_programs.prefill._cache_size(), _programs.decode._cache_size())  # noqa: E731
    with scope_of(dict(gtp=2)):
        model = model_of(dataclasses.replace(DENSE, dtype="float32", num_layers=1))
        _programs.prefill.clear_cache()
        _programs.decode.clear_cache()
        for prompts, more in (([[1, 2, 3, 4, 5]], 20), ([[1, 2, 3, 4, 5, 6, 7], [3] * 8], 24)):
            for options in (dict(temperature=0.5), dict(temperature=1.0, seed=3)):
                gtp.generation.generate(model, prompts, max_new_tokens=more, stop=7, **options)
                assert sizes() == (1, 1)
        gtp.generation.generate(model, [[1, 2, 3, 4, 5]], max_new_tokens=40, stop=7, temperature=0.5)
        assert sizes() == (2, 2)


def test_without_room_for_a_whole_copy_the_bytes_of_every_token_are_said(programs, monkeypatch):
    monkeypatch.setattr(_weights, "device_memory", lambda: DeviceMemory(10**9, 100_000))
    with scope_of(dict(gtp=8)):
        model = model_of(SIZES)
        with pytest.warns(UserWarning, match=naming("1.31 MB")):
            gtp.generation.generate(model, [[1, 2, 3]], max_new_tokens=4)
    assert gathers(programs["decode"])[1] == WEIGHTS


def test_dropout_is_off_and_variables_stay_as_they_were():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = gtp.Embed(20, 16, rngs=rngs, dtype=jnp.float32)
            self.attention = gtp.Attention(16, num_heads=2, dropout_rate=0.9, rngs=rngs, dtype=jnp.float32)
            self.drop = nnx.Dropout(0.9, rngs=rngs)
            self.calls = nnx.Variable(jnp.int32(0))
            self.head = gtp.Dense(16, 20, rngs=rngs, dtype=jnp.float32)

        def __call__(self, tokens, *, positions=None):
            self.calls.set_value(self.calls.get_value() + 1)
            x = self.embed(tokens)
            return self.head(self.drop(x + self.attention(x, positions=positions)))

    model = gtp.init(Model, nnx.Rngs(0, dropout=1))
    found = gtp.generation.generate(model, [[1, 2, 3]], max_new_tokens=6).tokens[0].tolist()
    assert model.calls.get_value() == 0 and not model.drop.deterministic
    model.eval()
    assert [found] == greedy(model, [[1, 2, 3]], 6)
