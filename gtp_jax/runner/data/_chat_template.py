"""Chat templates: the text that a model's publisher puts around the messages of a conversation."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..._foreign import brief, open_regular, parse_json

ANSWERING = "assistant"
TEMPLATE_FILE = "chat_template.jinja"
TOKENS_FILE = "tokenizer_config.json"
_OLD_FILE = "chat_template.json"
_FIELD = "chat_template"
# The name of the template to use if a file holds several.
_DEFAULT = "default"

# The largest published tokenizer_config.json files have about 1.2 MB.
_MAX_BYTES = 1 << 24

# They mark the beginning and the end of what `{% generation %}` blocks write. Neither is a character (Unicode, 23.7).
_BEGIN, _END = "\ufdd0", "\ufdd1"

# The date of `strftime_now` in training text. It is fixed, so that a run sees the same text on every day, and is the
# date in Llama's templates.
_DAY = datetime.datetime(2024, 7, 26)


class Rendered(NamedTuple):
    """A conversation as text.

    Attributes:
        text: the conversation, with special tokens written out.
        answers: `(begin, end)` of each answer in `text`, in characters, including the text that ends it; ascending.
    """

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A Jinja template, run in Jinja's sandbox, with the functions that `transformers` offers to templates.

    Args:
        source: the template.
        tokens: the texts of special tokens by name, such as `eos_token`; `None` if they are unknown.
        where: a description of where the template comes from, for messages.

    Attributes:
        whole: the template, preceded by definitions of the special tokens that it uses.
        ending: the text that ends an answer.
        around: all text that is written around the contents of a question and its answer.

    Raises:
        ModuleNotFoundError: if Jinja2 is not installed.
        ValueError: if `source` is not a template, uses special tokens that are unknown, does not write the content of
            an answer, or writes nothing to end one.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None, where: str) -> None:
        try:
            import jinja2
            from jinja2 import meta
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f'a chat template ({where}) needs Jinja2: `pip install "gtp_jax[chat]"`.'
            ) from error
        environment = _environment()
        self._tokens, self._where = dict(tokens or {}), where
        try:
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(
                f"{where} is not a chat template ({error}). Give the chat_template.jinja or the tokenizer_config.json "
                "of the model."
            ) from error
        used = sorted(name for name in names if name.endswith("_token"))
        if used and tokens is None:
            raise ValueError(
                f"{where} writes {' and '.join(used)}, but nothing defines it. Put the model's tokenizer_config.json "
                "next to the template, or write the text of the token in the template."
            )
        known = {name: self._tokens[name] for name in used if name in self._tokens}
        self.whole = (
            "".join(f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} %}}\n" for name, text in known.items())
            + source
        )
        self._blocks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        self.around, self.ending, self._tail = self._found_around()

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Returns the messages as text, up to where the answer begins. Templates that write a date write today's.

        Raises:
            ValueError: if the template refuses the messages.
        """
        return self._render(messages, None, prompt=True, now=datetime.datetime.now())

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> Rendered:
        """Returns a conversation as text, without the positions of its answers.

        Raises:
            ValueError: if the template refuses it.
        """
        return Rendered(self._render(messages, tools), ())

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> Rendered:
        """Returns a conversation as text, with the positions of its answers.

        If the template has `{% generation %}` blocks, the answers are what these write. Otherwise the template is run
        on the turns before each answer, with a prompt for it, and on the turns up to and including it; the answer is
        the difference. Each of these texts must begin with the one before it.

        Raises:
            ValueError: if the conversation has no answer, if the template refuses it, or if the template changes the
                text of earlier turns when the conversation grows.
        """
        turns = [k for k, message in enumerate(messages) if message.get("role") == ANSWERING]
        if not turns:
            raise ValueError(f"it has no answer, a message whose `role` is {ANSWERING!r}. Leave it out.")
        if self._blocks:
            return self._of_blocks(messages, tools)
        texts: list[str] = []
        ends: list[tuple[int, bool]] = []  # per text: its number of turns, and whether it prompts for an answer
        for k in turns:
            texts += [self._render(messages[:k], tools, prompt=True), self._render(messages[: k + 1], tools)]
            ends += [(k, True), (k + 1, False)]
        texts.append(self._render(messages, tools))
        for (shorter, longer), (turn, prompts) in zip(itertools.pairwise(texts), ends, strict=True):
            if not longer.startswith(shorter):
                raise ValueError(self._rewritten(turn, prompts))
        answers = [
            (len(before), len(after) - (len(self._tail) if after.endswith(self.ending + self._tail) else 0))
            for before, after in zip(texts[0:-1:2], texts[1::2], strict=True)
        ]
        return Rendered(texts[-1], tuple(answers))

    def _rewritten(self, turn: int, prompts: bool) -> str:
        """Returns a message that says how the text of the first `turn` turns changes in a longer conversation."""
        what = (
            f"begins turn {turn + 1}, an answer, differently from the prompt for one"
            if prompts
            else f"rewrites turn {turn} or one before it when turn {turn + 1} follows"
        )
        return (
            f"{self._where} {what}, so its answers cannot be found. Use a template that keeps the text of earlier "
            "turns, or has {% generation %} blocks; or train on the whole text with --loss-on all."
        )

    def _of_blocks(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> Rendered:
        plain, marked = self._render(messages, tools), self._render(messages, tools, marks=(_BEGIN, _END))
        text, answers, begin = "", [], -1
        for part in re.split(f"([{_BEGIN}{_END}])", marked):
            if part not in (_BEGIN, _END):
                text += part
            elif (part == _BEGIN) != (begin < 0):
                raise ValueError(f"{self._where} nests {{% generation %}} blocks. Remove the inner one.")
            else:
                answers += [(begin, len(text))] if part == _END and len(text) > begin else []
                begin = len(text) if part == _BEGIN else -1
        if text != plain:
            raise ValueError(
                f"{self._where} changes what its {{% generation %}} blocks write. Put them where their text is final."
            )
        if not answers:
            raise ValueError(f"the {{% generation %}} blocks of {self._where} write no part of it. Leave it out.")
        return Rendered(text, tuple(answers))

    def _found_around(self) -> tuple[str, str, str]:
        """Returns `around`, `ending`, and the white space after the ending, which is not part of it."""
        question, answer = {"role": "user", "content": "question"}, {"role": ANSWERING, "content": "ANSWER"}
        before, found, behind = self._render([question, answer], None).rpartition(answer["content"])
        if not found:
            raise ValueError(f"{self._where} does not write the content of an answer. Give another chat template.")
        ending = behind.rstrip()
        if not ending:
            raise ValueError(
                f"{self._where} writes only white space after an answer, so a model would never learn to end one. "
                "Write a token there, such as {{ eos_token }}."
            )
        return before.replace(question["content"], "") + behind, ending, behind[len(ending) :]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        *,
        prompt: bool = False,
        now: datetime.datetime = _DAY,
        marks: tuple[str, str] = ("", ""),
    ) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        here = {"strftime_now": now.strftime, "_marks": marks}
        try:
            return self._template.render(**self._tokens, **given, **here)
        except Exception as error:  # a template may raise anything
            turns = f"turns 1 to {len(messages)}" if messages else "an answer as the first turn"
            raise ValueError(f"{self._where} refuses {turns}: {error}") from error


