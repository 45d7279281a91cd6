"""Tunix's models compute what transformers computed of the checkpoints that it wrote, on one device and sharded.

Run with `-rP`, these tests print the differences that docs/models-from-elsewhere.md states.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

pytest.importorskip(
    "tunix", reason="google-tunix is not installed; tests/elsewhere/environment.sh makes an environment that has it"
)

import gtp_jax as gtp  # noqa: E402

from .families import FAMILIES, LARGE, MESHES, OPTIONS, batch_of, difference, in_scope, load, mesh_of, spread  # noqa: E402

# by `python -m interop.save_checkpoints`, which has no part of Tunix or gtp_jax
CHECKPOINTS = Path(__file__).parent / "checkpoints"
FOLDERS = {
    "Llama 3": "llama3",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3, experts": "qwen3_experts",
    "Gemma 3": "gemma3",
}


def logits(model, batch):
    found, _ = model(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])
    return found * batch["input_mask"][..., None]


@pytest.fixture(scope="module", params=FAMILIES)
def written(request):
    """A family, its folder, the batch and the logits of transformers."""
    folder = CHECKPOINTS / FOLDERS[request.param]
    with np.load(folder / "logits.npz") as saved:
        return FAMILIES[request.param], folder, batch_of(saved["tokens"], saved["mask"]), saved["logits"]


def check(family, where, found, wanted):
    """Equal to 1e-6 of the largest."""
    error = difference(found, wanted)
    print(f"{family.name}, {where}: logits differ from those of transformers by {error:.1e}")
    assert error < 1e-6


def test_logits_on_one_device_are_those_of_transformers(written):
    family, folder, batch, wanted = written
    check(family, "one device", nnx.jit(logits)(load(family, folder), batch), wanted)


@pytest.mark.parametrize(
    "mesh, how", [("gtp 8", "set_mesh"), ("gtp 4 x tp 2", "set_mesh"), ("gtp 4 x tp 2", "with mesh")]
)
def test_logits_of_the_sharded_model_are_those_of_transformers(written, mesh, how):
    family, folder, batch, wanted = written
    devices = mesh_of(*MESHES[mesh])
    model = load(family, folder, devices)
    with in_scope(devices, how, family):
        model = gtp.shard(model, **OPTIONS)
        large = [leaf for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.size >= LARGE]
        assert large and all(8 * leaf.addressable_shards[0].data.size == leaf.size for leaf in large)
        check(family, f"{mesh}, {how}", nnx.jit(logits)(model, spread(batch, devices)), wanted)
