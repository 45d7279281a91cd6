"""Parameters that are written as they are made, and arrays that are read in part."""

import jax
import ml_dtypes
import numpy as np
import pytest
from messages import naming
from selection import others_full

from gtp_jax.checkpoint import Checkpoints, StreamedArray
from gtp_jax.checkpoint._digest import Digest, Digests

MESH = dict(gtp=2, tp=2)


@pytest.mark.parametrize(
    "dtype", others_full([np.float32, ml_dtypes.bfloat16, np.int8, np.bool_], [np.float32, np.int8])
)
def test_a_digest_of_parts_in_any_order_even_twice_is_that_of_the_whole(dtype):
    values = np.random.default_rng(0).integers(0, 2, (6, 5, 7)).astype(dtype)
    digest = Digest()
    for begin, end in ((4, 6), (0, 3), (3, 4), (0, 3)):
        digest.add(begin, values[begin:end])
    assert digest.text() == Digests({"": jax.numpy.asarray(values)}).result()[""]
    other = Digest()
    for begin, end in ((4, 6), (0, 3), (2, 3)):
        other.add(begin, values[begin:end])
    assert other.text() != digest.text()


def test_a_digest_of_64_bits_in_parts_is_that_of_the_whole(x64):
    values = np.random.default_rng(0).standard_normal((4, 3))
    digest = Digest()
    digest.add(0, values[:3])
    digest.add(3, values[3:])
    assert digest.text() == Digests({"": jax.numpy.asarray(values)}).result()[""]


def streamed(values: np.ndarray, rows: int) -> StreamedArray:
    return StreamedArray(values.shape, values.dtype, rows, lambda begin: values[begin : begin + rows])


def flat(tree, path=()):
    if not isinstance(tree, dict):
        return {"/".join(path): tree}
    return {name: leaf for key, value in tree.items() for name, leaf in flat(value, (*path, key)).items()}


@pytest.mark.full
def test_streamed_parameters_are_restored_as_those_in_memory(tmp_path, make_state, filled, logical):
    state = filled(make_state(MESH))
    names = list(flat(state.params))
    values = dict(zip(names, logical(state), strict=False))
    with Checkpoints(tmp_path / "whole") as checkpoints:
        checkpoints.save(3, state)
    with Checkpoints(tmp_path / "streamed") as checkpoints:
        arrays = {name: streamed(v, 1 if v.ndim > 2 else v.shape[0]) for name, v in values.items()}
        checkpoints.save_params(3, arrays, {"model": 1})
    one, other = (Checkpoints(tmp_path / name, read_only=True) for name in ("whole", "streamed"))
    leaves = one.manifest()["leaves"]
    assert other.manifest()["leaves"] == {n: leaf for n, leaf in leaves.items() if n.startswith("params/")}
    assert other.verify() == [] and other.manifest()["extra"] == {"model": 1}
    wanted = make_state(dict(gtp=4))
    for left, right in zip(
        jax.tree.leaves(one.restore_params(wanted)), jax.tree.leaves(other.restore_params(wanted)), strict=True
    ):
        assert left.sharding == right.sharding
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def test_rows_of_a_saved_stack_are_read_without_the_others(tmp_path, make_state, filled, logical):
    state = filled(make_state(MESH))
    values = dict(zip(flat(state.params), logical(state), strict=False))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state)
        arrays = checkpoints.arrays()
    stacks = 0
    for name, whole in values.items():
        array = arrays[f"params/{name}"]
        assert array.shape == whole.shape
        assert array.read(1, 2).tobytes() == whole[1:2].tobytes()
        if whole.ndim > 2:
            stacks += 1
            assert array.open().chunk_layout.read_chunk.shape[0] == 1
    assert stacks


def test_streams_are_refused_as_states_are(tmp_path):
    array = streamed(np.zeros((4, 2), np.float32), 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_params(3, {"a/b": array})
        with pytest.raises(ValueError, match=naming("`step` 3 ascend")):
            checkpoints.save_params(3, {"a/b": array})
        with pytest.raises(ValueError, match=naming("`step` -1")):
            checkpoints.save_params(-1, {"a/b": array})
        with pytest.raises(TypeError, match=naming("`extra` JSON")):
            checkpoints.save_params(4, {"a/b": array}, {"x": object()})
    with pytest.raises(ValueError, match=naming("`read_only=True`")):
        Checkpoints(tmp_path, read_only=True).save_params(4, {"a/b": array})


def test_streams_delete_nothing_if_the_guard_forbids_it(tmp_path):
    def lost():
        raise RuntimeError("another run owns the directory")

    half_written = tmp_path / "2.orbax-checkpoint-tmp"
    half_written.mkdir()
    with pytest.raises(RuntimeError, match=naming("another run")):
        Checkpoints(tmp_path, guard=lost).save_params(3, {"a": streamed(np.zeros((4, 2), np.float32), 2)})
    assert half_written.exists()


def test_parameters_of_another_model_are_not_restored(tmp_path, make_state):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_params(0, {"a/b": streamed(np.zeros((4, 2), np.float32), 2)})
        with pytest.raises(ValueError, match=naming("another model 13")):
            checkpoints.restore_params(make_state(MESH))
