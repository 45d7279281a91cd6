"""Global batches: the right rows on the right devices, each built once."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from messages import naming

from gtp_jax.mesh import make_mesh
from gtp_jax.runner.data import Loader, Windows


class CountedWindows(Windows):
    """Windows that note which rows were built."""

    def rows(self, rows):
        built.append(rows.tolist())
        return super().rows(rows)


built: list[list[int]] = []


def loader(mesh, batch=8, kind=Windows, fill=0, pad=0, **kwargs):
    tokens = np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint8)
    return Loader(kind(tokens, 16, seed=1, **kwargs), batch, mesh, fill=fill, pad=pad)


def test_batch_is_cut_over_dp_and_gtp_and_does_not_depend_on_the_mesh():
    meshes = [make_mesh(dp=2, gtp=2, tp=2), make_mesh(gtp=8), make_mesh(gtp=4, tp=2)]
    batches = [loader(mesh).at(3) for mesh in meshes]
    for batch, mesh in zip(batches, meshes, strict=True):
        assert batch["tokens"].shape == (8, 16)
        assert batch["tokens"].sharding == jax.NamedSharding(mesh, PartitionSpec(("dp", "gtp")))
        for name in batch:
            np.testing.assert_array_equal(batch[name], batches[0][name])
    expected = loader(meshes[0]).windows.rows(np.arange(24, 32))
    np.testing.assert_array_equal(batches[0]["targets"], expected["targets"])


def test_loaders_of_some_rows_give_those_of_the_whole_batch():
    windows = loader(make_mesh(gtp=8)).windows
    whole = Loader(windows, 9, make_mesh(gtp=1, devices=jax.devices()[:1])).at(3)
    parts = [(0, 6, jax.devices()[:2]), (6, 3, jax.devices()[2:3])]
    found = [Loader(windows, n, make_mesh(gtp=len(on), devices=on), rows=(first, 9)).at(3) for first, n, on in parts]
    for name, rows in whole.items():
        np.testing.assert_array_equal(np.concatenate([np.asarray(part[name]) for part in found]), rows)


def test_rows_that_tp_ranks_share_are_built_once():
    built.clear()
    loader(make_mesh(gtp=4, tp=2), kind=CountedWindows).at(1)
    assert sorted(built) == [[8, 9], [10, 11], [12, 13], [14, 15]]


def test_steps_give_what_at_gives_wherever_they_begin():
    of = loader(make_mesh(gtp=8))
    whole = [np.asarray(batch["tokens"]) for batch in of.steps(0, 6)]
    later = [np.asarray(batch["tokens"]) for batch in of.steps(4, 6)]
    np.testing.assert_array_equal(whole[4:], later)
    np.testing.assert_array_equal(whole[5], of.at(5)["tokens"])
    assert list(of.steps(6, 6)) == []


def test_error_of_the_thread_that_builds_ahead_reaches_the_caller():
    class Broken(Windows):
        def rows(self, rows):
            if rows[0] >= 8:
                raise RuntimeError("the disk is gone")
            return super().rows(rows)

    steps = loader(make_mesh(gtp=8), kind=Broken).steps(0, 3)
    next(steps)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(steps)


def test_places_added_to_rows_have_no_target_no_weight_and_a_segment_of_their_own():
    class Segmented(Windows):
        kinds = {**dict.fromkeys(("tokens", "targets", "segment_ids"), np.int32), "weights": np.float32}

        def cut(self, numbers):
            return {
                **super().cut(numbers),
                "segment_ids": np.tile(np.arange(16, dtype=np.int32) // 5, (len(numbers), 1)),
            }

    mesh = make_mesh(gtp=8)
    padded, plain = (loader(mesh, kind=Segmented, repeat=False, pad=pad).at(2) for pad in (2, 0))
    for name, added in {"tokens": 0, "targets": -1, "weights": 0, "segment_ids": 4}.items():
        np.testing.assert_array_equal(padded[name][:, :16], plain[name])
        np.testing.assert_array_equal(padded[name][:, 16:], np.full((8, 2), added))
        assert padded[name].dtype == plain[name].dtype


def test_rows_behind_the_batch_have_weight_0_and_the_others_are_those_of_any_mesh():
    mesh = make_mesh(gtp=3, devices=jax.devices()[:3])
    filled, plain = loader(mesh, batch=8, fill=1).at(2), loader(make_mesh(gtp=8), batch=8).at(2)
    assert filled["tokens"].shape[0] == 9
    for name in ("tokens", "targets"):
        np.testing.assert_array_equal(filled[name][:8], plain[name])
    np.testing.assert_array_equal(filled["weights"].sum(axis=1), [16] * 8 + [0])
    held_out = loader(mesh, batch=128, repeat=False, fill=1).at(0)
    assert float(held_out["weights"].sum()) == 124 * 16
    with pytest.raises(ValueError, match=naming("`batch` 8 `fill` 2 dp x gtp = 3")):
        loader(mesh, batch=8, fill=2)


@pytest.mark.full
def test_a_loop_left_early_ends_with_the_interpreter_in_silence():
    script = (
        "import jax, numpy as np\n"
        "from gtp_jax.runner.data import Loader, Windows\n"
        "from gtp_jax.mesh import make_mesh\n"
        "mesh = make_mesh(devices=jax.devices()[:1])\n"
        "steps = Loader(Windows(np.arange(1000), 8), 4, mesh).steps(0, 1000)\n"
        "next(steps)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr[-3000:]
