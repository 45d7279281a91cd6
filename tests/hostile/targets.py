"""What reads foreign files, fed with hostile ones: how each ends, in this process, within a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
from convert.hugging_face import random_tensors, write_model
from hypothesis import strategies as st

from gtp_jax.convert import import_llama
from gtp_jax.runner.cli import main, parser
from gtp_jax.runner.cli._errors import explanation
from gtp_jax.runner.data import load_source, load_tokenizer, read_text
from gtp_jax.runner.elastic import read_events
from gtp_jax.runner.elastic._picture import spans_of
from gtp_jax.runner.flags import from_settings, given, settings_of
from gtp_jax.runner.trainer import TrainConfig, events_in, read_log
from gtp_jax.runner.trainer._account import NEEDS, seconds_by_cause

from .files import PATHS, TEXTS, changed, headed, json_of, sealed

REFUSED, ACCEPTED, SILENT, TRACEBACK, HUNG = "refused", "accepted", "silent", "raw traceback", "did not return"
SECONDS = 10.0

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 6,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
}
SECRET = "the secret outside of the folder"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        kind: one of the five.
        text: what was printed, or the exception.
    """

    kind: str
    text: str


class Folder:
    """A model, a checkpoint of it and a tokenizer, good to begin with, beside things that must not be opened."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "secret").write_text(SECRET)
        model = write_model(root / "good", random_tensors(CONFIG), CONFIG, files=2)
        for name in ("fifo", "loop", "device", "folder"):
            special(name, model / name)
        shutil.copytree(model, root / "hf", symlinks=True, copy_function=_copy)
        import_llama(model, root / "run")
        self.index = json.loads((model / "model.safetensors.index.json").read_text())
        self.manifest_file = root / "run/0/manifest/manifest.json"
        self.manifest = json.loads(self.manifest_file.read_text())
        self.shard = model / "model-00001-of-00002.safetensors"
        shard = self.shard.read_bytes()
        length = int.from_bytes(shard[:8], "little")
        self.header, self.data = json.loads(shard[8 : 8 + length]), shard[8 + length :]
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.add_special_tokens(["</s>"])
        self.tokenizer = json.loads(words.to_str())

    def path(self, name: str) -> Path:
        """A file of the model that is attacked."""
        return self.root / "hf" / name

    def mend(self) -> None:
        """Makes all as it was."""
        for name in ("config.json", "model.safetensors.index.json", self.shard.name):
            self.path(name).unlink(missing_ok=True)
            shutil.copyfile(self.root / "good" / name, self.path(name))
        self.manifest_file.unlink(missing_ok=True)
        self.manifest_file.write_text(json.dumps(self.manifest))


def _copy(source: str, target: str) -> None:
    if os.path.isfile(source):
        shutil.copyfile(source, target)
    else:
        special(Path(source).name, Path(target))


def special(kind: str, path: Path) -> None:
    """Makes something that is no regular file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "outside":
        path.symlink_to("../secret")


# The targets: what may be drawn, and what is done with it.
Attack = Callable[[Folder, Any], str | None]


def attack_config(folder: Folder, content: bytes) -> str | None:
    """`gtp-jax convert import` of another config.json."""
    folder.path("config.json").write_bytes(content)
    return _import(folder)


def attack_index(folder: Folder, content: bytes) -> str | None:
    """`gtp-jax convert import` with another index."""
    folder.path("model.safetensors.index.json").write_bytes(content)
    return _import(folder)


def attack_safetensors(folder: Folder, content: bytes) -> str | None:
    """`gtp-jax convert import` of another file of tensors; what is read must be what the reference reads."""
    path = folder.path(folder.shard.name)
    path.write_bytes(content)
    failure = _import(folder)
    if failure is None:
        safetensors.numpy.load_file(path)  # refuses what is no such file
    return failure


def attack_manifest(folder: Folder, drawn: tuple[bytes, str]) -> str | None:
    """`gtp-jax checkpoint` and `gtp-jax convert export` of a forged manifest."""
    content, command = drawn
    folder.manifest_file.write_bytes(content)
    with tempfile.TemporaryDirectory() as out:
        words = command.format(run=shlex.quote(str(folder.root / "run")), out=shlex.quote(f"{out}/out"))
        return _command(shlex.split(words))


def attack_tokenizer(folder: Folder, content: bytes) -> str | None:
    """A tokenizer.json: all ids are within its vocabulary, and the separator stands behind each document only."""
    path = folder.root / "tokenizer.json"
    path.write_bytes(content)
    tokenizer = load_tokenizer(path)
    stream = tokenizer.documents([b"a b c", b"</s> a"]).tokens
    if stream.max() >= tokenizer.vocab_size or stream[-1] != tokenizer.separator:
        return "an id outside of the vocabulary, or no separator"
    return None if np.sum(stream == tokenizer.separator) == 2 else "a separator is a word"


