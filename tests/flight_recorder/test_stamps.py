"""Stamps are executed in the order of the plan, and change no number."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.chain import Barrier, Compute, Loop, Schedule, plan
from gtp_jax.flight_recorder import PLACES, own_stamps
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

LAYERS = 4
SIZES = dict(vocab_size=128, hidden_size=32, num_layers=LAYERS, num_heads=8, num_kv_heads=8, head_dim=4)

pytestmark = pytest.mark.skipif(not native.has("gtp_stamp", "cpu"), reason="the kernels are not built")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(128, 128, rngs=rngs), nnx.Linear(128, 128, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(128, 128, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(128, 128, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()


def trained(kind, options, *, recorded):
    """The state and the metrics after a step on eight devices, and the places where the devices have been."""
    optimizer, tokens = optax.adamw(1e-3), jnp.arange(8 * 16).reshape(8, 16) % 128
    with jax.set_mesh(gtp.make_mesh(gtp=8)), gtp.recorder() if recorded else contextlib.nullcontext():
        if kind == "shard":
            model, loss = gtp.shard(Model(nnx.Rngs(0)), "layers.*", schedule=Schedule(**options)), mean_loss
        else:
            config = LlamaConfig(**SIZES, intermediate_size=64, **options)
            model, loss = Llama(config, rngs=nnx.Rngs(0)), next_token_loss
        state = gtp.TrainState.create(model, optimizer)
        step = gtp.train_step(loss, optimizer, view="global" if kind == "shard" else "local")
        before = [own_stamps()[1].of(device)[-1:] for device in jax.devices()]
        found = jax.block_until_ready(step(state, {"tokens": tokens, "targets": tokens}))
    last = [own[0][0] if own else 0 for own in before]
    stamps = [own_stamps()[1].of(device) for device in jax.devices()]
    return found, [[PLACES.text(id) for n, id in own if n > least] for own, least in zip(stamps, last, strict=True)]


def flat(events, backward):
    """The layers of a plan's events in order, each with what must end after it, as (event, stage, layer)."""
    found, group = [], []
    for event in events:
        if isinstance(event, Loop):
            numbers = range(event.start, event.stop)
            for number in reversed(numbers) if backward else numbers:
                found += [
                    (stage, number + layer, [(kind, s, number + at) for kind, s, at in waits])
                    for stage, layer, waits in flat(event.body, backward)
                ]
        elif isinstance(event, Barrier):
            group = []
        elif isinstance(event, Compute):
            found.append((event.stage, event.layer, group))
            group[:] = [own for own in group if own[1:] != (event.stage, event.layer)]
        if not isinstance(event, Barrier | Loop | Compute):
            group.append((type(event).__name__.lower(), event.stage, event.layer))
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("Stack", {}, marks=pytest.mark.full, id="Stack"),
        pytest.param("Stack", {"unroll": 1}, marks=pytest.mark.full, id="loop"),
        pytest.param("shard", {}, id="shard"),
        pytest.param("shard", {"prefetch": False}, marks=pytest.mark.full, id="no-prefetch"),
    ],
)
def test_stamps_follow_the_plan_and_change_no_bit(kind, options):
    (one, none), (other, places) = (trained(kind, options, recorded=recorded) for recorded in (False, True))
    assert none == [[]] * 8
    for expected, found in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    if kind == "Stack":
        lengths, names = [1, LAYERS, 1], ["Embed", "LlamaBlock[{}]", "LayerNormDense"]
    else:
        lengths, names = [1] * (LAYERS + 2), ["embed", *(f"layers.{i}" for i in range(LAYERS)), "head"]
    events = plan(lengths, Schedule(**options))
    expected = [("at the beginning of a step", [])]
    for direction in ("forward", "backward"):
        for stage, layer, waits in flat(getattr(events, direction), direction == "backward"):
            name = names[stage].format(layer)
            expected += [(f"in {direction} of {name}", []), (f"after {direction} of {name}", waits)]
    expected += [("in the update", [])]
    for own in places:
        assert [place.partition(", ")[0] for place in own] == [text for text, _ in expected]
        if options.get("prefetch", True):
            for place, (text, waits) in zip(own, expected, strict=True):
                ends = {f"{kind} of {names[stage].format(layer)}" for kind, stage, layer in waits}
                found = place.partition("before the end of the ")[2].split(" and the ")
                assert not text.startswith("after") or set(found) - {""} == ends, place
    if not options.get("prefetch", True):
        assert "after forward of layers.0, before the end of the gather of layers.1" in places[0]
        assert any(
            p == "after backward of layers.1, before the end of the reduce of layers.1 and the gather of layers.0"
            for p in places[0]
        )
