"""Nothing wrong is restored or saved in silence, and messages say what to do."""

import functools
import inspect
import itertools
import json
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.formats import FP8_E4M3, FP8_E5M2


@pytest.fixture
def saved(tmp_path, plain):
    """A directory with steps 2 and 4 of a state with two arrays."""
    with Checkpoints(tmp_path / "run") as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, plain({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)}))
    return tmp_path / "run"


W, B = np.ones((2, 3), np.float32), np.ones(4, np.float32)


def test_parameters_are_restored_for_a_train_state_alone(saved):
    parameters = {"params": {"a": {"w": jnp.array(W)}, "b": jnp.array(B)}}
    for state in (nnx.State(parameters), parameters):
        with pytest.raises(TypeError, match=naming("`state_like` `params` `TrainState` `restore` ['params']")):
            Checkpoints(saved).restore_params(state)


OTHERS = {
    "params/a/w float32[2,3] float32[2,5]": {"a": {"w": np.ones((2, 5), np.float32)}, "b": B},
    "params/a/w float32[2,3] bfloat16[2,3]": {"a": {"w": W.astype(jnp.bfloat16)}, "b": B},
    "params/b float32[4]": {"a": {"w": W}},
    "params/a/z float32[]": {"a": {"w": W, "z": np.float32(1)}, "b": B},
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_model_is_refused_by_path_before_anything_is_read(saved, plain, message):
    shutil.rmtree(saved / "4" / "arrays")
    with pytest.raises(ValueError, match=naming(message, f"{saved}/4 (1 configuration")) as caught:
        Checkpoints(saved).restore(plain(jax.tree.map(jnp.asarray, OTHERS[message])))
    assert str(caught.value).count("the checkpoint has") == 1


def test_another_optimizer_is_refused(saved, plain):
    params = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)}
    state = plain(params, optax.adam(1e-3).init(params))
    with pytest.raises(ValueError, match=naming("opt_state/0/mu/a/w float32")):
        Checkpoints(saved).restore(state)


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_codes_of_another_format_are_refused_by_path(tmp_path, plain, part):
    def state(format):
        codes = {"w": gtp.ops.quantize(jnp.ones((32, 32)), format)}
        return plain(codes) if part == "params" else plain({"w": jnp.ones(2)}, (codes,))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(FP8_E4M3))
        again, _ = checkpoints.restore(state(FP8_E4M3))
        found = again.params if part == "params" else again.opt_state[0]
        assert found["w"].format == FP8_E4M3
        restores = [checkpoints.restore, checkpoints.restore_params]
        for restore in restores if part == "params" else restores[:1]:
            with pytest.raises(ValueError, match=naming(part, "w/format: FP8_E4M3 FP8_E5M2")):
                restore(state(FP8_E5M2))
        if part == "opt_state":
            assert checkpoints.restore_params(state(FP8_E5M2))["w"].shape == (2,)


def test_no_checkpoint_is_an_error_that_says_where(tmp_path, plain):
    state = plain({"w": jnp.ones(2)})
    with pytest.raises(FileNotFoundError, match=naming(f"{tmp_path}/none such directory")):
        Checkpoints(tmp_path / "none").restore(state)
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError, match=naming(f"{tmp_path}: complete step Give directory")):
        Checkpoints(tmp_path).restore(state)


def test_a_missing_step_is_an_error_that_lists_the_others(saved, plain):
    with pytest.raises(FileNotFoundError, match=naming(f"3 {saved} [2, 4]")):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}), step=3)


