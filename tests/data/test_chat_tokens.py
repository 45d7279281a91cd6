"""Conversations as tokens, and which of these are answers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jinja2", reason="Jinja2 is not installed: pip install 'gtp_jax[chat]'")
tokenizers = pytest.importorskip("tokenizers")

from messages import naming  # noqa: E402

from gtp_jax.runner.data import BYTES, load_evaluated, load_source, load_tokenizer, read_text  # noqa: E402
from gtp_jax.runner.data._chat import Chat  # noqa: E402
from gtp_jax.runner.data._chat_template import ChatTemplate  # noqa: E402

from .test_chat_template import MESSAGES, PUBLISHED, QUESTION, TOKENS, template  # noqa: E402
from .texts import document  # noqa: E402

MARKS = "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <s> </s> [INST]".split()


def byte_level(path, marks=MARKS):
    """As GPT-2, Llama 3 and Qwen have it: a token may begin or end within a character."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet)
    made.train_from_iterator((document(i) for i in range(20)), trainer)
    made.save(str(path))
    return load_tokenizer(path)


def with_spaces(path):
    """As Llama 2 and Mistral have it: a space begins a word, and one is put before the text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *MARKS])
    made.train_from_iterator([*(document(i) for i in range(20)), "This. And that. Why? What? Because. \n"], trainer)
    made.save(str(path))
    return load_tokenizer(path)


def documents(template, tokenizer, *conversations, answers_only=True, **fields):
    chat = Chat(template, tokenizer, answers_only)
    return chat.documents(chat.document({"messages": messages, **fields}) for messages in conversations)


MAKERS = {"bytes": lambda path: BYTES, "byte-level": byte_level, "with spaces": with_spaces}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_tokens_of_answers_spell_the_answers_and_what_ends_them(name, maker, tmp_path):
    tokenizer = MAKERS[maker](tmp_path / "tokenizer.json")
    messages = [{**message, "content": message["content"] + " ünïcode 文字"} for message in MESSAGES]
    one = template(name)
    found = documents(one, tokenizer, messages)
    assert found.tokens[-1] == tokenizer.separator and len(found) == 1
    rendered = one.conversation(messages)
    runs = np.split(found.tokens, np.flatnonzero(np.diff(found.answers)) + 1)
    answers = [tokenizer.decode(run.tolist()) for run in runs[1::2]]  # a prompt comes first
    wanted = [rendered.text[begin:end] for begin, end in rendered.answers]
    if maker == "with spaces":  # whose decoder drops the space at the beginning of what it is given
        answers, wanted = ([text.lstrip() for text in texts] for texts in (answers, wanted))
    assert answers == wanted
    if maker != "bytes":
        ends = np.flatnonzero(np.diff(np.append(found.answers, 0).astype(int)) == -1)
        assert set(found.tokens[ends].tolist()) == {tokenizer.special[one.ending]}
    chat = Chat(one, tokenizer, True)
    size = sum(len(rendered.text[begin:end].encode()) for begin, end in rendered.answers)
    assert chat.bytes_of([chat.document({"messages": messages})]) == size


def test_each_conversation_ends_with_one_separator(tmp_path):
    tokenizer = byte_level(tmp_path / "tokenizer.json", [mark for mark in MARKS if mark != "<|im_end|>"])
    assert tokenizer.separator == tokenizer.special["</s>"]
    for name, count in {"llama3": 1, "mistral": 2}.items():  # whose answers end with it
        found = documents(template(name), tokenizer, MESSAGES, MESSAGES)
        ends = found.offsets[1:] - 1
        assert (found.tokens[ends] == tokenizer.separator).all() and len(found) == 2
        assert (found.tokens == tokenizer.separator).sum() == 2 * count
        assert (found.answers[ends] == (name == "mistral")).all()


def test_no_token_is_added_to_what_the_template_writes(tmp_path):
    tokenizer = byte_level(tmp_path / "tokenizer.json")
    found = documents(template("llama3"), tokenizer, MESSAGES, answers_only=False)
    assert (found.tokens == tokenizer.special["<s>"]).sum() == 1 and found.answers is None
    # and text that is not of a template is split as before
    (plain,) = tokenizer.encode([b"<s>"])
    assert len(plain) > 1


def test_a_token_across_the_beginning_of_an_answer_belongs_to_it(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({":a": 0, ".": 1, "q": 2}, unk_token="q"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(":a|."), "isolated")
    words.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'user' else '.' }}{% endfor %}"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    one = ChatTemplate(source, TOKENS, "it")
    found = documents(one, load_tokenizer(tmp_path / "tokenizer.json"), messages)
    assert found.tokens.tolist() == [2, 0, 1, 3] and found.answers.tolist() == [0, 1, 1, 0]


REFUSED = {
    "no messages": ({"text": "x"}, "'text' `messages`"),
    "parts": ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "`content` turn 1 [{'text': 'x'}]"),
    "special token": ({"messages": [{"role": "user", "content": "a</s>"}]}, "turn 1 '</s>' separates"),
    "ending": ({"messages": [QUESTION, {"role": "assistant", "content": "<|im_end|>"}]}, "turn 2 '<|im_end|>'"),
    "a tool's name": ({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "a\0"}]}, "`tools` '\\x00'"),
    "lone surrogate": ({"messages": [QUESTION, {"role": "assistant", "content": "\ud800"}]}, "surrogate U+D800"),
    "no answer": ({"messages": [QUESTION]}, "no answer `role` 'assistant'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_conversation_is_refused(name, tmp_path):
    record, message = REFUSED[name]
    tokenizer = byte_level(tmp_path / "tokenizer.json") if name == "special token" else BYTES
    with pytest.raises(ValueError, match=naming(message)):
        Chat(template("chatml"), tokenizer, True).document(record)


def with_added(path, *, special, plain):
    """A tokenizer file with added tokens, of which those in `plain` are not special."""
    byte_level(path, [])
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(special)
    made.add_tokens([tokenizers.AddedToken(text, special=False) for text in plain])
    made.save(str(path))
    return load_tokenizer(path)


def test_the_text_of_a_token_that_separates_turns_is_refused_though_it_is_not_special(tmp_path):
    plain = ["<|im_start|>", "<|user|>", "<think>", "</think>", "\n", "user"]
    chat = Chat(template("qwen3"), with_added(tmp_path / "tokenizer.json", special=["<|im_end|>"], plain=plain), True)
    for role in ("user", "assistant"):
        with pytest.raises(ValueError, match=naming("'<|im_start|>' separates")):
            chat.document({"messages": [QUESTION, {"role": role, "content": "a <|im_start|> b"}]})
    with pytest.raises(ValueError, match=naming("turn 1 '<|im_start|>'")):
        chat.prompt("<|im_start|>system")
    # the template does not write the first, the next are text, and the others mark a part of an answer
    assert chat.prompt("<|user|>") and chat.prompt("a\nuser")
    assert chat.document({"messages": [QUESTION, {"role": "assistant", "content": "<think>\nw\n</think>\n\na"}]})


def test_conversations_without_a_template_are_no_text(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"messages": []}\n')
    text = read_text([tmp_path / "chat.jsonl"])
    assert text.chat_files == (tmp_path / "chat.jsonl",) and not text.documents
    for load in (load_source, load_evaluated):
        with pytest.raises(ValueError, match=naming("chat.jsonl no chat template")):
            load(text, BYTES)
    # a text beside the messages is what is read, unless these are asked for
    (tmp_path / "both.jsonl").write_text('{"messages": [], "text": "words"}\n')
    assert list(read_text([tmp_path / "both.jsonl"]).documents) == [b"words"]
    assert read_text([tmp_path / "both.jsonl"], text_field="messages").chat_files


def test_calls_of_tools_are_answers():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    found = documents(template("chatml"), BYTES, [QUESTION, call])
    answer = bytes(found.tokens[found.answers == 1].tolist()).decode()
    assert answer == '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'


def test_the_prompt_of_a_question_is_what_comes_before_its_answer(tmp_path):
    tokenizer, one = byte_level(tmp_path / "tokenizer.json"), template("llama3")
    prompt = Chat(one, tokenizer, True).prompt(QUESTION["content"])
    found = documents(one, tokenizer, MESSAGES)
    assert found.tokens[: len(prompt)].tolist() == prompt and found.answers.argmax() == len(prompt)
    with pytest.raises(ValueError, match=naming("turn 1 '<|eot_id|>'")):
        Chat(one, tokenizer, True).prompt("<|eot_id|>")
