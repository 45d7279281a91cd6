"""The state of a model on each device is close to an even share, computed from layouts alone."""

import math
import warnings

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from selection import every, others_full

import gtp_jax as gtp
from gtp_jax.layout import layouts_of_kernels
from gtp_jax.models import build, preset_of
from gtp_jax.nn import abstract_model, split_model, weight_owners

# a float32 master and two moments of AdamW
STATE_BYTES = 12


def abstract_mesh(**degrees):
    sizes = {"dp": 1, "gtp": 1, "tp": 1, "ep": 1, **degrees}
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)
    )


def gigabytes(preset: str, **degrees: int) -> tuple[float, float]:
    """GB of state per device, and those of an even share."""
    with abstract_mesh(**degrees), gtp.even_shares(), warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing stays whole
        model_def, params, _, _ = split_model(abstract_model(lambda rngs: build(preset_of(preset), rngs=rngs)))
    logical = sum(map(math.prod, model_def.logical_shapes(params).values()))
    ranks = lambda entry: math.prod(degrees.get(axis, 1) for axis in np.ravel(entry or ()))  # noqa: E731
    specs = jax.tree.leaves(model_def.specs, is_leaf=lambda node: isinstance(node, PartitionSpec))
    own = sum(
        x.size // math.prod(ranks(entry) for entry in spec)
        for x, spec in zip(jax.tree.leaves(params), specs, strict=True)
    )
    return own * STATE_BYTES / 1e9, logical * STATE_BYTES / 1e9 / math.prod(degrees.values())


@pytest.mark.parametrize(
    ("preset", "degrees", "even", "most"),
    every(
        3,
        [
            ("8b", dict(gtp=7), 13.8, 1.05),
            ("8b", dict(gtp=72), 1.34, 1.08),
            ("70b", dict(gtp=9, tp=8), 11.8, 1.05),
            ("qwen3-30b-a3b", dict(gtp=7), 52.3, 1.05),
            ("8b", dict(dp=3, gtp=8), 4.01, 1.01),
            ("8b", dict(dp=3, gtp=4, tp=3), 2.68, 1.01),
            ("70b", dict(dp=3, gtp=8, tp=3), 11.8, 1.01),
            ("qwen3-30b-a3b", dict(dp=3, gtp=8), 15.3, 1.01),
        ],
    ),
)
def test_state_of_these_cases_is_close_to_an_even_share(preset, degrees, even, most):
    own, share = gigabytes(preset, **degrees)
    assert share == pytest.approx(even, rel=5e-3)
    assert own <= most * share


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
        with abstract_mesh(gtp=degree), gtp.even_shares():
            again = [
                layouts_of_kernels([one.shape for one in own], rows=own[0].rows, split_dim=own[0].split_dim)
                for own in groups
            ]
        shards = sum(n * math.prod(one.stored_shape) for n, own in zip(stacked, again, strict=True) for one in own)
        worst[degree] = (shards + whole) / (total / degree)
    assert max(worst.values()) <= 1.15, max(worst.items(), key=lambda one: one[1])
