"""What cannot be converted is refused by a message that says why, and nothing is left behind."""

import json
import random
import re
import shutil

import numpy as np
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints, StreamedArray
from gtp_jax.convert import export_llama, import_llama
from gtp_jax.convert._files import open_tensors
from gtp_jax.convert._fresh import fresh_directory
from gtp_jax.convert._import import _check
from gtp_jax.convert._safetensors import Reader
from gtp_jax.convert._stored import tensors_of
from gtp_jax.models import LlamaConfig
from gtp_jax.models.llama._hf_config import _PLACES
from gtp_jax.models.llama._hf_names import tensors as wanted_tensors
from gtp_jax.runner.cli import main

from .hugging_face import CONFIG, assert_same, random_tensors, read_model, write_model

SIZES = dict(
    vocab_size=102, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=160
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model in two files, and the checkpoint made of it."""
    folder = tmp_path_factory.mktemp("made")
    write_model(folder / "hf", random_tensors(CONFIG), CONFIG, files=2)
    import_llama(folder / "hf", folder / "imported")
    return folder


@pytest.fixture
def source(made, tmp_path):
    """The model again, to be changed."""
    return shutil.copytree(made / "hf", tmp_path / "hf")


def refused(convert, *arguments, out, error=ValueError, **options) -> str:
    """The message; nothing has been written."""
    before = sorted(p.name for p in out.parent.iterdir())
    with pytest.raises(error) as caught:
        convert(*arguments, out, **options)
    assert sorted(p.name for p in out.parent.iterdir()) == before
    return str(caught.value)


def change_config(source, **fields):
    (source / "config.json").write_text(json.dumps({**CONFIG, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(model_type="gemma"), "model_type 'gemma'"),
        (dict(architectures=["LlamaForSequenceClassification"]), "LlamaForCausalLM"),
        (
            dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": "1"}),
            "'llama3' high_freq_factor",
        ),
        (dict(rope_scaling={"type": "linear", "factor": 0}), "`factor` RopeScaling 0"),
        (dict(rope_parameters={"rope_type": "longrope"}), "'longrope' linear, llama3, yarn"),
        (dict(rope_parameters={"rope_type": "yarn"}), "'yarn' factor"),
        (dict(attention_bias=True), "attention_bias True False"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
        (dict(num_attention_heads=3), "`num_kv_heads` 2 `num_heads` 3"),
        (dict(hidden_size=None), "lacks hidden_size"),
        (dict(hidden_size="64"), "hidden_size '64'"),
        (dict(num_attention_heads=4.0, rms_norm_eps="x"), "num_attention_heads 4.0 rms_norm_eps 'x'"),
        (dict(rope_theta=float("nan")), "rope_theta nan finite"),
        (dict(rope_theta=10**400, rms_norm_eps=1e39), "rms_norm_eps 1e+39 rope_theta finite"),
        (dict(vocab_size=10**400), "`vocab_size` 2**31"),
        (dict(tie_word_embeddings="no"), "tie_word_embeddings 'no' true"),
        (dict(rope_scaling={"factor": 8.0}), "rope_scaling factor rope_type None"),
        (dict(rope_parameters={"rope_theta": 5e5, "factor": 8.0}), "rope_parameters factor rope_type"),
        (dict(rope_scaling={"type": "default", "factor": 8.0}), "factor rope_type 'default'"),
        (
            dict(rope_scaling={"rope_type": "llama3", "type": "linear", "factor": 8.0}),
            "rope_scaling.rope_type 'llama3' rope_scaling.type 'linear'",
        ),
        (dict(rope_scaling=[]), "rope_scaling []"),
        (dict(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "rope_parameters all layers"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 1"),
        (dict(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor 0.5"),
        (
            dict(partial_rotary_factor=0.5, **dict.fromkeys(_PLACES, {"partial_rotary_factor": None})),
            "partial_rotary_factor 0.5",
        ),
        (
            dict(partial_rotary_factor=0.5, rope_scaling={"partial_rotary_factor": 1.0}),
            "partial_rotary_factor 0.5 rope_scaling.partial_rotary_factor 1.0",
        ),
        (
            dict(rope_theta=5e5, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
            "rope_theta 500000.0 rope_parameters.rope_theta 1000000.0",
        ),
        (
            dict(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
            "rope_scaling rope_parameters contradict",
        ),
    ],
)
def test_configurations_that_our_llama_does_not_compute(source, tmp_path, fields, message):
    change_config(source, **fields)
    assert re.search(naming(message), refused(import_llama, source, out=tmp_path / "out"))


@pytest.mark.parametrize(
    "fields",
    [
        dict(rope_scaling={}),
        dict(rope_scaling={"type": None, "factor": None}),
        dict(rope_parameters={"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1.0}),
        dict(partial_rotary_factor=1, rope_parameters={"partial_rotary_factor": 1.0}, rope_scaling=None),
        dict(rope_parameters={"rope_theta": 5e5, "original_max_position_embeddings": 4096}),
    ],
)
def test_what_says_nothing_of_a_scaling_is_none(source, tmp_path, fields):
    change_config(source, **fields)
    assert import_llama(source, tmp_path / "out").config.rope_scaling is None


def test_an_integer_base_that_is_too_large_for_jax_becomes_a_float(source, tmp_path):
    change_config(source, rope_theta=10**10)
    assert type(import_llama(source, tmp_path / "large").config.rope_theta) is float


def test_files_that_are_not_there(source, tmp_path):
    for name, message in (
        ("model-00002-of-00002.safetensors", "model-00002-of-00002.safetensors Download"),
        ("model.safetensors.index.json", "model.safetensors model.safetensors.index.json"),
        ("config.json", "no config.json"),
    ):
        (source / name).unlink()
        found = refused(import_llama, source, out=tmp_path / "out", error=FileNotFoundError)
        assert re.search(naming(message), found)
    found = refused(import_llama, tmp_path / "nowhere", out=tmp_path / "out", error=FileNotFoundError)
    assert re.search(naming("nowhere has no config.json Hugging Face"), found)


def test_files_that_are_not_json(source, tmp_path):
    index, elsewhere = source / "model.safetensors.index.json", tmp_path / "elsewhere.json"
    for text in ("{}", '{"weight_map": {"lm_head.weight": 5}}', '{"weight_map": [1]}', "[" * 100_000):
        index.write_text(text)
        assert "`weight_map`" in refused(import_llama, source, out=tmp_path / "out")
    index.rename(elsewhere)
    index.symlink_to(elsewhere)
    message = refused(import_llama, source, out=tmp_path / "out")
    assert "outside the folder" in message and "weight_map" not in message
    for text in ("[1]", "[" * 100_000):
        (source / "config.json").write_text(text)
        assert re.search(naming("config.json JSON object"), refused(import_llama, source, out=tmp_path / "out"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b'{"model":', "tokenizer.json JSON Download"),
        ("added_tokens.json", b"{" + b'"":0,' * 4_000_000 + b"}", "added_tokens.json 4000000"),
        ("tokenizer.model", 1 << 40, "tokenizer.model 67108864"),
        ("merges.txt", "../secret", "merges.txt secret outside"),
        ("chat_template.jinja", "nowhere", "chat_template.jinja Download"),
        ("special_tokens_map.json", "/dev/zero", "special_tokens_map.json /dev/zero outside"),
    ],
    ids=["cut", "values", "huge", "outside", "dangling", "device"],
)
def test_malformed_files_of_a_tokenizer(source, tmp_path, name, content, message):
    (tmp_path / "secret").write_text("secret")
    if isinstance(content, bytes):
        (source / name).write_bytes(content)
    elif isinstance(content, int):
        with (source / name).open("wb") as file:
            file.truncate(content)
    else:
        (source / name).symlink_to(content)
    error = FileNotFoundError if content == "nowhere" else ValueError
    assert re.search(naming(message), refused(import_llama, source, out=tmp_path / "out", error=error))


def test_files_of_a_tokenizer_in_the_cache_of_hugging_face_are_kept(source, tmp_path):
    snapshot, blobs = tmp_path / "snapshots/1", tmp_path / "blobs"
    snapshot.parent.mkdir()
    source.rename(snapshot)
    blobs.mkdir()
    (blobs / "1234").write_bytes(b"a model")
    (snapshot / "tokenizer.model").symlink_to("../../blobs/1234")
    assert import_llama(snapshot, tmp_path / "out").others == ("tokenizer.model",)
    assert Checkpoints(tmp_path / "out", read_only=True).files() == {"tokenizer.model": b"a model"}


def test_an_index_of_other_files(source, tmp_path):
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    message = refused(import_llama, source, out=tmp_path / "out")
    assert re.search("model.norm.weight .* model-00002.*index.json .* model-00001", message)
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert "no file" in refused(import_llama, source, out=tmp_path / "out")


def test_a_single_file_beside_an_index_that_does_not_name_it_is_refused(source, tmp_path):
    write_model(source, random_tensors(CONFIG, seed=1), CONFIG)
    message = refused(import_llama, source, out=tmp_path / "out")
    assert re.search(naming("model.safetensors model.safetensors.index.json two models Delete"), message)
    index, single = source / "model.safetensors.index.json", "model.safetensors"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(random_tensors(CONFIG), single)}))
    assert [file.name for file in import_llama(source, tmp_path / "out").files] == [single]


@pytest.mark.parametrize("files", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_stored_head_is_left_out_if_it_equals_the_tied_embedding_and_refused_otherwise(tmp_path, files, capsys):
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = random_tensors(config)
    table = tensors["model.embed_tokens.weight"]
    write_model(tmp_path / "hf", {**tensors, "lm_head.weight": table}, config, files=files)
    assert main(["convert", "import", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    assert "not imported: lm_head.weight, which equals the tied embedding bit for bit\n" in capsys.readouterr().out
    done = export_llama(tmp_path / "imported", tmp_path / "out", dtype="float32")
    assert done.copies == ()
    assert_same(read_model(tmp_path / "out"), tensors)
    last = table.copy()
    last[-1, -1] = np.nextafter(last[-1, -1], np.float32(9))
    for number, other in enumerate((last, table[:-1], table.astype(np.float16))):
        source = write_model(tmp_path / f"hf{number}", {**tensors, "lm_head.weight": other}, config, files=files)
        message = refused(import_llama, source, out=tmp_path / "other")
        wanted = "lm_head.weight model.embed_tokens.weight tie_word_embeddings to false save again"
        assert re.search(naming(wanted), message)


HEAD, NORM, OTHER = "lm_head.weight", "model.norm.weight", "model.layers.3.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(HEAD), "in no file, [102, 64] wanted"),
        (lambda t: t.update({HEAD: t[HEAD][:-1]}), "F32[101, 64] in model.safetensors, [102, 64] of F32, BF16, F16"),
        (lambda t: t.update({HEAD: t[HEAD].T}), "F32[64, 102] in model.safetensors, [102, 64]"),
        (lambda t: t.update({NORM: np.ones(64, np.int32)}), "I32[64] in model.safetensors, [64] of F32, BF16, F16"),
        (lambda t: t.update({OTHER: np.ones(64, np.float32)}), "F32[64] in model.safetensors, no such tensor"),
    ],
)
def test_tensors_that_are_not_the_models(tmp_path, change, message):
    tensors = random_tensors(CONFIG)
    before = dict(tensors)
    change(tensors)
    [name] = {name for name in {**before, **tensors} if before.get(name) is not tensors.get(name)}
    found = refused(import_llama, write_model(tmp_path / "hf", tensors, CONFIG), out=tmp_path / "out")
    assert re.search(naming("config.json (1 differ)"), found) and f"{name}: {message}" in found


def headed(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def test_files_that_are_not_whole(source, tmp_path):
    path = source / "model-00001-of-00002.safetensors"
    whole = path.read_bytes()
    for changed, message in (
        (whole[:-1], f"truncated {len(whole) - 1} {len(whole)}"),
        (whole + b"\0", f"longer {len(whole) + 1}"),
        (whole[:100], f"header {int.from_bytes(whole[:8], 'little')} 100"),
        (whole[:4], "header 8 4"),
        (b"", "header 0 bytes"),
        (b"\xff" * 8 + whole[8:], "header 18446744073709551615"),
        (whole[:8] + b"[" + whole[9:], "header JSON"),
        (headed(b"[" * 100_000), "header JSON"),
        (headed(b'{"w":{"dtype":[],"shape":[],"data_offsets":[0,0]}}'), "w dtype []"),
    ):
        path.write_bytes(changed)
        found = refused(import_llama, source, out=tmp_path / "out")
        assert re.search(naming(str(path), message), found)


def test_a_changed_byte_of_a_header_is_found_or_harmless(tmp_path):
    config = {**CONFIG, "num_hidden_layers": 1}
    tensors = random_tensors(config)
    source = write_model(tmp_path / "hf", tensors, config)
    path = source / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    found = 0
    for place in rng.sample(range(header), 400):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])
        try:
            readers = open_tensors(source)
            wanted = wanted_tensors("llama", LlamaConfig(**SIZES))
            _check(source, readers, [part for tensor in wanted for part in tensors_of(tensor, readers, None)])
        except ValueError:
            found += 1
        else:
            assert_same({name: reader.read(name) for name, reader in readers.items()}, tensors)
    assert found > 350


def test_out_is_not_overwritten(made, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for convert, source in ((import_llama, made / "hf"), (export_llama, made / "imported")):
        for name in ("full", "file"):
            assert re.search(
                naming(f"{tmp_path / name} new empty directory"), refused(convert, source, out=tmp_path / name)
            )
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"


def test_an_out_that_cannot_be_replaced_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: path == tmp_path / "mounted")
    for name, message in (("loop", "link"), ("mounted", "mount")):
        with pytest.raises(ValueError, match=naming(f"`out` {tmp_path / name} {message} new empty directory")):
            with fresh_directory(tmp_path / name):
                pytest.fail("it was written to")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "mounted"]


def test_arguments_out_of_range(made, tmp_path):
    for options, wanted in (
        ({"dtype": "int4"}, "`dtype` 'int4' bfloat16 float32 fp8 mxfp8 nvfp4"),
        ({"shard_bytes": 0}, "`shard_bytes` 0"),
        *(({"max_positions": n}, f"`max_positions` {n!r} None") for n in (0, -1, 1.5, "x", True)),
    ):
        assert re.search(naming(wanted), refused(export_llama, made / "imported", out=tmp_path / "out", **options))


def test_a_checkpoint_of_another_or_of_an_unknown_model(made, tmp_path):
    other = LlamaConfig(**{**SIZES, "num_layers": 4})
    message = refused(export_llama, made / "imported", out=tmp_path / "out", config=other)
    assert re.search(naming("(3, 64, 128) found (4, 64, 128) wanted"), message)
    array = StreamedArray((2, 2), np.float32, 1, lambda begin: np.zeros((1, 2), np.float32))
    with Checkpoints(tmp_path / "unknown") as checkpoints:
        checkpoints.save_params(0, {"kernel": array})
    message = refused(export_llama, tmp_path / "unknown", out=tmp_path / "out")
    assert re.search(naming("which model `config`"), message)
    message = refused(export_llama, tmp_path / "unknown", out=tmp_path / "out", config=other)
    assert re.search(naming("params/embed/table no array (102, 64) wanted 5 more"), message)


def test_rows_that_are_not_whole_blocks(tmp_path):
    config = {**CONFIG, "intermediate_size": 168}
    import_llama(write_model(tmp_path / "hf", random_tensors(config), config), tmp_path / "imported")
    for dtype, block in (("mxfp8", 32), ("nvfp4", 16)):
        message = refused(export_llama, tmp_path / "imported", out=tmp_path / "out", dtype=dtype)
        assert re.search(naming(f"{block} 168 model.layers.0.mlp.down_proj.weight"), message)


def test_of_a_damaged_checkpoint_nothing_wrong_is_exported(made, tmp_path):
    copy = shutil.copytree(made / "imported", tmp_path / "copy")
    path = max((copy / "0/arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = path.read_bytes()
    rng = random.Random(0)
    found = 0
    for i in range(20):
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        out = tmp_path / f"out{i}"
        try:
            export_llama(copy, out, dtype="float32")
        except ValueError:
            found += 1
            assert not out.exists()
        else:  # a byte of what is not part of the arrays any more
            assert_same(read_model(out), random_tensors(CONFIG))
    assert found > 5


def test_an_error_while_tensors_are_written_leaves_nothing(made, tmp_path, monkeypatch):
    left = 3 + len(random_tensors(CONFIG))  # the first pass is for the digests
    read = Reader.read

    def failing(self, name):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("Input/output error")
        return read(self, name)

    monkeypatch.setattr(Reader, "read", failing)
    assert "Input/output error" in refused(import_llama, made / "hf", out=tmp_path / "out", error=OSError)
    assert left == -1
