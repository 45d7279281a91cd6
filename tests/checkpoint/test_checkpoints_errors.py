"""Nothing wrong is restored or saved in silence, and messages say what to do."""

import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

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


@pytest.mark.parametrize(
    ("like", "what"),
    [
        (nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), "State with the keys ['bias', 'kernel'],"),
        (nnx.State({"params": {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)}}), "State with the keys ['params'],"),
        ({"params": jnp.ones(3)}, "dict with the keys ['params'],"),
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "Linear"),
    ],
    ids=["nnx.State", "nnx.State of params", "dict", "module"],
)
def test_parameters_are_restored_for_a_train_state_alone(saved, like, what):
    with pytest.raises(TypeError) as error:
        Checkpoints(saved).restore_params(like)
    assert f"`state_like` is a {what} without an attribute `params` that holds arrays" in str(error.value)
    assert "takes a `TrainState`" in str(error.value) and "saved from an `nnx.State`, call `restore`" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"a": {"w": jnp.ones((2, 5))}, "b": jnp.ones(4)},
            "params/a/w: the checkpoint has float32[2,3], the model float32[2,5]",
        ),
        (
            {"a": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "b": jnp.ones(4)},
            "params/a/w: the checkpoint has float32[2,3], the model bfloat16[2,3]",
        ),
        ({"a": {"w": jnp.ones((2, 3))}}, "params/b: the checkpoint has float32[4], the model no such array"),
        (
            {"a": {"w": jnp.ones((2, 3)), "z": jnp.ones(())}, "b": jnp.ones(4)},
            "params/a/z: the checkpoint has no such array, the model float32[]",
        ),
    ],
)
def test_another_model_is_refused_by_path_before_anything_is_read(saved, plain, params, message):
    shutil.rmtree(saved / "4" / "arrays")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Checkpoints(saved).restore(plain(params))
    text = str(caught.value)
    assert f"the checkpoint {saved}/4 belongs to another model or optimizer (1 of" in text
    assert "Restore it with the configuration it was saved with" in text
    assert text.count("the checkpoint has") == 1


def test_another_optimizer_is_refused(saved, plain):
    params = {"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)}
    state = plain(params, optax.adam(1e-3).init(params))
    with pytest.raises(ValueError, match=r"opt_state/0/mu/a/w: the checkpoint has no such array, the model float32"):
        Checkpoints(saved).restore(state)


@pytest.mark.parametrize("part", ["params", "opt_state"])
def test_codes_of_another_format_are_refused_by_path(tmp_path, plain, part):
    def state(format):
        codes = {"w": gtp.quantize(jnp.ones((32, 32)), format)}
        return plain(codes) if part == "params" else plain({"w": jnp.ones(2)}, (codes,))

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state(FP8_E4M3))
        again, _ = checkpoints.restore(state(FP8_E4M3))
        found = again.params if part == "params" else again.opt_state[0]
        assert found["w"].format == FP8_E4M3
        restores = [checkpoints.restore, checkpoints.restore_params]
        for restore in restores if part == "params" else restores[:1]:
            with pytest.raises(
                ValueError, match=rf"{part}.*/w/format: the checkpoint has FP8_E4M3, the model FP8_E5M2"
            ):
                restore(state(FP8_E5M2))
        if part == "opt_state":
            assert checkpoints.restore_params(state(FP8_E5M2))["w"].shape == (2,)


def test_a_long_list_of_differences_is_cut(saved, plain):
    with pytest.raises(ValueError, match=r"\(32 of 33 arrays differ\):\n(  .*\n){8}  and 24 more\nRestore"):
        Checkpoints(saved).restore(plain({f"layer{i}": jnp.ones(1) for i in range(30)}))


def test_a_model_of_another_size_is_refused_by_its_shapes(tmp_path, make_state, filled):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, filled(make_state({"gtp": 8})))
        message = r"params/embed/table: the checkpoint has float32\[1002,128\], the model float32\[1000,128\]"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(make_state({"gtp": 8}, vocab_size=1000))


def test_no_checkpoint_is_an_error_that_says_where(tmp_path, plain):
    state = plain({"w": jnp.ones(2)})
    with pytest.raises(FileNotFoundError, match=f"no checkpoint in {tmp_path}/none: no such directory. Give the"):
        Checkpoints(tmp_path / "none").restore(state)
    assert not (tmp_path / "none").exists()
    with pytest.raises(
        FileNotFoundError,
        match=f"no checkpoint in {tmp_path}: it holds no complete step. Give the directory that a run or",
    ):
        Checkpoints(tmp_path).restore(state)


