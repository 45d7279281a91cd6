"""From Hugging Face's files to a checkpoint and back, bit for bit; read by another reader."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import export_llama, import_llama

from .hugging_face import CONFIG, assert_same, random_tensors, read_model, write_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model's tensors, its directory, and the checkpoint made of it."""
    folder = tmp_path_factory.mktemp("source")
    tensors = random_tensors(CONFIG)
    hugging_face = write_model(folder / "hf", tensors, CONFIG)
    import_llama(hugging_face, folder / "imported")
    return tensors, hugging_face, folder / "imported"


def digests(directory):
    return {name: leaf["digest"] for name, leaf in Checkpoints(directory, read_only=True).manifest()["leaves"].items()}


def test_float32_comes_back_bit_for_bit(source, tmp_path):
    tensors, _, imported = source
    done = export_llama(imported, tmp_path / "out", dtype="float32")
    assert_same(read_model(tmp_path / "out"), tensors)
    assert done.tensors == len(tensors) and done.nbytes == sum(t.nbytes for t in tensors.values())
    import_llama(tmp_path / "out", tmp_path / "again")
    assert digests(tmp_path / "again") == digests(imported)


def test_bfloat16_is_rounded_to_nearest_even(source, tmp_path):
    tensors, _, imported = source
    export_llama(imported, tmp_path / "out")
    found = read_model(tmp_path / "out")
    for name, values in tensors.items():
        bits = values.view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        assert found[name].dtype == ml_dtypes.bfloat16
        assert np.array_equal(found[name].view(np.uint16), rounded.astype(np.uint16)), name


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_types_are_imported_exactly(dtype, tmp_path):
    tensors = random_tensors(CONFIG, dtype)
    import_llama(write_model(tmp_path / "hf", tensors, CONFIG), tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "out", dtype="float32")
    assert_same(read_model(tmp_path / "out"), {name: t.astype(np.float32) for name, t in tensors.items()})


def test_files_are_as_large_as_asked_and_the_index_names_each_tensor_once(source, tmp_path):
    tensors, _, imported = source
    limit = 50_000
    done = export_llama(imported, tmp_path / "out", dtype="float32", shard_bytes=limit)
    assert_same(read_model(tmp_path / "out"), tensors)
    assert [file.name for file in done.files] == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(done.files) > 5
    for file in done.files:
        assert file.stat().st_size < limit + 4096
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.nbytes
    import_llama(tmp_path / "out", tmp_path / "again")
    assert digests(tmp_path / "again") == digests(imported)


def test_config_comes_back_with_what_it_said_of_other_things(source, tmp_path):
    export_llama(source[2], tmp_path / "out")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found == {**CONFIG, "torch_dtype": "bfloat16"}
    export_llama(source[2], tmp_path / "longer", max_positions=8192)
    assert json.loads((tmp_path / "longer/config.json").read_text())["max_position_embeddings"] == 8192


SCALING = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
SCALING["original_max_position_embeddings"] = 8192
EMPTY = {"rope_scaling": {}}


@pytest.mark.parametrize(
    "places",
    [
        dict(rope_theta=5e5, rope_scaling=SCALING),
        dict(rope_parameters={**SCALING, "rope_theta": 5e5}),
        dict(rope_theta=5e5, rope_scaling=SCALING, rope_parameters={**SCALING, "rope_theta": 5e5}),
        dict(rope_scaling={**SCALING, "rope_theta": 5e5}, rope_parameters={"rope_theta": 5e5}),
    ],
    ids=["rope_scaling", "rope_parameters", "both", "the base in both"],
)
def test_scaled_frequencies_are_read_from_either_place_and_written_for_all_versions(tmp_path, places):
    given = {**{name: value for name, value in CONFIG.items() if name != "rope_theta"}, **places}
    write_model(tmp_path / "hf", random_tensors(CONFIG), given)
    config = import_llama(tmp_path / "hf", tmp_path / "imported").config
    assert config.rope_theta == 5e5
    assert config.rope_scaling == gtp.nn.RopeScaling(kind="llama3", factor=8.0, original_length=8192)
    export_llama(tmp_path / "imported", tmp_path / "out")
    # transformers 4 reads these two fields alone
    for_all = {"rope_theta": 5e5, "rope_scaling": SCALING, **given, "torch_dtype": "bfloat16"}
    assert json.loads((tmp_path / "out/config.json").read_text()) == for_all
    assert import_llama(tmp_path / "out", tmp_path / "again").config == config
    export_llama(tmp_path / "imported", tmp_path / "other", config=dataclasses.replace(config, rope_theta=7e5))
    written = json.loads((tmp_path / "other/config.json").read_text())
    found = {name: written.get(name) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
    assert found == {"rope_theta": 7e5, "rope_scaling": SCALING, "rope_parameters": None}


@pytest.mark.parametrize(
    ("theta", "scaling", "others"), [(5e5, None, {}), (1e4, None, {}), (5e5, None, EMPTY), (5e5, SCALING, EMPTY)]
)
def test_what_transformers_5_alone_reads_is_written_where_transformers_4_reads_it(tmp_path, theta, scaling, others):
    """But for a base that is its default, and for an empty scaling."""
    given = {name: value for name, value in CONFIG.items() if name != "rope_theta"}
    given["rope_parameters"] = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    write_model(tmp_path / "hf", random_tensors(CONFIG), {**given, **others})
    import_llama(tmp_path / "hf", tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "out")
    more = {**({} if theta == 1e4 else {"rope_theta": theta}), **({"rope_scaling": scaling} if scaling else {})}
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == {**given, **more, "torch_dtype": "bfloat16"}


def test_sizes_that_transformers_leaves_out_have_its_defaults(source, tmp_path):
    left_out = ("head_dim", "rope_theta", "tie_word_embeddings", "num_key_value_heads", "rms_norm_eps")
    config = {**CONFIG, "head_dim": 16, "num_key_value_heads": 4}
    tensors = random_tensors(config)
    partial = {name: value for name, value in config.items() if name not in left_out}
    found = import_llama(write_model(tmp_path / "hf", tensors, partial), tmp_path / "imported").config
    sizes = found.head_dim, found.num_kv_heads, found.rope_theta, found.tie_embeddings, found.epsilon
    assert sizes == (16, 4, 10000.0, False, 1e-6)


def test_tables_of_the_rotary_embedding_in_old_files_are_left_out(source, tmp_path):
    tensors, _, imported = source
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    import_llama(write_model(tmp_path / "hf", old, CONFIG), tmp_path / "imported")
    assert digests(tmp_path / "imported") == digests(imported)
