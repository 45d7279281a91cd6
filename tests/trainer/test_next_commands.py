"""The commands that a run prints at its end run as they are, for every kind of run, and again after it has gone on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import jax
import pytest
import tokenizers
from convert.hugging_face import CONFIG, random_tensors, write_model

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import import_llama
from gtp_jax.models import TOKENIZER_FILE, Origin
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig, stored_tokenizer

from .runs import WORDS, small
from .test_origin_kept import tokenizer

jax.devices()  # fixes the number of devices to what the suite runs with

HF = {**CONFIG, "vocab_size": 256, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """An import that does not say what its tokens are."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder / "hf", {name: x * 0.1 for name, x in random_tensors(HF).items()}, HF)
    import_llama(folder / "hf", folder / "imported")
    return folder / "imported"


def printed_by(capsys, *words: str) -> tuple[str, list[list[str]]]:
    """Runs a command; returns what it prints, and the commands that it prints below `next:`."""
    capsys.readouterr()
    assert main(list(words)) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    return out, [shlex.split(line) for line in re.findall(r"^    gtp-jax (.*)$", out.partition("\nnext:\n")[2], re.M)]


KINDS = {
    "new": [],
    "from an import, on bytes": ["--tokenizer=bytes"],
    "adapters on bytes": ["--tokenizer=bytes", "--lora=2"],
    "a tokenizer": [],
    "conversations": [],
    "experts": ["--preset=tiny-moe"],
    "unequal replicas": ["--dp=2", "--gtp=2", "--tp=2", "--failed-devices=7"],
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_command_below_next_runs(kind, text, imported, tmp_path, capsys):
    flags = [*small(text, tmp_path / "a run", steps=1, eval_every=0, gtp=None), *KINDS[kind]]
    if "bytes" in kind:
        flags.append(f"--from={imported}")
    if kind == "a tokenizer":
        (tmp_path / "tokenizer.json").write_bytes(tokenizer([*WORDS, "?"]))
        flags.append(f"--tokenizer={tmp_path / 'tokenizer.json'}")
    if kind == "conversations":
        pytest.importorskip("jinja2", reason="Jinja2 is not installed: pip install 'gtp_jax[chat]'")
        turns = [
            [{"role": "user", "content": f"{i} up"}, {"role": "assistant", "content": f"{i} down"}] for i in range(600)
        ]
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
        (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}<end>{% endfor %}")
        flags[0] = f"--data={tmp_path / 'chats.jsonl'}"
        flags.append(f"--chat-template={tmp_path / 'mine.jinja'}")
    _, commands = printed_by(capsys, "train", *flags)
    names = [command[0] for command in commands]
    assert names[:3] == ["generate", "train", "convert"] and len(names) in (3, 4)
    later = []
    for command in sorted(commands, key=lambda command: command[0] == "train"):
        more = ["--max-new-tokens=2"] if command[0] == "generate" else []
        out, found = printed_by(capsys, *command, *more)
        assert out
        later += found
    outputs = {Path(command[-1]).name for command in commands if command[0] == "convert"}
    for command in later:  # those of the run that went on: its exports do not collide with the earlier ones
        if command[0] == "convert":
            printed_by(capsys, *command)
            outputs.add(Path(command[-1]).name)
    assert len(outputs) == 2 * sum(name == "convert" for name in names)
    if kind == "adapters on bytes":
        merged = str(tmp_path / "a run-merged")
        printed_by(capsys, "generate", merged, "--prompt", "The ", "--max-new-tokens=2")
        printed_by(capsys, "convert", "export", merged, str(tmp_path / "exported"))
        exported = tokenizers.Tokenizer.from_file(str(tmp_path / "exported" / TOKENIZER_FILE))
        assert exported.encode("The é漢").ids == list("The é漢".encode())


def save(directory: Path, extra: dict[str, object]) -> Origin:
    with Checkpoints(directory) as checkpoints:
        checkpoints.save(1, {"w": jax.numpy.ones(2)}, extra=extra)
    return Origin.of(extra, {}, str(directory))


def test_a_run_on_bytes_says_so_wherever_its_checkpoints_go(tmp_path):
    published = {"hugging_face": {"model_type": "llama"}}
    run = tmp_path / "run"
    origin = save(run / "checkpoints", published)  # of a version that did not record it
    TrainConfig(out=str(run), from_="elsewhere", tokenizer="bytes").save(run / "config.json")
    for source in (run, run / "checkpoints"):
        assert stored_tokenizer(source, origin).name == "bytes"
    told = save(tmp_path / "copied", {**published, "tokens": "bytes"})
    assert stored_tokenizer(tmp_path / "copied", told).name == "bytes"
    assert told.extra() == {**published, "tokens": "bytes"} and "tokens" not in told.with_bytes(False).extra()
    # an import inside the directory of a run is not the run's
    within = save(run / "imported", published)
    with pytest.raises(ValueError, match="--tokenizer"):
        stored_tokenizer(run / "imported", within)