def attack_records(folder: Folder, content: bytes) -> str | None:
    """A file of JSON lines: what is read is text without a separator, and nothing of it is lost."""
    path = folder.root / "records.jsonl"
    path.write_bytes(content)
    read = read_text([path])
    documents = list(read.documents)
    if len(documents) != len(read.documents) or any(b"\0" in one or one.decode() is None for one in documents):
        return f"documents that are none: {documents}"
    source = load_source(read)
    counted = sum(len(one.tokens) for one in (*source.train, *source.held_out))
    return None if counted >= sum(len(one) + 1 for one in documents if one) else "a document is lost"


def attack_ids(folder: Folder, drawn: tuple[bytes, str]) -> str | None:
    """A file of token ids: none is outside of the vocabulary, and all are on one side of the split."""
    content, name = drawn
    path = folder.root / name
    path.write_bytes(content)
    source = load_source(read_text([path]), token_dtype="int64" if name == "wide.bin" else "int32")
    tokens = [token for one in (*source.train, *source.held_out) for token in one.tokens.tolist()]
    return None if all(0 <= token < 256 for token in tokens) else f"ids outside of the vocabulary: {tokens}"


def attack_settings(folder: Folder, content: bytes) -> str | None:
    """A run's config.json: what is accepted has the types of the defaults."""
    path = folder.root / "settings.json"
    path.write_bytes(content)
    return _odd_types(TrainConfig.load(path))


def attack_events(folder: Folder, content: bytes) -> str | None:
    """`gtp-jax elastic show` of a record, and what else is computed of it."""
    path = folder.root / "run" / "events.jsonl"
    path.write_bytes(content)
    seconds = seconds_by_cause(events_in(path, NEEDS))
    logged = read_log(path)
    if not all(0 <= s < float("inf") for s in seconds.values()) or not all(isinstance(r["step"], int) for r in logged):
        return f"odd numbers: {seconds}, {logged}"
    spans_of(read_events(path))
    return _command(["elastic", "show", str(path.parent)])


def attack_flags(folder: Folder, words: list[str]) -> str | None:
    """The words of `gtp-jax train`."""
    del folder
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            args = parser().parse_args(["train", *words])
        except SystemExit as error:
            strange = {c for c in said.getvalue() if not c.isprintable() and c != "\n"}
            if error.code == 2 and not strange:
                raise ValueError(said.getvalue().strip().rpartition("\n")[2]) from error
            return f"printed {strange}" if strange else None  # --help
    return _odd_types(from_settings(TrainConfig, given(args, TrainConfig)))


def _odd_types(config: TrainConfig) -> str | None:
    good = settings_of(TrainConfig())
    odd = [
        name
        for name, value in settings_of(config).items()
        if isinstance(good[name], bool) != isinstance(value, bool)
        or (isinstance(good[name], tuple) and not all(isinstance(one, str | int) for one in value))
        or (type(good[name]) is float and not isinstance(value, int | float))
    ]
    return f"of another type: {', '.join(odd)}" if odd else None


_COMMANDS = (
    "checkpoint list {run}",
    "checkpoint show {run}",
    "checkpoint show --json {run}",
    "checkpoint verify {run}",
    "checkpoint diff {run} {run}@0",
    "convert export {run} {out}",
)
_PARTS = dict(detection_s=3.0, start_s=4.0, restore_s=1.0, compile_s=3.0, step_s=1.0)
# A record of a supervisor and of a run, with a failure.
_EVENTS = [
    {"time": 0.0, "event": "start", "devices": ["GPU 0", "GPU 1"], "text": "2 processes"},
    {"time": 1.0, "event": "fleet", "devices": [0, 1], "text": "a fleet of 2"},
    {"time": 2.0, "event": "start", "process": 0, "seconds": {"start": 1.0}},
    {"time": 10.0, "event": "training", "step": 1},
    {"time": 11.0, "event": "save", "process": 0, "step": 4, "seconds": {"start": 1.0, "step": 5.0}},
    {"time": 15.0, "event": "snapshot", "step": 50, "fleet_step": 51},
    {"time": 20.5, "event": "failure", "kind": "killed", "device": 1, "step": 90, "last_sign": 20.0, "text": "killed"},
    {"time": 23.0, "event": "lost", "device": 1, "text": "GPU 1 is no longer used"},
    {"time": 23.0, "event": "fleet ended", "step": 90, "kept_step": 50},
    {"time": 32.0, "event": "recovered", "step": 50, "steps_lost": 40, "total_s": 12.0, "text": "on", **_PARTS},
    {"step": 3, "loss": 2.0, "tokens_per_s": 7.0},
    {"continued_from": 2},
    {"time": 40.0, "event": "end", "step": 200, "text": "goodput 50.0%"},
]
_RECORDS = [{"text": "a b", "id": 1}, {"text": ""}, {"text": "c \u00fc", "more": [1, {"a": None}]}]
_WORDS = ["--batch", "--steps", "--lr", "--prefetch", "--no-prefetch", "--unroll", "--failed-devices", "--data", "--dp"]


