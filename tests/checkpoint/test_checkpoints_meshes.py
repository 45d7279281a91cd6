"""What one mesh saved, any other restores bit for bit."""

import dataclasses
import itertools
import json
import re
import secrets
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model, split_model

from .meshes import OPTIMIZERS, PLACES, SIZES
from .runs import Run


@pytest.mark.parametrize(
    "ring",
    [
        ["hsdp_tp2", "gtp4_tp2_strided", "tp3", "hsdp_tp2"],
        pytest.param(["gtp2_cp4", "fsdp", "gtp2_cp4"], marks=pytest.mark.full),
        pytest.param([*PLACES, next(iter(PLACES))], marks=pytest.mark.full),
    ],
    ids=["four", "divided sequences", "all"],
)
def test_each_mesh_restores_what_the_one_before_saved(tmp_path, filled, assert_restored, ring):
    """With one optimizer; the next test has every pair of meshes, with each optimizer."""
    optimizer = OPTIMIZERS["adamw"]
    for index, (saved_on, restored_on) in enumerate(itertools.pairwise(ring)):
        state = filled(PLACES[saved_on].state(optimizer), seed=index)
        with Checkpoints(tmp_path / str(index)) as checkpoints:
            checkpoints.save(7, state, {"batches": [1, 2]})
            assert_restored(checkpoints, PLACES[restored_on].state(optimizer), state)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("saved_on", PLACES)
def test_every_mesh_restores_what_any_other_saved(tmp_path, filled, assert_restored, name, saved_on):
    optimizer = OPTIMIZERS[name]
    state = filled(PLACES[saved_on].state(optimizer), seed=secrets.randbits(31))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, state, {"batches": [1, 2]})
        for place in PLACES.values():
            assert_restored(checkpoints, place.state(optimizer), state)


@pytest.mark.full
def test_steps_with_square_preconditioners_go_on_elsewhere_as_on_one_device(tmp_path):
    before, after, one = (
        Run(PLACES[p], gtp.recipes.BF16(), OPTIMIZERS["shampoo"]) for p in ("hsdp_tp2", "fsdp", "one_device")
    )
    state, seen = before.go_on(before.begin(seed=3), 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        state, _ = checkpoints.restore(after.shapes())
    wanted = one.go_on(one.begin(seed=3), 4)[1]
    np.testing.assert_allclose([*seen, *after.go_on(state, 2)[1]], wanted, rtol=1e-3)


@pytest.fixture(scope="module")
def assert_restored(logical, assert_same_bits):
    """`assert_restored(checkpoints, like, saved)`: on the shardings of `like`, bit for bit what was saved."""

    def check(checkpoints, like, saved):
        restored, extra = checkpoints.restore(like)
        assert extra == {"batches": [1, 2]}
        bare = logical(restored)
        assert_same_bits(bare, logical(saved))
        for leaf, array, wanted in zip(bare, jax.tree.leaves(restored), jax.tree.leaves(like), strict=True):
            assert array.sharding == wanted.sharding
            assert array.shape == leaf.shape

    return check


@pytest.mark.slow
def test_another_mesh_reads_at_most_half_as_many_bytes_again(tmp_path, make_state, filled):
    def bytes_read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, filled(make_state({"gtp": 8})))
    read = {}
    for degrees in ({"gtp": 8}, {"gtp": 4, "tp": 2}, {"gtp": 2, "dp": 4}, {"dp": 4, "tp": 2}):
        like = make_state(degrees)
        before = bytes_read()
        Checkpoints(tmp_path, read_only=True).restore(like)
        read[str(degrees)] = bytes_read() - before
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    same = read["{'gtp': 8}"]
    # two devices that need parts of one chunk share its bytes most often, not always
    assert same > size / 2 and max(read.values()) < 1.5 * same, read


def test_masked_moments_come_back(tmp_path, make_state, filled, assert_same_bits):
    def masked(state):
        head = {"kernel": state.params["head"]["kernel"], "scale": optax.MaskedNode()}
        return dataclasses.replace(state, opt_state=optax.MaskedState(optax.TraceState({"head": head})))

    state = filled(masked(make_state({"gtp": 8})))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored, _ = checkpoints.restore(masked(make_state({"gtp": 1})))
    kernel = np.asarray(state.opt_state.inner_state.trace["head"]["kernel"])
    assert kernel.shape == (128, 1002)
    assert_same_bits([np.asarray(restored.opt_state.inner_state.trace["head"]["kernel"])], [kernel])