def named_template(path: Path, files: Mapping[str, bytes]) -> ChatTemplate:
    """Reads a chat template, or a tokenizer_config.json that contains one.

    Args:
        path: the path of the file. A tokenizer_config.json next to it names the special tokens.
        files: the contents of the model's files by name. The model's tokenizer_config.json names the special tokens if
            there is none next to `path`.

    Raises:
        ModuleNotFoundError: if Jinja2 is not installed.
        ValueError: if the file cannot be read, or has no chat template.
    """
    beside, content = path.with_name(TOKENS_FILE), _read(path)
    if path.suffix == ".json":
        files = {TOKENS_FILE: content}
    else:
        tokens = _read(beside) if beside.is_file() else files.get(TOKENS_FILE)
        files = {TEMPLATE_FILE: content, **({} if tokens is None else {TOKENS_FILE: tokens})}
    template = stored_template(files, f"`chat_template` {path}")
    if template is None:
        raise ValueError(f"`chat_template` {path} has no `chat_template`. Give the chat_template.jinja next to it.")
    return template


def stored_template(files: Mapping[str, bytes], where: str) -> ChatTemplate | None:
    """Returns the chat template among the files of a Hugging Face model; `None` if there is none.

    Args:
        files: the contents of the files by name.
        where: a description of where the files come from, for messages.

    Raises:
        ModuleNotFoundError: if Jinja2 is not installed.
        ValueError: if a file is not what its name says.
    """
    config = _object(files[TOKENS_FILE], where) if TOKENS_FILE in files else None
    if TEMPLATE_FILE in files:
        source = _text(files[TEMPLATE_FILE], where)
    else:
        source = (config or {}).get(_FIELD)
        if source is None and _OLD_FILE in files:
            source = _object(files[_OLD_FILE], where).get(_FIELD)
    if isinstance(source, list):  # several templates, each with a name
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get(_DEFAULT)
        if source is None:
            raise ValueError(
                f"{where} has the templates {', '.join(map(brief, named)) or 'none'}, but none named {_DEFAULT!r}. "
                "Write the one to use to a file, and give it as --chat-template."
            )
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"`chat_template` of {where} is {brief(source)}; it must be text.")
    return ChatTemplate(source, None if config is None else _special(config), where)


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the special tokens that a tokenizer_config.json names."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}). Give another chat template.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {brief(found)}; a JSON object is expected. Give another chat template.")
    return found


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text ({error}). Convert it.") from error


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"`chat_template` {path} cannot be read: {error.strerror}. Give another file.") from error
    except ValueError as error:
        raise ValueError(f"`chat_template` {error}") from error
    if len(content) > _MAX_BYTES:
        raise ValueError(f"`chat_template` {path} has more than {_MAX_BYTES} bytes. Give a chat template.")
    return content


@functools.cache
def _environment() -> Any:
    """Returns the sandbox, with the functions that `transformers` offers to templates."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """`{% generation %}` blocks, which contain the text that the model should generate."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked", [nodes.Name("_marks", "load")])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, marks: tuple[str, str], caller: Any) -> str:
            """Returns what a block writes, between marks."""
            return f"{marks[0]}{caller()}{marks[1]}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
