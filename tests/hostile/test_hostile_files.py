"""Hostile files are refused with a message, in bounded time and memory, and nothing outside of their folder is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main

from .attack import BAD, attempts, run
from .files import headed, sealed
from .targets import (
    CONFIG,
    REFUSED,
    Folder,
    attack_config,
    attack_events,
    attack_flags,
    attack_index,
    attack_manifest,
    attack_safetensors,
    attack_settings,
    attack_tokenizer,
    outcome,
    special,
)

SAMPLE = 6
TARGETS = ("safetensors", "config", "index", "manifest", "tokenizer", "records", "ids", "events", "settings", "flags")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Folder:
    return Folder(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_ends_as_it_should(folder, target):
    ended = attempts(folder, target, SAMPLE)
    assert len(ended) == SAMPLE
    assert [(hostile, how) for hostile, how in ended if how.kind in BAD] == []


@pytest.mark.slow
def test_a_thousand_end_as_they_should():
    found = run(1000)
    print(json.dumps(found["counts"], indent=1), f"memory grew by {found['memory']} MB at most")
    assert found["worst"] == []
    assert sum(sum(counts.values()) for counts in found["counts"].values()) >= 1000
    assert all(counts.get(REFUSED, 0) for counts in found["counts"].values())
    assert found["memory"] < 1500


def config(**fields) -> bytes:
    return json.dumps({**CONFIG, **fields}).encode()


MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2}


def settings(**values) -> bytes:
    return json.dumps({"gtp_jax": "0.1.0", **values}).encode()


def manifest(folder: Folder, **fields) -> bytes:
    return sealed(json.dumps({**folder.manifest, **fields}).encode())


def tensor(folder: Folder, name: str = "w", **fields) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **fields}
    return headed(json.dumps({name: entry}).encode(), b"\0" * 8)


def leaf(folder: Folder, **fields) -> bytes:
    return manifest(folder, leaves={"w": {"shape": [2], "dtype": "float32", "digest": "0", **fields}})


def exported(folder: Folder, **sizes) -> tuple[bytes, str]:
    """A manifest of a model of other sizes, to be exported."""
    model = {**folder.manifest["extra"]["model"], **sizes}
    return manifest(folder, extra={"model": model}), "convert export {run} {out}"


def index(file: str) -> bytes:
    return json.dumps({"weight_map": {"w": file}}).encode()


ESCAPE = "\x1b[2J"
ONE_WORD = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
# What was found, kept: the target, the file, and the message.
FOUND = {
    "10^8 layers": (attack_config, lambda _: config(num_hidden_layers=10**8), "100000000 layers 10000"),
    "10^8 experts": (attack_config, lambda _: config(**MIXTURE, num_local_experts=10**8), "100000000 experts 100000"),
    "deep": (attack_config, lambda _: b"[" * 100_000, "JSON 64 levels"),
    "levels": (attack_config, lambda _: b'{"a":' * 70 + b"1" + b"}" * 70, "64 levels"),
    "many": (attack_config, lambda _: b"[" + b"0," * 2_000_000 + b"0]", "config.json 2000000 values"),
    "a key twice": (attack_config, lambda _: b'{"a": 1, "a": 2}', "key 'a' twice"),
    "escapes": (attack_config, lambda _: config(model_type=ESCAPE), r"model_type '\x1b[2J'"),
    "absolute": (attack_index, lambda folder: index(str(folder.root / "secret")), "must not be read file name"),
    "parent": (attack_index, lambda _: index("../secret"), "'../secret' file name"),
    "a device": (attack_index, lambda _: index("device"), "link /dev/zero outside"),
    "a FIFO": (attack_index, lambda _: index("fifo"), "FIFO regular file"),
    "a loop": (attack_index, lambda _: index("loop"), "loop link to itself"),
    "names": (attack_safetensors, lambda folder: tensor(folder, ESCAPE), r"name '\x1b[2J'"),
    "dimensions": (attack_safetensors, lambda folder: tensor(folder, shape=[1] * 40), "40 dimensions 32"),
    "large": (attack_safetensors, lambda folder: tensor(folder, shape=[10**40]), "w shape 63 bits"),
    "metadata that are not text": (
        attack_safetensors,
        lambda _: headed(b'{"__metadata__": {"format": {}}}', b""),
        "metadata 'format' string",
    ),
    "metadata": (attack_safetensors, lambda _: headed(b'{"__metadata__": 5}', b""), "metadata 5"),
    "leaves": (attack_manifest, lambda f: (manifest(f, leaves=[1]), "checkpoint show {run}"), "`leaves` [1]"),
    "dtype": (attack_manifest, lambda f: (leaf(f, dtype="f4,f4"), "checkpoint list {run}"), None),  # listed as damaged
    "shape": (attack_manifest, lambda f: (leaf(f, shape=[-1]), "checkpoint diff {run} {run}"), "`leaves` 'w' shape"),
    "layers of a manifest": (attack_manifest, lambda f: exported(f, num_layers=10**9), "1000000000 layers 10000"),
    "types of a manifest": (attack_manifest, lambda f: exported(f, num_layers=1.5), "`num_layers` 1.5"),
    "a word that a tokenizer does not know": (
        attack_tokenizer,
        lambda f: json.dumps({**f.tokenizer, "model": ONE_WORD}).encode(),
        "`tokenizer` tokenizer.json `data` WordLevel [UNK]",
    ),
    "events of others": (
        attack_events,
        lambda _: b'{"note": "mine"}\n{"event": "start", "time": "x"}\n{"event": "recovered", "time": 1}',
        "supervisor events.jsonl --elastic",
    ),
    "deep events": (attack_events, lambda _: b'{"a":' * 100_000, "supervisor events.jsonl --elastic"),
    "no tokenizer": (attack_tokenizer, lambda _: b"[" * 100_000, "tokenizer.json"),
    "prefetch": (attack_settings, lambda _: settings(prefetch="no"), "`prefetch` 'no' true false"),
    "a number as text": (attack_settings, lambda _: settings(lr="0.1"), "`lr` '0.1' number"),
    "true as a number": (attack_settings, lambda _: settings(steps=True), "`steps` True number"),
    "nothing": (attack_settings, lambda _: settings(seq=None), "`seq` None"),
    "a text as a list": (attack_settings, lambda _: settings(data="text.txt"), "`data` 'text.txt'"),
    "places": (attack_settings, lambda _: settings(failed_devices=[0.5]), "`failed_devices` 0.5 numbers"),
    "rows": (attack_settings, lambda _: settings(replica_batches=[True]), "`replica_batches` True numbers"),
    "a list as a name": (attack_settings, lambda _: settings(preset=["tiny"]), "`preset` 'tiny'"),
    "unknown words": (attack_flags, lambda _: [ESCAPE], r"unrecognized \x1b[2J"),
    "flags": (attack_flags, lambda _: ["--lr", "nan"], "`lr` nan 0"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_refused(folder, name):
    attack, content, message = FOUND[name]
    ended = outcome(folder, attack, content(folder))
    if message is None:
        assert ended.kind not in BAD
    else:
        assert ended.kind == REFUSED and re.search(naming(message), ended.text), ended


@pytest.mark.parametrize("kind", ["fifo", "loop", "device", "folder", "outside"])
def test_what_is_no_file_of_the_folder_is_not_opened(folder, kind):
    for path, command in (
        (folder.path("config.json"), ["convert", "import", str(folder.root / "hf"), str(folder.root / "out")]),
        (folder.path("model.safetensors.index.json"), ["convert", "import", str(folder.root / "hf"), "out"]),
        (folder.path(folder.shard.name), ["convert", "import", str(folder.root / "hf"), str(folder.root / "out")]),
        (folder.manifest_file, ["checkpoint", "show", str(folder.root / "run")]),
    ):

        def replaced(at: Folder, words: list[str], path: Path = path) -> None:
            path.unlink()
            special(kind, path)
            try:
                if main(words) == 2:
                    raise ValueError("refused")
            finally:
                path.rmdir() if path.is_dir() else path.unlink()

        ended = outcome(folder, replaced, command)  # pyright: ignore[reportArgumentType]
        assert ended.kind == REFUSED, (path, ended)
    assert not (folder.root / "out").exists()


def test_special_files_within_a_step_are_damage_and_are_not_opened(folder):
    arrays = folder.root / "run/0/arrays"
    for kind in ("fifo", "loop", "device"):
        special(kind, arrays / "strange")
        checkpoints = Checkpoints(folder.root / "run", read_only=True)
        lines = checkpoints.verify(0)
        assert len(lines) == 1 and re.search("strange: a link|strange is a FIFO", lines[0])
        with pytest.raises(ValueError, match=naming("damaged strange")):
            checkpoints.arrays(0)
        (arrays / "strange").unlink()


def test_weights_that_are_not_numbers_are_refused(folder, capsys):
    path = folder.path(folder.shard.name)
    tensors = safetensors.numpy.load_file(path)
    name = max(tensors)
    safetensors.numpy.save_file({**tensors, name: np.full_like(tensors[name], np.nan)}, path)
    assert main(["convert", "import", str(folder.root / "hf"), str(folder.root / "out")]) == 2
    assert re.search(naming(f"{name} {path} NaN"), capsys.readouterr().err)
    assert not (folder.root / "out").exists()
    folder.mend()
