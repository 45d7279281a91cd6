"""A run on conversations: answers are learned, and a checkpoint answers a question by its template."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

pytest.importorskip("jinja2", reason="Jinja2 is not installed: pip install 'gtp_jax[chat]'")

from convert.hugging_face import random_tensors, write_model  # noqa: E402
from data.test_chat_template import TEMPLATES  # noqa: E402
from data.test_chat_tokens import byte_level  # noqa: E402

from gtp_jax.checkpoint import Checkpoints  # noqa: E402
from gtp_jax.runner.cli import main  # noqa: E402
from gtp_jax.runner.flags import from_settings  # noqa: E402
from gtp_jax.runner.trainer import TrainConfig  # noqa: E402
from gtp_jax.runner.trainer._corpus import read_corpus  # noqa: E402
from gtp_jax.runner.trainer._start import started_from  # noqa: E402

from .runs import losses, refused, small  # noqa: E402
from .test_origin_kept import CONFIG  # noqa: E402

jax.devices()  # fixes the number of devices to what the suite runs with

SIZES = dict(num_layers=1, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64)
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '?' if m.role == 'user' else eos_token }}{% endfor %}"
ANSWERS = {"ping": "pong", "hot": "cold", "up": "down"}


def conversation(*turns: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Conversations, each of several questions in another order, and a template with the tokens that it writes."""
    folder = tmp_path_factory.mktemp("chat")
    draws = np.random.default_rng(0)
    pairs = list(ANSWERS.items())
    turns = [[turn for k in draws.permutation(3) for turn in pairs[k]] + ["end", f"{i}"] for i in range(40)]
    write_lines(folder / "chat.jsonl", [conversation(*one) for one in turns])
    (folder / "mine.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def flags(chat, out, **changes):
    own = {"chat_template": chat / "mine.jinja", "seq": 64, "gtp": 2, "tp": 1, "dp": 4}
    return small(chat / "chat.jsonl", out, **{**SIZES, **own, **changes})


@pytest.fixture(scope="module")
def run(chat, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    assert main(["train", *flags(chat, out, steps=120, lr=0.01, save_every=200, eval_every=60, sample_tokens=8)]) == 0
    return out


@pytest.mark.full
def test_a_run_answers_and_ends_as_it_was_taught(run, capsys):
    capsys.readouterr()
    assert main(["generate", str(run), "--chat", "ping", "--temperature=0", "--max-new-tokens=12"]) == 0
    assert capsys.readouterr().out == "pong\n"
    assert main(["generate", str(run), "--chat", *ANSWERS, "--temperature=0", "--max-new-tokens=12"]) == 0
    answers = [f"--- {i} of 3\n{answer}\n" for i, answer in enumerate(ANSWERS.values(), 1)]
    assert capsys.readouterr().out == "\n".join(answers)
    report = (run / "report.txt").read_text()  # whose sample is an answer to a held-out question
    assert any(f"| {question}?{answer}" in report for question, answer in ANSWERS.items()), report


@pytest.mark.full
def test_a_checkpoint_keeps_the_template_with_its_tokens_and_gives_it_on(chat, run, tmp_path):
    checkpoints = Checkpoints(run / "checkpoints", read_only=True)
    kept = {"chat_template.jinja": ('{% set eos_token = "</s>" %}\n' + TEMPLATE).encode()}
    assert checkpoints.files(120) == kept
    more = small(chat / "chat.jsonl", tmp_path / "more", num_layers=1, seq=64, steps=1, eval_every=0)
    assert main(["train", *more, f"--from={run}"]) == 0
    assert Checkpoints(tmp_path / "more" / "checkpoints", read_only=True).files(1) == kept
    assert main(["convert", "export", str(run), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "chat_template.jinja").read_bytes() == kept["chat_template.jinja"]


@pytest.mark.full
def test_a_resumed_run_finds_its_answers_and_refuses_others(chat, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *flags(chat, out, steps=2, schedule="constant", warmup=0)]) == 0
    assert main(["train", "--resume", f"--out={out}", "--steps=4"]) == 0
    whole = tmp_path / "whole"
    assert main(["train", *flags(chat, whole, steps=4, schedule="constant", warmup=0, gtp=4, dp=2)]) == 0
    for name in ("loss", "held_out"):
        assert losses(out)[4, name] == pytest.approx(losses(whole)[4, name], rel=1e-5)
    refused(capsys, "trained differ", "train", "--resume", f"--out={out}", "--steps=6", "--loss-on=all")


def test_the_loss_counts_answers_and_the_baseline_too(chat):
    settings = {"data": [str(chat / "chat.jsonl")], "chat_template": str(chat / "mine.jinja"), "seq": 64, "batch": 2}
    corpus = read_corpus(from_settings(TrainConfig, settings))
    assert corpus.packing == "documents" and len(corpus.train[0]) + len(corpus.held_out[0]) == 40
    (held_out,) = corpus.held_out
    answers = bytes(held_out.counted.tolist()).decode().split("</s>")[:-1]
    assert answers[:3] != list(ANSWERS.values()) and sorted(answers[:3]) == sorted(ANSWERS.values())
    assert corpus.bytes_per_token == 1.0
    rows = corpus.rows(64, 0).rows(np.arange(8))
    counted = [bytes(row[row >= 0].tolist()).decode() for row in rows["targets"]]
    assert all(row.endswith("</s>") and not {"ping", "hot", "up", "?"} & set(row.split("</s>")) for row in counted)
    everything = read_corpus(from_settings(TrainConfig, {**settings, "loss_on": "all"}))
    assert everything.held_out[0].answers is None and everything.fingerprint != corpus.fingerprint


def test_conversations_that_are_cut_are_counted(chat):
    settings = {"data": [str(chat / "chat.jsonl")], "chat_template": str(chat / "mine.jinja"), "seq": 40, "batch": 2}
    with pytest.warns(UserWarning, match=r"(\d+) of \1 conversations .*`seq` = 40 .*--seq"):
        read_corpus(from_settings(TrainConfig, settings))


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A model that was imported with its tokenizer and its template, whose special tokens are in another file."""
    folder = tmp_path_factory.mktemp("imported")
    config = {**CONFIG, "vocab_size": 512}
    write_model(folder / "hf", random_tensors(config), config)
    byte_level(folder / "hf" / "tokenizer.json")
    (folder / "hf" / "chat_template.jinja").write_text((TEMPLATES / "llama3.jinja").read_text())
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    assert main(["convert", "import", str(folder / "hf"), str(folder / "plain")]) == 0
    return folder


def test_an_import_is_trained_by_its_own_template_unless_another_is_given(chat, imported):
    def corpus(**more):
        given = {"from_": str(imported / "plain"), "data": [str(chat / "chat.jsonl")], "seq": 256, "batch": 2}
        return read_corpus(from_settings(TrainConfig, started_from({**given, **more})))

    own = corpus()
    (documents,), special = own.train, own.tokenizer.special
    begins = documents.offsets[:-1]
    assert (documents.tokens[begins] == special["<s>"]).all() and not documents.answers[begins].any()
    assert own.chat.template.ending == "<|eot_id|>"
    ends = np.flatnonzero(documents.tokens == special["<|eot_id|>"])
    assert documents.answers[ends].tolist() == [0, 1] * (len(ends) // 2)  # of questions and answers in turn
    assert special["<|start_header_id|>"] not in documents.counted
    other = corpus(chat_template=str(TEMPLATES / "chatml.jinja"))
    assert other.chat.template.ending == "<|im_end|>" and other.fingerprint != own.fingerprint


def test_a_template_for_data_without_conversations_is_refused(chat, text, tmp_path, capsys):
    refused(capsys, "`chat_template` `data` conversations", "train", *flags(chat, tmp_path / "run", data=text))
    refused(capsys, "`data` no chat template", "train", *flags(chat, tmp_path / "run", chat_template=None))