def test_a_foreign_checkpoint_is_refused(saved, plain):
    (saved / "4/manifest/manifest.json").unlink()
    with pytest.raises(ValueError, match=naming("4 manifest.json gtp_jax")):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}))
    (saved / "4/manifest/manifest.json").mkdir()
    with pytest.raises(ValueError, match=naming("4 manifest.json")):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}))
    (saved / "4/manifest/manifest.json").rmdir()
    (saved / "4/manifest/manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=naming("manifest.json: changed")):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}))
    assert len(Checkpoints(saved).verify(4)) == 1


def rewrite_manifest(directory, **change):
    """Changes fields of step 4's manifest, and its checksum."""
    file = directory / "4/manifest/manifest.json"
    content = json.loads(file.read_text()) | change
    del content["crc32"]
    file.write_text(json.dumps(content | {"crc32": f"{zlib.crc32(json.dumps(content).encode()):08x}"}))


@pytest.mark.parametrize("other", [1, 3])
def test_another_format_is_refused(saved, plain, other):
    rewrite_manifest(saved, format=other, gtp_jax="9.0")
    for call in (lambda: Checkpoints(saved).restore(plain({"w": jnp.ones(2)})), lambda: Checkpoints(saved).arrays(4)):
        with pytest.raises(ValueError, match=naming(f"format {other} gtp_jax 9.0 2 version")):
            call()


def test_steps_must_ascend_from_0(saved, plain, tmp_path):
    state = plain({"w": jnp.ones(2)})
    with Checkpoints(saved) as checkpoints:
        for step in (3, 4):
            with pytest.raises(ValueError, match=naming(f"`step` {step} {saved} 4 ascend")):
                checkpoints.save(step, state)
        checkpoints.save(5, state)
        with pytest.raises(ValueError, match=naming("step 5")):
            checkpoints.save(5, state)
    with pytest.raises(ValueError, match=naming("`step` -1 0")):
        Checkpoints(tmp_path / "new").save(-1, state)


@pytest.mark.parametrize("step", ["2", 2.0, pytest.param(np.array([2]), marks=pytest.mark.full)], ids=repr)
def test_a_step_that_is_no_whole_number_is_refused_by_every_call_that_takes_one(saved, plain, step):
    state = plain({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)})
    with Checkpoints(saved) as checkpoints:
        calls = {
            "save": lambda: checkpoints.save(step, state),
            "save_params": lambda: checkpoints.save_params(step, {}),
            "restore": lambda: checkpoints.restore(state, step),
            "restore_params": lambda: checkpoints.restore_params(state, step),
            "restore_part": lambda: checkpoints.restore_part({}, "average/", step),
            "set_aside_after": lambda: checkpoints.set_aside_after(step),
            "arrays": lambda: checkpoints.arrays(step),
            "manifest": lambda: checkpoints.manifest(step),
            "files": lambda: checkpoints.files(step),
            "verify": lambda: checkpoints.verify(step),
        }
        takes = {name for name in dir(Checkpoints) if not name.startswith("_")}
        takes = {name for name in takes if "step" in inspect.signature(getattr(Checkpoints, name)).parameters}
        assert takes == set(calls)
        named = f"{step!r} {type(step).__name__} whole"
        for call in calls.values():
            with pytest.raises(TypeError, match=naming("`step`", named)):
                call()
        with pytest.raises(TypeError, match=naming("`damaged`", named)):
            checkpoints.set_aside_after(2, [step])
        assert checkpoints.steps() == [2, 4]


@pytest.mark.parametrize("place", others_full(["sub//../sub/./../run", "link/../run", "/{}/run"], ["link/../run"]))
def test_a_path_is_that_to_which_it_leads(saved, plain, tmp_path, monkeypatch, place):
    (tmp_path / "sub").mkdir()
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    (tmp_path / "far" / "run").symlink_to(saved)  # `..` is the parent of what `link` leads to, and not of `link`
    monkeypatch.chdir(tmp_path)
    state = plain({"a": {"w": jnp.zeros((2, 3))}, "b": jnp.zeros(4)})
    with Checkpoints(place.format(tmp_path)) as checkpoints:
        assert checkpoints.steps() == [2, 4] and checkpoints.verify(4) == []
        assert (checkpoints.arrays(4)["params/b"].read(0, 4) == 1).all()
        assert (checkpoints.restore(state)[0].params["b"] == 1).all()
        checkpoints.save(6, state)
    assert Checkpoints(saved).verify(6) == []