def drawn(folder: Folder) -> dict[str, tuple[Attack, st.SearchStrategy[Any]]]:
    """The targets by name, and what is drawn for each."""
    settings = json.loads(json.dumps({"gtp_jax": "0.1.0", **settings_of(TrainConfig())}))
    header = json_of(folder.header).map(lambda text: headed(text, folder.data))
    lengths = st.integers(0, 1 << 64).map(lambda n: min(n, (1 << 64) - 1).to_bytes(8, "little") + folder.data)
    manifest = json_of(folder.manifest).map(sealed) | json_of(folder.manifest)
    words = st.sampled_from(_WORDS) | st.sampled_from(TEXTS[:7] + PATHS) | st.integers(-3, 1 << 70).map(str)
    return {
        "safetensors": (attack_safetensors, header | lengths | st.binary(max_size=64)),
        "config": (attack_config, json_of(CONFIG)),
        "index": (attack_index, json_of(folder.index) | _renamed(folder.index)),
        "manifest": (attack_manifest, st.tuples(manifest, st.sampled_from(_COMMANDS))),
        "tokenizer": (attack_tokenizer, json_of(folder.tokenizer)),
        "records": (attack_records, changed(_RECORDS).map(_lined) | json_of(_RECORDS[0])),
        "ids": (attack_ids, st.tuples(_ids(), st.sampled_from(["a.npy", "a.npy", "a.bin", "wide.bin"]))),
        "events": (attack_events, changed(_EVENTS).map(_lined) | json_of(_EVENTS[9])),
        "settings": (attack_settings, changed(settings).map(lambda new: json.dumps(new).encode()) | json_of(settings)),
        "flags": (attack_flags, st.lists(words, max_size=6)),
    }


def _ids() -> st.SearchStrategy[bytes]:
    """An array as numpy writes it, with another header, or what is not one."""
    shapes = st.sampled_from([(5,), (7,), (0,), (-1,), (1 << 62,), (1 << 70,), (2, 3), (), "no", None, (6.0,), (True,)])
    kinds = st.sampled_from(["<i4", ">i8", "|O", "<f4", "no", "|b1", [("a", "<i4")], None, "<u8", "|S3"])
    heads = st.tuples(st.just("<i4") | kinds, st.just((6,)) | shapes).map(
        lambda drawn: repr({"descr": drawn[0], "fortran_order": False, "shape": drawn[1]})
    )
    heads = heads | st.sampled_from(["", "[" * 5000, "{}", "__import__('os')", "{'descr': 1}", "9" * 9000])

    def written(drawn: tuple[str, list[int]]) -> bytes:
        text, ids = drawn
        body = np.asarray(ids, "<i8").astype("<i4").tobytes()
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + body

    some = st.lists(st.sampled_from([0, 1, 255, 256, -1, 1 << 31, 20240520]), min_size=6, max_size=6)
    return st.tuples(heads, some).map(written) | st.binary(max_size=64) | st.lists(st.just(b"\1\0\0\0")).map(b"".join)


def _lined(records: Any) -> bytes:
    records = records if isinstance(records, list) else [records]
    return b"\n".join(json.dumps(record).encode() for record in records)


def _renamed(index: Any) -> st.SearchStrategy[bytes]:
    def rename(drawn: tuple[str, str]) -> bytes:
        tensor, file = drawn
        return json.dumps({**index, "weight_map": {**index["weight_map"], tensor: file}}).encode()

    return st.tuples(st.sampled_from(sorted(index["weight_map"])), st.sampled_from(PATHS + TEXTS)).map(rename)


def outcome(folder: Folder, attack: Attack, hostile: Any, seconds: float = SECONDS) -> Outcome:
    """Runs an attempt and says how it ended."""
    try:
        with _within(seconds):
            failure = attack(folder, hostile)
    except _Late:
        return Outcome(HUNG, f"after {seconds} s")
    except BaseException as error:  # a panic of Rust is not even an Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        text = explanation(error)
        return Outcome(TRACEBACK, repr(error)) if text is None else _refusal(text)
    finally:
        folder.mend()
    return Outcome(ACCEPTED, "") if failure is None else Outcome(SILENT, failure)


def _refusal(text: str) -> Outcome:
    shown = all(c.isprintable() or c in "\n\t" for c in text) and len(text) < 5_000
    return Outcome(REFUSED if shown and SECRET not in text else SILENT, text)


def _import(folder: Folder) -> str | None:
    with tempfile.TemporaryDirectory() as out:
        return _command(["convert", "import", str(folder.root / "hf"), f"{out}/out"])


def _command(words: list[str]) -> str | None:
    """Runs a command; raises its refusal, and returns what is wrong with what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    text = out.getvalue()
    if code == 2:
        raise ValueError(err.getvalue().strip().partition(": error: ")[2])
    strange = {c for c in text if not c.isprintable() and c != "\n"}
    if strange or SECRET in text:
        return f"printed {strange} in {text[:200]!r}"
    return None


class _Late(BaseException):
    """An attempt takes longer than it may."""


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