def test_the_disk_holds_nested_dicts_of_logical_arrays_and_a_manifest(tmp_path, make_state, filled, logical):
    state = filled(make_state({"gtp": 8}))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, {"seed": 5})
    manifest = json.loads((tmp_path / "3/manifest/manifest.json").read_text())
    assert manifest["format"] == 2 and manifest["step"] == 3 and manifest["extra"] == {"seed": 5}
    table = manifest["leaves"]["params/embed/table"]
    assert (table["shape"], table["dtype"], len(table["digest"])) == ([1002, 128], "float32", 16)
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        found = reader.restore(tmp_path / "3/arrays")
    assert type(found) is dict and type(found["opt_state"]["0"]["mu"]["embed"]) is dict
    flat = {"/".join(str(key.key) for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    assert {name: (list(leaf.shape), str(leaf.dtype)) for name, leaf in flat.items()} == {
        name: (entry["shape"], entry["dtype"]) for name, entry in manifest["leaves"].items()
    }
    table = next(leaf for leaf in logical(state) if leaf.shape == (1002, 128))
    assert np.asarray(flat["params/embed/table"]).tobytes() == table.tobytes()


ELSEWHERE = {
    "one device": lambda: SingleDeviceSharding(jax.devices()[3]),
    "four devices": lambda: NamedSharding(gtp.make_mesh(gtp=4, devices=jax.devices()[4:]), PartitionSpec(None, "gtp")),
    "another mesh of the eight": lambda: NamedSharding(gtp.make_mesh(gtp=8), PartitionSpec(None, "gtp")),
}


@pytest.mark.parametrize("place", others_full(ELSEWHERE, ["four devices"]))
def test_arrays_need_not_be_on_the_mesh_in_scope(tmp_path, plain, place):
    sharding, values = ELSEWHERE[place](), np.arange(96, dtype=np.float32).reshape(2, 8, 6)
    state = plain({"w": jax.device_put(values, sharding), "key": jax.device_put(jax.random.key(3), jax.devices()[5])})
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(state)[0].params
    assert restored["w"].sharding == sharding and restored["key"].sharding == state.params["key"].sharding
    np.testing.assert_array_equal(restored["w"], values)
    assert Checkpoints(tmp_path).restore(state)[0].params["key"] == jax.random.key(3)


def test_random_keys_of_an_optimizer_come_back_as_keys(tmp_path, plain):
    optimizer = optax.add_noise(0.1, 0.5, jax.random.key(3, impl="rbg"))
    params = {"w": jax.numpy.ones(4)}
    state = plain(params, optimizer.init(params))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored, _ = checkpoints.restore(state)
    key = restored.opt_state.rng_key
    assert key.dtype == state.opt_state.rng_key.dtype
    assert jax.random.bits(key) == jax.random.bits(state.opt_state.rng_key)


@pytest.mark.slow
def test_an_array_larger_than_what_may_be_on_its_way_comes_back(tmp_path, plain, assert_same_bits, monkeypatch):
    monkeypatch.setattr("gtp_jax.checkpoint._step._ON_THE_WAY_GB", 1)
    row = jax.random.bits(jax.random.key(secrets.randbits(32)), (1 << 20,), "uint8")
    state = plain({"large": jax.numpy.broadcast_to(row, (1100, 1 << 20))})  # 1.15 GB in one shard
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    restored = Checkpoints(tmp_path, read_only=True).restore(like)[0]
    assert_same_bits(jax.tree.leaves(restored), jax.tree.leaves(state))


@pytest.mark.full
def test_the_state_of_a_model_goes_through_plain_orbax_on_its_mesh(tmp_path):
    config = LlamaConfig(**SIZES)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), ocp.StandardCheckpointer() as checkpointer:
        model = gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(3))
        checkpointer.save(tmp_path / "model", nnx.state(model))
        checkpointer.wait_until_finished()
        abstract = abstract_model(lambda rngs: Llama(config, rngs=rngs))
        restored = checkpointer.restore(tmp_path / "model", nnx.state(abstract))
        nnx.update(abstract, restored)
        again, before = split_model(abstract)[1], split_model(model)[1]
    for found, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(before), strict=True):
        assert found.sharding == wanted.sharding
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
