"""The frozen base in a checkpoint is read as it was saved, or its damage is named."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints, DamagedCheckpoint, check_values
from gtp_jax.models import base_arrays


@pytest.fixture(scope="module", params=[(64, gtp.NVFP4()), (1, gtp.FP8())], ids=["NVFP4", "one row"])
def made(request, tmp_path_factory):
    """A checkpoint whose base is a single matrix of codes, with a scalar amax; the model; and the matrix."""
    rows, recipe = request.param
    directory = tmp_path_factory.mktemp("made")
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        dense = gtp.init(lambda rngs: gtp.Dense(rows, 32, use_bias=True, rngs=rngs), nnx.Rngs(1))
        model = gtp.nn.freeze(dense, recipe, trained=nnx.PathContains("bias"))
        with Checkpoints(directory) as checkpoints:
            checkpoints.save(0, gtp.TrainState.create(model, optax.sgd(1e-3)), {})
        quantized = jax.tree.leaves(nnx.state(model), is_leaf=lambda x: isinstance(x, gtp.formats.QuantizedArray))
        (whole,) = (gtp.ops.dequantize(x, jnp.float32) for x in quantized if isinstance(x, gtp.formats.QuantizedArray))
    return directory, model, np.asarray(whole)


def base_of(directory, model):
    checkpoints = Checkpoints(directory, read_only=True)
    (array,) = base_arrays(checkpoints, checkpoints.manifest(0), model).values()
    assert array.parts["amax"].shape == ()
    return array


def test_a_single_matrix_is_that_which_was_saved(made):
    directory, model, whole = made
    array = base_of(directory, model)
    for _ in range(2):  # a reader may begin again
        found = array.read(0)
        check_values(array.parts.values())
        np.testing.assert_array_equal(found, whole.T if array.transposed else whole)


@pytest.mark.parametrize("part", ["codes", "scales", "amax"])
def test_each_part_of_a_matrix_that_differs_from_what_was_saved_is_named(made, tmp_path, part):
    copy = shutil.copytree(made[0], tmp_path / "copy")
    array = base_of(copy, made[1])
    if part not in array.parts:
        pytest.skip("FP8 has no scales of blocks")
    stored = array.parts[part]
    store = {"driver": "ocdbt", "base": f"file://{stored.directory}/", "path": stored.name.replace("/", ".") + "/"}
    there = ts.open({"driver": "zarr", "kvstore": store}, open=True).result()
    there.write(there.read().result() + there.dtype.numpy_dtype.type(1)).result()
    array.read(0)
    with pytest.raises(DamagedCheckpoint) as caught:
        check_values(array.parts.values())
    assert caught.value.lines == (f"{stored.name}: values differ from those saved",)


def test_files_that_are_missing_are_named(made, tmp_path):
    copy = shutil.copytree(made[0], tmp_path / "copy")
    array = base_of(copy, made[1])
    array = dataclasses.replace(array, parts=dict(sorted(array.parts.items())))  # the amax is read first
    for file in copy.rglob("d/*"):
        file.unlink()
    with pytest.raises(DamagedCheckpoint, match="d/.*: missing"):
        array.read(0)
