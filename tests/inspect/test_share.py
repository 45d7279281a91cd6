"""The state that a device stores is compared with an even share, on meshes of any size, from layouts alone."""

import warnings

import jax
import numpy as np
import pytest
from flax import nnx

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


@pytest.mark.parametrize("degrees", [dict(gtp=size) for size in (2, 5, 7, 11, 40, 72)] + [dict(dp=3, gtp=7)], ids=str)
def test_stock_layers_are_close_to_an_even_share_at_every_degree(degrees):
    with abstract_mesh(**degrees), gtp.even_shares(), warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing stays whole
        model = abstract_model(lambda rngs: gtp.shard(Stock(rngs), "layers.*"))
        share = gtp.explain(model).share
    assert share.even_bytes <= share.bytes <= 1.05 * share.even_bytes


@pytest.mark.parametrize(
    ("preset", "degrees", "even", "padded", "whole"),
    [
        ("8b", dict(gtp=7), 13.8, 13.8, 38.4),
        ("8b", dict(gtp=5), 19.3, 19.4, 96.4),
        ("8b", dict(gtp=72), 1.34, 1.34, 96.4),
        ("8b", dict(dp=2, gtp=7), 6.88, 6.89, 19.2),
        ("8b", dict(dp=3, gtp=8), 4.01, 4.04, 11.0),
        ("8b", dict(gtp=8, tp=3), 4.01, 4.07, 11.0),
        ("70b", dict(gtp=9, tp=8), 11.8, 11.9, 106),
        ("qwen3-30b-a3b", dict(gtp=7), 52.3, 53.2, 366),
    ],
)
def test_gigabytes_per_device_of_presets(preset, degrees, even, padded, whole):
    with abstract_mesh(**degrees), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pad, own in ((True, padded), (False, whole)):
            with gtp.even_shares(pad):
                share = gtp.explain(abstract_model(lambda rngs: build(preset_of(preset), rngs=rngs))).share
            assert share.degrees == degrees
            assert share.even_bytes / 1e9 == pytest.approx(even, rel=5e-3)
            assert share.bytes / 1e9 == pytest.approx(own, rel=5e-3)
    if preset == "8b" and degrees == dict(gtp=7):
        assert str(share) == (
            "weights in float32 and two moments take 38.4 GB per device; an even share over gtp 7 is 13.8 GB (+178.8%)"
        )


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
    assert str(alone) == "weights in float32 and two moments take 75.3 kB per device"


def test_frozen_weights_have_no_share_in_the_state():
    class Frozen(Adapted):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.adapter = nnx.LoRAParam(np.ones((3, 5), np.float32))

    frozen = gtp.freeze(gtp.init(Frozen, nnx.Rngs(0)), gtp.BF16())
    assert gtp.explain(frozen).share.bytes == 12 * 15