def test_a_path_that_is_not_utf8_is_refused_except_for_what_reads_no_array(saved, plain, tmp_path):
    place, named = tmp_path / "caf\udce9", naming("UTF-8", "caf\\udce9")
    shutil.copytree(saved, place)
    (tmp_path / "link").symlink_to(place)
    for path in (place, tmp_path / "link"):
        with pytest.raises(ValueError, match=named):
            Checkpoints(path)
        checkpoints = Checkpoints(path, read_only=True)
        assert checkpoints.steps() == [2, 4] and checkpoints.verify(4) == [] and checkpoints.manifest()["step"] == 4
        for read in (checkpoints.arrays, lambda: checkpoints.restore(plain({"b": jnp.zeros(4)}))):  # noqa: B023
            with pytest.raises(ValueError, match=named):
                read()


def test_how_many_steps_are_kept_is_a_whole_number(tmp_path):
    with pytest.raises(ValueError, match=naming("`keep` 0 1 `None`")):
        Checkpoints(tmp_path, keep=0)
    for name, count in itertools.product(("keep", "keep_best"), (1.5, "3", True)):
        with pytest.raises(TypeError, match=naming(f"`{name}` {count!r} whole")):
            Checkpoints(tmp_path, **{name: count})
        assert Checkpoints(tmp_path, **{name: np.int64(2)}).steps() == []


def test_extra_must_be_json(tmp_path, plain):
    state = plain({"w": jnp.ones(2)})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match=naming("`extra` JSON ndarray")):
            checkpoints.save(1, state, {"order": np.ones(2)})
        with pytest.raises(TypeError, match=naming("`extra` list dict")):
            checkpoints.save(1, state, [1])
        with pytest.raises(TypeError, match=naming("two keys JSON")):
            checkpoints.save(1, state, {"order": {1: "a", "1": "b"}})
        deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
        with pytest.raises(ValueError, match=naming("`extra` levels")):
            checkpoints.save(1, state, {"order": deep})
        assert checkpoints.steps() == []


def test_leaves_must_be_placed_arrays(tmp_path, plain):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=naming("`params/a/w` ndarray sharding jax.Array")):
        checkpoints.save(1, plain({"a": {"w": np.ones(2)}}))
    with pytest.raises(TypeError, match=naming("`params/w` ShapeDtypeStruct jax.set_mesh")):
        checkpoints.restore(plain({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}))
    with pytest.raises(TypeError, match=naming("`params/w` ShapeDtypeStruct arrays")):
        checkpoints.save(1, plain({"w": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jnp.ones(1).sharding)}))


def test_a_donated_state_is_refused(tmp_path, plain):
    state = plain({"w": jnp.ones(2)})
    state.params["w"].delete()
    with pytest.raises(ValueError, match=naming("`params/w` donated")):
        Checkpoints(tmp_path).save(1, state)


@pytest.mark.parametrize(
    "shape, dtype",
    others_full(
        [((0, 4), "float32"), ((3,), "complex64"), ((3,), "uint4"), ((3,), "float8_e4m3")], [((0, 4), "float32")]
    ),
)
def test_arrays_that_orbax_or_digests_do_not_know_are_refused_by_path(tmp_path, plain, shape, dtype):
    with pytest.raises(ValueError, match=naming(f"`params/a/w` {dtype}{list(shape)}")):
        Checkpoints(tmp_path).save(1, plain({"a": {"w": jnp.ones(shape, dtype)}}))


def test_a_key_with_a_slash_is_restored_and_a_loss_may_be_an_array(tmp_path, plain):
    state = plain({"a/b": jnp.arange(2), "a": {"c": jnp.arange(3)}})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, loss=jnp.float32(1.5))
        checkpoints.wait()
        assert checkpoints.best() == 1 and checkpoints.manifest()["loss"] == 1.5
        restored, _ = checkpoints.restore(state)
    assert (restored.params["a/b"] == state.params["a/b"]).all()
    assert (restored.params["a"]["c"] == state.params["a"]["c"]).all()


def test_two_arrays_that_would_be_one_or_one_below_another_on_disk_are_refused(tmp_path, plain):
    with pytest.raises(ValueError, match=naming("`params/a.b` `params/a/b`")):
        Checkpoints(tmp_path).save(1, plain({"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}))
    with pytest.raises(ValueError, match=naming("`params/a` `params/a/b`")):
        Checkpoints(tmp_path).save(1, plain({"a": jnp.ones(2), "a/b": jnp.zeros(2)}))
