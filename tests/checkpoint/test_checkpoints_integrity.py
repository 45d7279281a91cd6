"""No damage is restored in silence: every changed byte is found, and named."""

import os
import random
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import WITHOUT_SUM, Checkpoints
from gtp_jax.checkpoint._digest import Digests

MESH = dict(gtp=2, tp=2, dp=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, make_state, filled):
    """A state, and a directory with its checkpoint."""
    state = filled(make_state(MESH))
    directory = tmp_path_factory.mktemp("saved")
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(7, state, {"text": "abc"})
    return state, directory


@pytest.fixture
def copy(saved, tmp_path):
    """The directory again, to be damaged."""
    return shutil.copytree(saved[1], tmp_path / "copy")


def written(directory):
    """The files that hold something; orbax's own marks are empty or read by nobody."""
    found = [p for part in ("arrays", "manifest") for p in (directory / "7" / part).rglob("*") if p.is_file()]
    return sorted(p for p in found if p.stat().st_size and p.name != "commit_success.txt")


def flip(path, place: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ bits]))


def digest(array) -> str:
    return Digests({"": array}).result()[""]


def test_every_file_that_is_deleted_changed_or_cut_is_reported(saved, copy, tmp_path, logical, assert_same_bits):
    checkpoints, aside = Checkpoints(copy, read_only=True), tmp_path / "aside"
    assert checkpoints.verify() == []
    for path in sorted(path for path in (copy / "7").rglob("*") if path.is_file()):
        path.rename(aside)
        lines = checkpoints.verify()
        aside.rename(path)
        assert len(lines) == 1 and str(path) in lines[0] or path.name == "manifest.json" and lines, (path, lines)
        before = path.read_bytes()
        path.write_bytes(b"\xff" + before[1:])
        assert any(str(path) in line for line in checkpoints.verify()), path
        path.write_bytes(before[:-1])
        if before and path.name != "commit_success.txt":  # of which only the beginning is checked
            assert any(str(path) in line for line in checkpoints.verify()), path
        path.write_bytes(before)
    assert checkpoints.verify() == []
    for name in WITHOUT_SUM:
        (copy / "7" / name).unlink()
    assert checkpoints.verify() == [f"{copy / '7' / name}: missing" for name in WITHOUT_SUM]
    restored, extra = checkpoints.restore(saved[0])  # which reads none of them
    assert_same_bits(logical(restored), logical(saved[0]))
    assert extra == {"text": "abc"}


@pytest.mark.parametrize("trials", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_changed_byte_is_found_and_named(copy, trials):
    files = written(copy)
    sizes = [path.stat().st_size for path in files]
    rng = random.Random()
    checkpoints = Checkpoints(copy, read_only=True)
    for trial in range(trials):
        # half by bytes, half by files, for nearly all bytes are in a few
        path = rng.choices(files, sizes)[0] if trial % 2 else rng.choice(files)
        place, bits = rng.randrange(path.stat().st_size), rng.randrange(1, 256)
        flip(path, place, bits)
        (line,) = checkpoints.verify()
        assert str(path) in line and "changed since it was written" in line, (path, place, bits, line)
        flip(path, place, bits)
    assert checkpoints.verify() == []


def test_what_is_restored_is_what_was_saved_or_an_error(saved, copy, logical, assert_same_bits):
    state, wanted = saved[0], logical(saved[0])
    files, rng = written(copy), random.Random(2)
    refused = 0
    for trial in range(16):
        path = rng.choices(files, [p.stat().st_size for p in files])[0] if trial % 2 else rng.choice(files)
        place, bits = rng.randrange(path.stat().st_size), rng.randrange(1, 256)
        flip(path, place, bits)
        try:
            restored, _ = Checkpoints(copy, read_only=True).restore(state)
        except ValueError as error:
            refused += 1
            assert re.search(naming("damaged gtp-jax checkpoint verify"), str(error)), (path, error)
        else:
            assert_same_bits(logical(restored), wanted)
        flip(path, place, bits)
    assert refused > 4


@pytest.mark.parametrize("damage", ["missing", "truncated", "added"])
def test_missing_truncated_and_foreign_files_are_named(copy, damage):
    path = max((copy / "7" / "arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    size = path.stat().st_size
    if damage == "missing":
        path.unlink()
        wanted = [f"{path}: missing"]
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
        wanted = [f"{path}: {size - 1} bytes, {size} were written"]
    else:
        places = [copy / "7" / place / "other" for place in ("", "arrays", "arrays/d", "manifest")]
        for path in places:
            path.write_bytes(b"x")
        wanted = sorted(f"{path}: not part of the checkpoint" for path in places)
    assert sorted(Checkpoints(copy, read_only=True).verify()) == wanted


def test_values_that_differ_from_those_saved_are_named_by_path(tmp_path, plain, monkeypatch):
    """As if memory or a bus had failed between the digest and the disk."""
    right = Digests.result
    monkeypatch.setattr(Digests, "result", lambda digests: right(digests) | {"params/a/w": "0" * 16})
    state = plain({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=naming("params/a/w: values differ")):
        Checkpoints(tmp_path).restore(state)


@pytest.mark.parametrize(
    "dtype", others_full(["float32", "bfloat16", "int8", "bool", "float8_e4m3fn"], ["float32", "int8"])
)
def test_a_digest_depends_on_every_element_and_on_no_mesh(dtype):
    array = jnp.asarray(np.random.default_rng(0).integers(-99, 100, (48, 8)).astype(dtype))
    wanted = digest(array)
    for degrees, spec in ((dict(gtp=8), P("gtp")), (dict(gtp=4, tp=2), P(("tp", "gtp"))), (dict(dp=4, tp=2), P())):
        mesh = gtp.make_mesh(**degrees)
        assert digest(jax.device_put(array, NamedSharding(mesh, spec))) == wanted
    host = np.asarray(array)[:8]
    seen = {digest(jnp.asarray(host))}
    for place in range(host.size):
        changed = host.copy()
        flat = changed.reshape(-1).view(np.uint8)
        flat[place * host.itemsize] ^= 1
        seen.add(digest(jnp.asarray(changed)))
    assert len(seen) == host.size + 1
    assert digest(array[::-1]) != wanted


@pytest.fixture
def unequal():
    """An array of which one device has another copy than the rest."""
    mesh = gtp.make_mesh(dp=8)
    parts = [jax.device_put(np.full(4, rank == 5, np.float32), d) for rank, d in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, P()), parts)


def test_copies_of_an_array_that_differ_are_an_error_by_path_and_no_step(tmp_path, plain, unequal):
    state = plain({"a": {"w": unequal}, "b": jnp.ones(4)})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plain({"b": jnp.ones(4)}))
        with pytest.raises(ValueError, match=naming("`params/a/w` copies differ")):
            checkpoints.save(2, state)
        assert checkpoints.steps() == [1]
        checkpoints.save(2, plain({"b": jnp.zeros(4)}))
        checkpoints.wait()
    assert Checkpoints(tmp_path).verify() == [] and sorted(os.listdir(tmp_path)) == ["1", "2"]
