"""Models of Tunix, unchanged, loaded through a mesh and sharded: logits and steps are those on one device.

Run with `-rP`, these tests print the differences that docs/models-from-elsewhere.md states.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

pytest.importorskip(
    "tunix", reason="google-tunix is not installed; tests/elsewhere/environment.sh makes an environment that has it"
)

from hook.steps import train  # noqa: E402

import gtp_jax as gtp  # noqa: E402

from .families import (  # noqa: E402
    FAMILIES,
    LARGE,
    MESHES,
    OPTIONS,
    batch,
    difference,
    in_scope,
    load,
    mesh_of,
    spread,
    write,
)

SCOPES = [("gtp 8", "set_mesh"), ("gtp 4 x tp 2", "set_mesh"), ("gtp 4 x tp 2", "with mesh")]


def logits(model, batch):
    return model(batch["input_tokens"], batch["positions"], None, batch["attention_mask"])[0]


def loss(model, batch):
    from tunix.sft import peft_trainer

    return peft_trainer._default_loss_fn(model, **batch)


def results(model, batch):
    """Returns logits, then losses, gradients and variables of three steps of AdamW."""
    return {"logits": np.asarray(nnx.jit(logits)(model, batch)), **train(model, loss, batch, stay=False)}


def differences(found, wanted):
    """Returns the largest difference of each kind of result."""
    assert found.keys() == wanted.keys()
    kinds = {"logits": "logits", "losses": "losses", "first gradient": "gradients", "variable": "parameters"}
    return {
        kind: max(difference(found[name], wanted[name]) for name in wanted if name.startswith(start))
        for start, kind in kinds.items()
    }


@pytest.fixture(scope="module")
def wanted(checkpoint):
    """The results on one device."""
    return results(load(*checkpoint), batch())


@pytest.mark.parametrize("mesh, how", SCOPES)
def test_logits_and_three_steps_are_those_on_one_device(checkpoint, wanted, mesh, how):
    family, folder = checkpoint
    devices = mesh_of(*MESHES[mesh])
    model = load(family, folder, devices)
    with in_scope(devices, how, family) as constraints:
        model = gtp.shard(model, **OPTIONS)
        found = differences(results(model, spread(batch(), devices)), wanted)
    assert bool(constraints) == (how == "with mesh" and not family.experts)
    print(f"{family.name}, {mesh}, {how}:", ", ".join(f"{kind} {value:.1e}" for kind, value in found.items()))
    assert found["losses"] < 1e-6 and max(found.values()) < 1e-5
    assert wanted["losses"][2] < wanted["losses"][0] - 1


def test_in_float64_they_are_equal_to_1e12(tmp_path, x64):
    # Gemma 3 computes in the dtype of its weights; the others use float32 in norms, in softmax, or for logits
    family = FAMILIES["Gemma 3"]
    folder = write(family, tmp_path)
    expected = results(load(family, folder, dtype=jnp.float64), batch())
    devices = mesh_of(4, 2)
    model = load(family, folder, devices, jnp.float64)
    with in_scope(devices, "with mesh", family):
        model = gtp.shard(model, **OPTIONS)
        found = differences(results(model, spread(batch(), devices)), expected)
    print("float64:", found)
    assert max(found.values()) < 1e-12


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_no_large_weight_is_ever_whole_on_a_device(checkpoint, sizes, monkeypatch):
    family, folder = checkpoint
    wanted = nnx.state(load(family, folder))
    devices = mesh_of(*sizes)
    known = {id(array) for array in jax.live_arrays()}
    whole, put = [], jax.device_put

    def watched(value, *places):
        # the first device is the host here, which holds what Tunix stacks before it partitions it
        new = (a for a in jax.live_arrays() if id(a) not in known and a.size >= LARGE and len(a.devices()) > 1)
        whole.extend(a.shape for a in new if a.is_fully_replicated)
        return put(value, *places)

    def all_shards(owner):
        arrays = [leaf for leaf in jax.tree.leaves(nnx.state(owner)) if leaf.size >= LARGE]
        return len(arrays) > 6 * family.layers and all(8 * a.addressable_shards[0].data.size == a.size for a in arrays)

    monkeypatch.setattr(jax, "device_put", watched)
    model = load(family, folder, devices)
    assert all_shards(model)
    with jax.set_mesh(devices):
        model = gtp.shard(model, **OPTIONS)
        assert all_shards(model) and all_shards(nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))
    assert not whole
    for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
