"""StableHLO without what depends on names: of modules, functions, meshes, results and places in the code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator

_SYMBOL = re.compile(r'(?<!custom_call )@("[^"]*"|[\w.$-]+)')  # the target of a custom call is no name of ours
_TEXT = r'"(?:[^"\\]|\\.)*"'
_INFO = rf"jax\.(?:result|arg)_info = {_TEXT}"
_NAMED = re.compile(rf" \{{{_INFO}\}}|{_INFO}, |, {_INFO}")
_PLACE = re.compile(r" loc\((?:[^()\"]|\"[^\"]*\")*\)|^#loc.*\n", re.MULTILINE)
_CHANNEL = re.compile(r"(channel_handle<handle = )\d+")
_MESH = re.compile(r"^  sdy\.mesh @(\S+) = (.*)$", re.MULTILINE)
_FUNCTION = re.compile(r'^  func\.func (?:public |private )?@("[^"]*"|[\w.$-]+)(.*?^  \})$', re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"^module @\S+")


def normal_form(text: str) -> str:
    """Returns the text of a module with its functions in the order in which `main` reaches them, numbered; functions,
    and meshes, that are alike are one. Values are numbered already, in the order of a function's lines.

    Raises:
        ValueError: if the text is no module with a `main`.
    """
    text = _NAMED.sub("", _PLACE.sub("", text))
    text = _CHANNEL.sub(r"\1_", text)
    meshes = dict(_MESH.findall(text))
    functions = dict(_FUNCTION.findall(text))
    if "main" not in functions:
        raise ValueError(f"a module has a function `main`; this one has {', '.join(functions) or 'none'}.")

    by_digest: dict[str, str] = {}
    digests: dict[str, str] = {}

    def digest(name: str) -> str:
        if name not in digests:
            body = _renamed(functions[name], lambda symbol: digest(symbol) if symbol in functions else None)
            body = _renamed(body, lambda symbol: _digest("mesh", meshes[symbol]) if symbol in meshes else None)
            digests[name] = _digest("function", body)
            by_digest[digests[name]] = body
        return digests[name]

    by_digest |= {_digest("mesh", body): body for body in meshes.values()}
    numbers = {digest("main"): "main"}
    written = []
    for found in _reached(digests["main"], by_digest):
        numbers.setdefault(found, f"{found.partition('_')[0]}{len(numbers)}")
        written.append(found)
    head = _MODULE.sub("module", text.split("\n", 1)[0])
    named = [_in_lines(f"@{numbers[one]} {_renamed(by_digest[one], numbers.get).lstrip()}") for one in written]
    return "\n".join([head, *named, ""])


def _in_lines(function: str) -> str:
    """Returns a function with each argument and result on a line of its own, so that a difference shows."""
    head, *body = function.split("\n")
    return "\n".join([re.sub(r", (?=%arg|tensor<)| (?=->)", ",\n    ", head), *body])


def _reached(start: str, bodies: dict[str, str]) -> Iterator[str]:
    """Yields a symbol and all that it reaches, each once, in the order of their first use."""
    seen, waiting = {start}, [start]
    while waiting:
        here = waiting.pop(0)
        yield here
        for symbol in _SYMBOL.findall(bodies[here]):
            if symbol in bodies and symbol not in seen:
                seen.add(symbol)
                waiting.append(symbol)


def _renamed(text: str, name: Callable[[str], str | None]) -> str:
    """Returns the text with other names of symbols, where there is one."""

    def renamed(match: re.Match[str]) -> str:
        new = name(match[1])
        return match[0] if new is None else f"@{new}"

    return _SYMBOL.sub(renamed, text)


def _digest(kind: str, text: str) -> str:
    return f"{kind}_{hashlib.sha256(text.encode()).hexdigest()}"