def test_a_missing_step_is_an_error_that_lists_the_others(saved, plain):
    with pytest.raises(FileNotFoundError, match=rf"no step 3 in {saved}; it has \[2, 4\]"):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}), step=3)


def test_a_foreign_checkpoint_is_refused(saved, plain):
    (saved / "4/manifest/manifest.json").unlink()
    with pytest.raises(ValueError, match="4 has no manifest.json: it was not written by gtp_jax, or has been partly"):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}))
    (saved / "4/manifest/manifest.json").mkdir()
    with pytest.raises(ValueError, match="4 has no manifest.json"):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}))
    (saved / "4/manifest/manifest.json").rmdir()
    (saved / "4/manifest/manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="manifest.json: changed since it was written"):
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
    message = f"has format {other}, written by gtp_jax 9.0; this version reads format 2. Read it with a version"
    with pytest.raises(ValueError, match=message):
        Checkpoints(saved).restore(plain({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match=message):
        Checkpoints(saved).arrays(4)


def test_steps_must_ascend(saved, plain):
    state = plain({"w": jnp.ones(2)})
    with Checkpoints(saved) as checkpoints:
        for step in (3, 4):
            with pytest.raises(
                ValueError, match=f"`step` is {step}, but {saved} already has step 4; steps must ascend"
            ):
                checkpoints.save(step, state)
        checkpoints.save(5, state)
        with pytest.raises(ValueError, match="already has step 5"):
            checkpoints.save(5, state)


def test_a_negative_step_is_refused(tmp_path, plain):
    with pytest.raises(ValueError, match="`step` is -1; it must be a whole number of at least 0"):
        Checkpoints(tmp_path).save(-1, plain({"w": jnp.ones(2)}))


@pytest.mark.parametrize("step", ["2", 2.0, np.float64(2), True, np.bool_(True), b"2", np.array([2])], ids=repr)
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
            "damage_report": lambda: checkpoints.damage_report(step, []),
        }
        takes = {name for name in dir(Checkpoints) if not name.startswith("_")}
        takes = {name for name in takes if "step" in inspect.signature(getattr(Checkpoints, name)).parameters}
        assert takes == set(calls)
        message = re.escape(f"`step` is {step!r}, a {type(step).__name__}; it must be a whole number: an int, or an")
        for call in calls.values():
            with pytest.raises(TypeError, match=message):
                call()
        with pytest.raises(TypeError, match=message.replace("step", "damaged")):
            checkpoints.set_aside_after(2, [step])
        assert checkpoints.steps() == [2, 4]


@pytest.mark.parametrize("step", [np.int32(2), np.uint8(2), np.array(2), jnp.int32(2)], ids=["i", "u", "array", "jax"])
def test_a_step_may_be_an_integer_of_numpy_or_jax(saved, plain, step):
    state = plain({"a": {"w": jnp.ones((2, 3))}, "b": jnp.ones(4)})
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.manifest(step)["step"] == 2
        assert jnp.array_equal(checkpoints.restore(state, step)[0].params["b"], jnp.ones(4))
        checkpoints.save(step + 3, state)
        assert checkpoints.set_aside_after(step + 2, [step + 3]) and checkpoints.steps() == [2, 4]


@pytest.mark.parametrize("place", ["sub/../run", "sub//../sub/./../run", "link/../run", "/{}/run"])
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


def test_keep_must_keep_something(tmp_path):
    with pytest.raises(ValueError, match="`keep` is 0; at least 1 step must be kept, or `None` for all"):
        Checkpoints(tmp_path, keep=0)


@pytest.mark.parametrize("name", ["keep", "keep_best"])
@pytest.mark.parametrize("count", [1.5, "3", True], ids=repr)
def test_how_many_steps_are_kept_is_a_whole_number(tmp_path, name, count):
    with pytest.raises(TypeError, match=f"`{name}` is {count!r}, a .*; it must be a whole number"):
        Checkpoints(tmp_path, **{name: count})
    assert Checkpoints(tmp_path, **{name: np.int64(2)}).steps() == []


def test_extra_must_be_json(tmp_path, plain):
    state = plain({"w": jnp.ones(2)})
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(TypeError, match="`extra` cannot be written as JSON: .*ndarray.* Use numbers, strings"):
            checkpoints.save(1, state, {"order": np.ones(2)})
        with pytest.raises(TypeError, match="`extra` is a list; it must be a dict"):
            checkpoints.save(1, state, [1])
        with pytest.raises(TypeError, match="two keys of one dict that are the same in JSON"):
            checkpoints.save(1, state, {"order": {1: "a", "1": "b"}})
        deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
        with pytest.raises(ValueError, match="`extra` has too many levels of lists and dicts to be read back"):
            checkpoints.save(1, state, {"order": deep})
        assert checkpoints.steps() == []


def test_leaves_must_be_placed_arrays(tmp_path, plain):
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(TypeError, match=r"`params/a/w` of the state is a ndarray without a sharding; a jax.Array"):
        checkpoints.save(1, plain({"a": {"w": np.ones(2)}}))
    with pytest.raises(TypeError, match=r"`params/w` .* ShapeDtypeStruct without a sharding.*jax.set_mesh"):
        checkpoints.restore(plain({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}))
    with pytest.raises(TypeError, match=r"`params/w` of the state is a ShapeDtypeStruct; only arrays can be saved"):
        checkpoints.save(1, plain({"w": jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jnp.ones(1).sharding)}))


def test_a_donated_state_is_refused(tmp_path, plain):
    state = plain({"w": jnp.ones(2)})
    state.params["w"].delete()
    with pytest.raises(ValueError, match="`params/w` of the state has been donated. Save the state that the step ret"):
        Checkpoints(tmp_path).save(1, state)


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (jnp.zeros((0, 4)), "float32[0, 4]"),
        (jnp.ones(3, jnp.complex64), "complex64[3]"),
        (jnp.ones(3, jnp.uint4), "uint4[3]"),
        (jnp.ones(3, jnp.float8_e4m3), "float8_e4m3[3]"),
    ],
)
def test_arrays_that_orbax_or_digests_do_not_know_are_refused_by_path(tmp_path, plain, array, kind):
    with pytest.raises(ValueError, match=re.escape(f"`params/a/w` of the state is {kind}; only arrays with at")):
        Checkpoints(tmp_path).save(1, plain({"a": {"w": array}}))


