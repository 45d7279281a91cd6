"""Weights that are padded for ZeRO over dp, and for an uneven tp, train as on one device."""

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from padded_states import moved, padding_of, same
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, next_token_loss

from .test_any_degree import ODD

WIDER = dataclasses.replace(ODD, intermediate_size=102)
EXPERTS = dataclasses.replace(ODD, num_experts=4, intermediate_size=34, num_layers=1)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
CASES = {
    # degrees, the model, the view, and the stored shapes of the kernels of the gate and of its output
    "gtp 2 x dp 3": (dict(gtp=2, dp=3), ODD, "local", (26, 102), (102, 26)),
    "gtp 2 x dp 3 in global view": (dict(gtp=2, dp=3), ODD, "global", (26, 102), (102, 26)),
    "gtp 3 x dp 2": (dict(gtp=3, dp=2), ODD, "local", (26, 102), (102, 26)),
    "gtp 2 x tp 2 x dp 2": (dict(gtp=2, tp=2, dp=2), WIDER, "local", (28, 102), (102, 28)),
    "tp 3 x gtp 2": (dict(gtp=2, tp=3), ODD, "local", (26, 102), (102, 26)),
    "tp 3 x gtp 2 in global view": (dict(gtp=2, tp=3), ODD, "global", (26, 102), (102, 26)),
    "tp 3 x dp 2": (dict(dp=2, tp=3), ODD, "local", (26, 102), (102, 26)),
    "experts, gtp 2 x dp 3": (dict(gtp=2, dp=3), EXPERTS, "local", (4, 34, 27), (4, 26, 36)),
    "experts, ep 2 x dp 3": (dict(ep=2, dp=3), EXPERTS, "local", (4, 34, 27), (4, 27, 34)),
    "experts, gtp 3 x ep 2": (dict(gtp=3, ep=2), EXPERTS, "local", (4, 34, 27), (4, 27, 34)),
}


def mesh_of(degrees):
    return gtp.make_mesh(**{"gtp": 1, **degrees}, devices=jax.devices()[: math.prod(degrees.values())])


@contextlib.contextmanager
def even_on(degrees):
    with jax.set_mesh(mesh_of(degrees)), gtp.even_shares():
        yield


def state_of(config, optimizer, seed=0):
    return gtp.TrainState.create(gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(seed)), optimizer)


@functools.cache
def trained(config, name, view="local", microbatches=1, reduce_over_dp="each", **degrees):
    """The logical parameters and the losses of two steps, and the stored shapes of padded parameters."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12, 7)).astype(np.int32)
    with even_on(degrees), warnings.catch_warnings():
        warnings.filterwarnings("error", "a weight of shape .* stays whole")
        state = state_of(config, OPTIMIZERS[name])
        options = dict(view=view, microbatches=microbatches, reduce_over_dp=reduce_over_dp, max_grad_norm=0.5)
        step, found = gtp.train_step(next_token_loss, OPTIMIZERS[name], **options), []
        for row in tokens:
            state, metrics = step(state, {"tokens": row[:, :-1], "targets": row[:, 1:]})
            found.append([float(metrics[key]) for key in ("loss", "grad_norm")])
        padded = {"/".join(path): layout.array_shape for path, layout in state.model_def.padded.items()}
        assert not padding_of(state).any() and bool(padded) == bool(degrees)
        return jax.tree.map(np.asarray, state.logical().params), found, padded


@pytest.mark.parametrize(
    ("case", "name"), others_full(zip(CASES, itertools.cycle(OPTIMIZERS)), [("gtp 2 x dp 3", "adamw")])
)
@pytest.mark.filterwarnings("ignore:the optimizer treats the layers")
def test_steps_of_padded_weights_are_those_of_one_device(case, name, x64):
    degrees, config, view, *shapes = CASES[case]
    wanted, losses, _ = trained(config, name)
    found, own, padded = trained(config, name, view, **degrees)
    stem = "blocks/layers/mlp/"
    assert [padded.get(f"{stem}up/kernel/gate"), padded.get(f"{stem}down/kernel")] == shapes
    np.testing.assert_allclose(own, losses, rtol=1e-13)
    same(found, wanted)


SCHEDULES = {
    "all kept": dict(keep_gathered="all"),
    "none kept, looped": dict(keep_gathered=0, unroll=1),
    "everything saved": dict(remat="everything"),
    "nothing saved, looped": dict(remat="nothing", unroll=1),
    "waited for, tied": dict(prefetch=False, tie_embeddings=True),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "view"), list(zip(SCHEDULES, itertools.cycle(["local", "global"]))))
def test_schedules_of_padded_weights_are_those_of_one_device(name, view, x64):
    config = dataclasses.replace(ODD, num_heads=5, num_kv_heads=5, head_dim=2, **SCHEDULES[name])
    wanted, losses, _ = trained(config, "adamw")
    found, own, padded = trained(config, "adamw", view, gtp=3)
    assert padded["blocks/layers/attention/out/kernel"] == (10, 27), "padded rows, of a matrix by itself"
    np.testing.assert_allclose(own, losses, rtol=1e-13)
    same(found, wanted)


@pytest.mark.full
@pytest.mark.parametrize("reduce_over_dp", ["each", "last"])
def test_microbatches_of_padded_weights_are_those_of_one_device(reduce_over_dp, x64):
    wanted, losses, _ = trained(ODD, "adamw")
    found, own, _ = trained(ODD, "adamw", microbatches=2, reduce_over_dp=reduce_over_dp, gtp=2, dp=3)
    np.testing.assert_allclose(own, losses, rtol=1e-13)
    same(found, wanted)


@pytest.mark.full
def test_a_checkpoint_moves_from_gtp_8_to_gtp_2_x_dp_3_to_tp_3_x_gtp_2_and_back(tmp_path, x64):
    meshes = (dict(gtp=8), dict(gtp=2, dp=3), dict(gtp=2, tp=3), dict(gtp=8))
    with Checkpoints(tmp_path) as checkpoints:
        moved(checkpoints, map(even_on, meshes), lambda number: state_of(ODD, OPTIMIZERS["adamw"], seed=number))
