"""Texts, tokens and answers of conversations are those of the chat templates of `transformers`."""

import numpy as np
import pytest

transformers = pytest.importorskip(
    "transformers",
    reason="transformers is not installed; tests/elsewhere/environment.sh makes an environment that has it",
)
pytest.importorskip("jinja2", reason="Jinja2 is not installed: pip install 'gtp_jax[chat]'")

from data.test_chat_template import GENERATION, MESSAGES, QUESTION, TEMPLATES, TOKENS  # noqa: E402
from data.test_chat_tokens import byte_level, documents, with_spaces  # noqa: E402

from gtp_jax.runner.data._chat_template import ChatTemplate  # noqa: E402

TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <numbers> & more.", "parameters": {}}}]


@pytest.mark.parametrize("maker", [byte_level, with_spaces])
@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen3", "blocks"])
def test_text_tokens_and_answers_are_those_of_transformers(name, maker, tmp_path):
    source = GENERATION if name == "blocks" else (TEMPLATES / f"{name}.jinja").read_text()
    ours, own = maker(tmp_path / "tokenizer.json"), ChatTemplate(source, TOKENS, name)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **TOKENS)
    theirs.chat_template = source
    for messages in (MESSAGES, MESSAGES[:2], [*MESSAGES, QUESTION]):
        text = own.text(messages, TOOLS).text
        assert text == theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        found = documents(own, ours, messages, tools=TOOLS, answers_only=name != "qwen3")
        options = {"tools": TOOLS, "return_dict": True, "return_assistant_tokens_mask": name == "blocks"}
        wanted = theirs.apply_chat_template(messages, **options)
        assert found.tokens.tolist() in (wanted["input_ids"], [*wanted["input_ids"], ours.separator])
        if name == "blocks":
            np.testing.assert_array_equal(found.answers, [*wanted["assistant_masks"], 0])
    prompt = theirs.apply_chat_template([QUESTION], add_generation_prompt=True, tokenize=False)
    assert own.prompt([QUESTION]) == prompt