def test_a_key_with_a_slash_is_restored_and_a_loss_may_be_an_array(tmp_path, plain):
    state = plain({"a/b": jnp.arange(2), "a": {"c": jnp.arange(3)}})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, loss=jnp.float32(1.5))
        checkpoints.wait()
        assert checkpoints.best() == 1 and checkpoints.manifest()["loss"] == 1.5
        restored, _ = checkpoints.restore(state)
    assert (restored.params["a/b"] == state.params["a/b"]).all()
    assert (restored.params["a"]["c"] == state.params["a"]["c"]).all()


def test_two_arrays_of_one_name_on_disk_are_refused(tmp_path, plain):
    with pytest.raises(ValueError, match="`params/a.b` and `params/a/b` of the state would be one array on disk"):
        Checkpoints(tmp_path).save(1, plain({"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(2)}))


def test_an_array_below_another_on_disk_is_refused(tmp_path, plain):
    with pytest.raises(ValueError, match="`params/a` of the state would be both an array .* holds `params/a/b`"):
        Checkpoints(tmp_path).save(1, plain({"a": jnp.ones(2), "a/b": jnp.zeros(2)}))


def test_a_file_in_the_way_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=f"`directory` is {tmp_path}/file/run, but {tmp_path}/file is a file"):
        Checkpoints(tmp_path / "file/run")


def test_an_unwritable_directory_is_an_error_at_once_unless_it_is_only_read(saved, plain):
    saved.chmod(0o555)
    with unprivileged():
        with pytest.raises(PermissionError, match=r"but .* cannot be written. Choose another .* `read_only=True`"):
            Checkpoints(saved)
    reader = Checkpoints(saved, read_only=True)
    state = plain({"a": {"w": jnp.zeros((2, 3))}, "b": jnp.zeros(4)})
    assert (reader.restore(state)[0].params["b"] == 1).all()
    with pytest.raises(ValueError, match="opened with `read_only=True`; leave it out"):
        reader.save(5, state)


@contextlib.contextmanager
def unprivileged():
    """As root, to whom every directory is writable, becomes nobody for a while."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
