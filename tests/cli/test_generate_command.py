"""`gtp-jax generate` prints what the model of a run, or of an import, makes of a prompt."""

import dataclasses
import json
import re
import shutil

import pytest
from messages import naming
from trainer.runs import refused

import gtp_jax as gtp
from gtp_jax.models import Origin, load, preset_of
from gtp_jax.ops import RopeScaling
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import context_length, stored_tokenizer


@pytest.fixture(scope="module")
def imported(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported")
    assert main(["convert", "export", str(run), str(folder / "hf"), "--dtype", "float32"]) == 0
    (folder / "hf" / "tokenizer.json").unlink()  # that of bytes, which the run was trained on
    assert main(["convert", "import", str(folder / "hf"), str(folder / "plain")]) == 0
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({chr(33 + i): i for i in range(90)}, []))
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(["<s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 90)])
    made.save(str(folder / "hf" / "tokenizer.json"))
    (folder / "hf" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<s>{% endfor %}")
    (folder / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert main(["convert", "import", str(folder / "hf"), str(folder / "imported")]) == 0
    return folder


def printed(capsys, *args) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(map(str, args)))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_text_is_what_the_checkpoints_model_generates(run, capsys):
    model = load(run, dtype="float32")
    tokens = list(b"def ret")
    wanted = gtp.generation.generate(
        model, [tokens], max_new_tokens=24, stop=0, temperature=0.7, seed=4, vocab_size=256
    )
    text = bytes([*tokens, *wanted.tokens[0, : wanted.lengths[0]]]).decode(errors="replace")
    flags = ("--prompt", "def ret", "--max-new-tokens", 24, "--temperature", 0.7, "--seed", 4)
    code, out, err = printed(capsys, "generate", run, *flags)
    assert (code, out) == (0, text + "\n")
    assert re.search(naming("step 4 float32 dp 2 gtp 1 tp 4 24 tokens"), err)
    # alone and with others, on every mesh
    several = printed(capsys, "generate", run, "--prompt", "def ret", "x", "", *flags[2:], "--tp=1")[1]
    assert several.startswith(f"--- 1 of 3\n{text}\n\n--- 2 of 3\nx")
    assert printed(capsys, "generate", run, *flags, "--step", 2)[1] != out
    stop = text[12:14]
    assert printed(capsys, "generate", run, *flags, "--stop", stop)[1] == text[: text.index(stop, 7)] + "\n"


def test_an_import_is_continued_with_its_own_tokens(imported, capsys):
    code, out, err = printed(
        capsys, "generate", imported / "imported", "--prompt", "AB", "--max-new-tokens=8", "--temperature=0"
    )
    assert code == 0 and out.startswith("AB")
    model = load(imported / "imported", dtype="float32")
    found = gtp.generation.generate(model, [[90, 32, 33]], max_new_tokens=8, stop=[7, 8, 91], vocab_size=92)
    kept = [token for token in found.tokens[0] if token >= 0]
    assert len(out) == len("AB\n") + sum(len("<s>") if token == 90 else 1 for token in kept)
    flags = ("--prompt", "AB", "--tokenizer", "bytes", "--max-new-tokens=8")
    code, out, err = printed(capsys, "generate", imported / "plain", *flags)
    assert code == 0 and out.startswith("AB")


def test_a_prompt_that_is_longer_than_what_the_model_was_trained_on_is_continued_with_a_warning(run, capsys):
    flags = ("--max-new-tokens=2", "--temperature=0", "--prompt", "d" * 32, "e" * 33)  # `--seq` is 32
    with pytest.warns(UserWarning) as found:
        code, out, _ = printed(capsys, "generate", run, *flags)
    assert code == 0 and "e" * 33 in out
    said = [str(one.message) for one in found]
    assert len(said) == 1 and said[0].startswith(
        "prompt 2 has 33 tokens, but the model was trained on sequences of at most 32, so the text after it may make"
    )


@pytest.mark.parametrize(
    ("published", "scaling", "longest"),
    [
        ({"max_position_embeddings": 4096}, RopeScaling(kind="linear", factor=4), 16384),
        ({"max_position_embeddings": 10**400}, RopeScaling(kind="linear", factor=2.5), None),
        ({"max_position_embeddings": 64}, RopeScaling(kind="yarn", factor=4, original_length=64), 256),
        ({"max_position_embeddings": 131072}, RopeScaling(kind="llama3", factor=8, original_length=8192), 131072),
    ],
)
def test_an_import_knows_the_length_that_its_publisher_and_its_scaling_allow(published, scaling, longest, tmp_path):
    model = dataclasses.replace(preset_of("tiny"), rope_scaling=scaling)
    assert context_length(tmp_path, Origin(published), model) == longest


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["org/model"], "hf download org/model"),
        (["RUN", "--step=5"], "no step 5"),
        (["RUN", "--top-p=2"], "`top_p` 2.0 probability"),
        (["IMPORT"], "tokens Give tokenizer.json"),
        (["HF"], "Hugging Import"),
    ],
)
def test_a_mistake_is_found_at_the_door(flags, message, run, imported, capsys, monkeypatch):
    monkeypatch.setattr("gtp_jax.runner.cli._generate_text.load", None)  # nothing large is read
    places = {"RUN": run, "IMPORT": imported / "plain", "HF": imported / "hf"}
    refused(capsys, message, "generate", *(places.get(flag, flag) for flag in flags), "--prompt", "x")


def test_a_tokenizer_that_is_anothers_or_gone_is_refused(run, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 5000, "?": 1}, unk_token="?"))
    made.save(str(tmp_path / "tokenizer.json"))
    words = ["generate", run, "--prompt", "x", "--tokenizer", tmp_path / "tokenizer.json"]
    refused(capsys, "`prompt` 'x' 5000 256 tokenizer.json", *words)
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps({**config, "tokenizer": "gone/tokenizer.json"}))
    with pytest.raises(ValueError, match=naming("gone/tokenizer.json exist")):
        stored_tokenizer(tmp_path / "run", Origin())  # as before runs recorded that their tokens are bytes
