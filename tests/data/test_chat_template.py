"""Conversations as text: what a template writes, and where its answers are."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="Jinja2 is not installed: pip install 'gtp_jax[chat]'")

from messages import naming  # noqa: E402

from gtp_jax.runner.data._chat_template import ChatTemplate, named_template, stored_template  # noqa: E402

TEMPLATES = Path(__file__).parent / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
QUESTION, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "This.\n\nAnd that."}
MESSAGES = [QUESTION, ANSWER, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}[{% generation %}{{ message.content }};"
    "{% endgeneration %}]{% else %}({{ message.content }}){% endif %}{% endfor %}"
)


def template(name: str, tokens: dict[str, str] | None = TOKENS) -> ChatTemplate:
    return ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), tokens, name)


PUBLISHED = {
    "chatml": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\nThis.\n\nAnd that.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\nBecause.<|im_end|>\n",
        ["This.\n\nAnd that.<|im_end|>", "Because.<|im_end|>"],
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nWhat?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nThis.\n\nAnd that.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nBecause.<|eot_id|>",
        ["This.\n\nAnd that.<|eot_id|>", "Because.<|eot_id|>"],
    ),
    "mistral": (
        "<s>[INST] What? [/INST] This.\n\nAnd that.</s>[INST] Why? [/INST] Because.</s>",
        [" This.\n\nAnd that.</s>", " Because.</s>"],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_of_a_published_template_begin_where_the_prompt_ends_and_have_what_ends_them(name):
    (text, answers), one = PUBLISHED[name], template(name)
    found = one.conversation(MESSAGES)
    assert found.text == text == one.text(MESSAGES).text
    assert [text[begin:end] for begin, end in found.answers] == answers
    for (begin, _), turn in zip(found.answers, (1, 3), strict=True):
        assert text[:begin] == one.prompt(MESSAGES[:turn])
    open_end = one.conversation([*MESSAGES, QUESTION])  # text behind the last answer is none
    assert open_end.answers == found.answers and open_end.text.startswith(text)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_turn():
    thinks = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nThis."}
    one = template("qwen3")
    found = one.conversation([QUESTION, thinks])
    assert [found.text[begin:end] for begin, end in found.answers] == [thinks["content"] + "<|im_end|>"]
    with pytest.raises(ValueError, match=naming("qwen3 turn 2 turn 3 --loss-on")):
        one.conversation([QUESTION, thinks, *MESSAGES[2:]])
    assert "Hm." not in one.text([QUESTION, thinks, *MESSAGES[2:]]).text


def test_generation_blocks_say_what_answers_are_of_a_template_that_rewrites_too():
    found = ChatTemplate(GENERATION, None, "it").conversation(MESSAGES)
    assert found.text == "(What?)[This.\n\nAnd that.;](Why?)[Because.;]"
    assert [found.text[begin:end] for begin, end in found.answers] == ["This.\n\nAnd that.;", "Because.;"]
    macro = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}!{% endmacro %}"
    counted = macro + "{{ messages | length }}{% for m in messages %}{{ say(m) }}{% endfor %}"
    found = ChatTemplate(counted, None, "it").conversation(MESSAGES[:2])
    assert found.text == "2What?!This.\n\nAnd that.!" and found.answers == ((1, 6), (7, 23))


ANSWER_BLOCK = "{% generation %}{{ messages[-1].content }}.{% endgeneration %}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% generation %}" + ANSWER_BLOCK + "{% endgeneration %}", "nests {% generation %}"),
        ("{% set x %}" + ANSWER_BLOCK + "{% endset %}{{ x | length }}{{ x }}", "it changes {% generation %}"),
        ("{% if false %}{% generation %}{% endgeneration %}{% endif %}{{ messages[-1].content }}.", "no part of it"),
    ],
)
def test_generation_blocks_that_do_not_tell_the_answers_are_refused(source, message):
    with pytest.raises(ValueError, match=naming(message)):
        ChatTemplate(source, None, "it").conversation(MESSAGES)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for %}", "not chat template Expected"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "white space after"),
        ("{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}", "bos_token eos_token defines"),
        ("{{ messages.__class__.mro() }}", "turns 1 to 2 '__class__' 'list'"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_at_once(source, message):
    with pytest.raises(ValueError, match=naming(message)):
        ChatTemplate(source, None, "it")


def test_templates_have_what_transformers_offers_them():
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "    {% if true %}\n{{ m | tojson }}{{ tools | tojson(indent=1) }}{{ strftime_now('%d %b %Y') }}\n"
        "    {% endif %}\n"
        "{% endfor %}{{ messages[-1].content }}|"
    )
    one = ChatTemplate(source, None, "it")
    text = one.text([{"role": "user", "content": "<ü>"}], [{"a": 1}]).text
    assert text == '{"role": "user", "content": "<ü>"}[\n {\n  "a": 1\n }\n]26 Jul 2024\n<ü>|'
    assert f"{datetime.datetime.now():%Y}\n<" in one.prompt([{"role": "user", "content": "<"}])


def test_the_template_of_a_model_is_in_its_own_file_or_in_one_of_two_others(tmp_path):
    config = {
        "eos_token": {"content": "<end>"},
        "bos_token": None,
        "chat_template": "{{ messages[-1].content }}{{ eos_token }}",
    }
    content = json.dumps(config).encode()
    of_config = stored_template({"tokenizer_config.json": content}, "it")
    assert of_config is not None and of_config.prompt([QUESTION]) == "What?<end>"
    own = {"tokenizer_config.json": content, "chat_template.jinja": b"{{ bos_token }}{{ messages[-1].content }}!"}
    of_file = stored_template(own, "it")
    assert of_file is not None and of_file.prompt([QUESTION]) == "What?!"
    old = stored_template({"chat_template.json": b'{"chat_template": "{{ messages[-1].content }}?"}'}, "it")
    assert old is not None and old.ending == "?"
    assert stored_template({"tokenizer_config.json": b"{}"}, "it") is None
    several = {"chat_template": [{"name": "default", "template": "{{ messages[-1].content }}:"}, {"name": "tool_use"}]}
    assert stored_template({"tokenizer_config.json": json.dumps(several).encode()}, "it").ending == ":"
    # a file that is named, with the special tokens beside it
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    (tmp_path / "mine.jinja").write_text("{{ messages[-1].content }}{{ eos_token }}{{ eos_token }}")
    assert named_template(tmp_path / "tokenizer_config.json", {}).ending == "<end>"
    named = named_template(tmp_path / "mine.jinja", {"tokenizer_config.json": b'{"eos_token": "another"}'})
    assert named.ending == "<end><end>"
    # which the whole template says itself
    assert ChatTemplate(named.whole, None, "it").text(MESSAGES) == named.text(MESSAGES)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=naming("mine.jinja eos_token")):
        named_template(tmp_path / "mine.jinja", {})


def test_a_special_token_of_any_characters_is_kept_in_the_whole_template():
    tokens = {"eos_token": "<｜\"\\n'😀▁｜>", "unk_token": "?"}
    one = ChatTemplate("  {% if true %}{{ messages[-1].content }}{% endif %}\n{{ eos_token }}", tokens, "it")
    whole = ChatTemplate(one.whole, None, "it")
    assert whole.text([QUESTION]) == one.text([QUESTION]) and whole.ending == one.ending == tokens["eos_token"]
    assert "unk_token" not in one.whole
