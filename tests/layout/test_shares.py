"""The state of a model on each device is close to an even share, computed from layouts alone."""

import math

import jax
import pytest
from selection import others_full

import gtp_jax as gtp
from gtp_jax.layout import layouts_of_kernels
from gtp_jax.models import build, preset_of
from gtp_jax.nn import abstract_model, split_model, weight_owners


def abstract_mesh(**degrees):
    sizes = {"dp": 1, "gtp": 1, "tp": 1, "ep": 1, **degrees}
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    )


@pytest.mark.parametrize("preset", others_full(["8b", "70b", "qwen3-30b-a3b"], ["8b"]))
def test_state_is_within_15_percent_of_an_even_share_at_every_degree(preset):
    config = preset_of(preset)
    with abstract_mesh():
        model = abstract_model(lambda rngs: build(config, rngs=rngs))
        _, params, _, _ = split_model(model)
        groups = [owner.layouts for owner in weight_owners(model).values()]
    total = sum(x.size for x in jax.tree.leaves(params))
    stacked = [1 if config.vocab_size in layouts[0].shape else config.num_layers for layouts in groups]
    whole = total - sum(n * math.prod(one.shape) for n, own in zip(stacked, groups, strict=True) for one in own)
    assert 0 < whole < 0.01 * total, "norms, and the router's bias"
    worst = {}
    for degree in range(2, 73):
        with abstract_mesh(gtp=degree), gtp.layout.even_shares():
            again = [
                layouts_of_kernels([one.shape for one in own], rows=own[0].rows, split_dim=own[0].split_dim)
                for own in groups
            ]
        shards = sum(n * math.prod(one.stored_shape) for n, own in zip(stacked, again, strict=True) for one in own)
        worst[degree] = (shards + whole) / (total / degree)
    assert max(worst.values()) <= 1.15, max(worst.items(), key=lambda one: one[1])
