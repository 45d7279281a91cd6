"""A model from a checkpoint, on any mesh, in any dtype, without what an optimizer needs."""

import dataclasses
import os
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints, DamagedCheckpoint
from gtp_jax.models import PRESETS, build, load, saved

CONFIG = dataclasses.replace(
    PRESETS["tiny"], num_layers=2, hidden_size=64, intermediate_size=128, head_dim=32, num_heads=4, num_kv_heads=2
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = gtp.init(lambda rngs: build(CONFIG, rngs=rngs), nnx.Rngs(1))
        state = gtp.TrainState.create(model, optax.adamw(1e-3))
        with Checkpoints(directory / "checkpoints") as checkpoints:
            checkpoints.save(3, state, saved(CONFIG))
    return directory


def values(model):
    return {path: jnp.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.fixture(scope="module")
def masters(run):
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = gtp.init(lambda rngs: build(CONFIG, rngs=rngs), nnx.Rngs(1))
    return {path: np.asarray(value) for path, value in values(model).items()}


@pytest.mark.parametrize("degrees", others_full([dict(tp=2, dp=4), dict(gtp=8), None], [dict(gtp=8)]), ids=str)
def test_values_are_those_that_were_saved_on_any_mesh(run, masters, degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else jax.default_device(jax.devices()[0]):
        model = load(run, dtype="float32")
        found = values(model)
        assert found.keys() == masters.keys()
        for path, value in found.items():
            np.testing.assert_array_equal(value, masters[path])
        if degrees == dict(gtp=8):  # sharded like a model that was built there
            kernel = model.blocks.layers.mlp.up.kernel["gate"].get_value()
            assert {shard.data.size * 8 for shard in kernel.addressable_shards} == {kernel.size}


def test_values_of_padded_weights_are_those_that_were_saved(run, masters):
    with jax.set_mesh(gtp.make_mesh(gtp=7, devices=jax.devices()[:7])), gtp.layout.even_shares():
        model = load(run, dtype="float32")
        for path, value in values(model).items():
            np.testing.assert_array_equal(value, masters[path])
        kernel = model.blocks.layers.mlp.up.kernel["gate"].get_raw_value()
        assert {shard.data.size * 7 for shard in kernel.addressable_shards} == {kernel.size}
        assert np.count_nonzero(kernel) == np.count_nonzero(
            masters[("blocks", "layers", "mlp", "up", "kernel", "gate")]
        )


def test_gathered_weights_are_rounded_and_norms_stay(run, masters):
    for path, value in values(load(run)).items():
        gathered = path[-1] not in ("scale", "query_scale", "key_scale")
        assert value.dtype == (jnp.bfloat16 if gathered else jnp.float32)
        np.testing.assert_array_equal(value, masters[path].astype(value.dtype))
    kept = values(load(run, param_dtype="float32"))
    assert {value.dtype for value in kept.values()} == {jnp.dtype("float32")}


def test_codes_are_those_that_freezing_the_masters_makes(run):
    with jax.set_mesh(gtp.make_mesh(dp=4, tp=2)):
        found = load(run, dtype="float32", recipe=gtp.MXFP8())
        whole = load(run, dtype="float32")
        wanted = gtp.nn.freeze(whole, gtp.MXFP8(), trained=lambda path, _: path[-1] == "scale")
        for one, other in zip(*(jax.tree.leaves(nnx.state(m, gtp.nn.Frozen)) for m in (found, wanted)), strict=True):
            np.testing.assert_array_equal(one, other)
        assert any(
            isinstance(v.get_raw_value(), gtp.formats.QuantizedArray) for _, v in nnx.to_flat_state(nnx.state(found))
        )


def test_what_is_no_checkpoint_is_refused_with_what_it_is(run, tmp_path):
    with pytest.raises(FileNotFoundError, match=naming("`hf download org/some-model --local-dir some-model`")):
        load("org/some-model")
    with pytest.raises(ValueError, match="no complete step in"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="4"):
        load(run, step=4)


def test_a_checkpoint_of_another_model_or_none_is_refused(run, tmp_path):
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.init(lambda rngs: build(CONFIG, rngs=rngs), nnx.Rngs(1))
        state = gtp.TrainState.create(model, optax.sgd(1e-3))
        for step, extra in enumerate(({}, saved(dataclasses.replace(CONFIG, num_layers=3)))):
            with Checkpoints(tmp_path) as checkpoints:
                checkpoints.save(step, state, extra)
        with pytest.raises(ValueError, match=naming("step 0 which model")):
            load(tmp_path, step=0)
        with pytest.raises(ValueError, match=r"params/blocks.*\(2, .* \(3, "):
            load(tmp_path)


def test_files_that_were_truncated_are_named(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    files = [path for path in (copy / "checkpoints/3/arrays").rglob("d/*") if path.stat().st_size > 1]
    sizes = {file: file.stat().st_size for file in files}
    for file in files:
        os.truncate(file, 1)
    with pytest.raises(DamagedCheckpoint, match="`gtp-jax checkpoint verify") as caught:
        load(copy)
    lines = {f"{file}: 1 bytes, {size} were written" for file, size in sizes.items()}
    assert lines & set(map(str.strip, str(caught.value).splitlines()))


def test_an_array_that_was_changed_on_disk_is_not_generated_from(run, monkeypatch):
    from gtp_jax.checkpoint import StoredArray

    read = StoredArray._rows
    changed = lambda self, begin, end: read(self, begin, end) + np.float32(self.name.endswith("table") * 1e-3)  # noqa: E731
    monkeypatch.setattr(StoredArray, "_rows", changed)
    with pytest.raises(ValueError, match=naming("damaged params/embed/table")):
        load(run)


def test_the_command_that_imports_files_of_hugging_face_can_be_run_as_it_is(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="`gtp-jax convert import") as caught:
        load(".")
    assert shlex.split(str(caught.value).split("`")[1])[3:] == [".", f"{tmp_path.name}-imported"]
