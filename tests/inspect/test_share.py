"""The state that a device stores is compared with an even share, on meshes of any size, from layouts alone."""

import contextlib
import re
import warnings

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming

import gtp_jax as gtp
from gtp_jax.models import build, preset_of
from gtp_jax.nn import abstract_model


def abstract_mesh(**degrees):
    sizes = {"dp": 1, "gtp": 1, "tp": 1, "ep": 1, **degrees}
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    )


class Stock(nnx.Module):
    """Flax layers of the sizes of GPT-2."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(50257, 768, rngs=rngs)
        self.layers = nnx.List([nnx.MultiHeadAttention(12, 768, decode=False, rngs=rngs) for _ in range(2)])
        self.up, self.down = nnx.Linear(768, 3072, rngs=rngs), nnx.Linear(3072, 768, rngs=rngs)


@pytest.mark.parametrize("degrees", [dict(gtp=2), dict(gtp=7), dict(gtp=72), dict(dp=3, gtp=7)], ids=str)
def test_stock_layers_are_close_to_an_even_share_at_every_degree(degrees):
    with abstract_mesh(**degrees), warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing stays whole
        model = abstract_model(lambda rngs: gtp.shard(Stock(rngs), "layers.*"))
        share = gtp.explain(model).share
        assert share.even_bytes <= share.bytes <= 1.05 * share.even_bytes
        warnings.simplefilter("ignore")  # that the state pads
        state = gtp.TrainState.create(model, optax.adamw(1e-3))
        assert gtp.explain(state.model()).share == share, "what the state stores"


def test_what_a_device_stores_of_a_preset_is_told_with_padding_and_without():
    with abstract_mesh(gtp=7), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scope, own in ((contextlib.nullcontext(), 13.8), (gtp.layout.even_shares(False), 38.4)):
            with scope:
                share = gtp.explain(abstract_model(lambda rngs: build(preset_of("8b"), rngs=rngs))).share
            assert share.degrees == dict(gtp=7)
            assert share.even_bytes / 1e9 == pytest.approx(13.8, rel=5e-3)
            assert share.bytes / 1e9 == pytest.approx(own, rel=5e-3)
    assert re.search(naming("38.4 GB per device; gtp 7 13.8 GB (+178.8%)"), str(share))


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.up = gtp.Dense(64, 96, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)


def test_bytes_are_those_of_the_arrays_on_a_mesh_and_without_one():
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.init(Adapted, nnx.Rngs(0))
        found = gtp.explain(model)
    arrays = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(model))]
    own = sum(x.addressable_shards[0].data.size for x in arrays)
    assert own < sum(x.size for x in arrays)
    assert (found.share.bytes, found.share.degrees) == (12 * own, {"gtp": 8})
    assert gtp.explain(model).share == found.share, "arrays know their mesh"
    assert f"\n\n{found.share}\n\n" in str(found)
    alone = gtp.explain(gtp.init(Adapted, nnx.Rngs(0))).share
    assert alone.bytes == alone.even_bytes == 12 * sum(np.size(x) for x in arrays)
    assert re.search(naming("75.3 kB per device"), str(alone)) and "even share" not in str(alone)


def test_frozen_weights_have_no_share_in_the_state():
    class Frozen(Adapted):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.adapter = nnx.LoRAParam(np.ones((3, 5), np.float32))

    frozen = gtp.nn.freeze(gtp.init(Frozen, nnx.Rngs(0)), gtp.recipes.BF16())
    assert gtp.explain(frozen).share.bytes == 12 * 15
