"""Generates text with the model of a run, or an imported one."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ...generation import generate_stream, sampling_of
from ...layout import even_shares
from ...mesh import choose_devices, make_mesh, on_gpu
from ...models import END_TOKEN, ModelConfig, Origin, config_of, load, opened
from ...recipes import RECIPES
from .._compiled import keep_compiled
from ..data import BYTES, Chat, TextStream, Tokenizer, load_tokenizer, stored_template
from ..trainer import BYTE_TOKENS, context_length, stored_tokenizer

# An imported model also names the tokens that end a text in this file.
_GENERATION_FILE = "generation_config.json"


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: if an argument, or what it names, is invalid; raised before anything is compiled.
    """
    choose_devices(args.tp or 1)
    if kept := keep_compiled():
        note(kept)
    # check arguments before reading anything large
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "seed")}
    sampling_of(**sampling)
    directory, checkpoints = opened(args.source)
    manifest = checkpoints.manifest(args.step)
    where = f"step {manifest['step']} in {directory}"
    config = config_of(manifest["extra"], where)
    origin = Origin.of(manifest["extra"], checkpoints.files(manifest["step"]), where)
    tokenizer, published = _tokenizer(args, origin)
    ends = _ends(tokenizer, origin, config)
    if args.chat is None:
        texts, shown, stops, hidden = args.prompt, list(args.prompt), args.stop, []
        prompts = [tokenizer.published(text) if published else tokenizer.prompt(text) for text in texts]
    else:
        chat = _chat(tokenizer, origin, where)
        ends += [id for id in chat.ends if id < config.vocab_size]
        # show only the answers, without the text that ends them
        texts, shown, stops, hidden = args.chat, [""] * len(args.chat), [*args.stop, chat.template.ending], ends
        prompts = [chat.prompt(text) for text in texts]
    prompts = [_known(prompt, text, tokenizer, config) for prompt, text in zip(prompts, texts, strict=True)]
    _warn_of_long(prompts, context_length(args.source, origin, config))
    dtype = args.dtype or ("bfloat16" if on_gpu() else "float32")
    with _mesh(args.tp, config):
        began = time.perf_counter()
        recipe = RECIPES[args.recipe]() if args.recipe else None
        with even_shares():
            model = load(args.source, step=manifest["step"], dtype=dtype, recipe=recipe)
        kept, took = args.recipe or dtype, time.perf_counter() - began
        note(f"{where}: {config.param_count():,} parameters in {kept} on {_devices()}, restored in {took:.1f} s")
        stream = generate_stream(
            model,
            prompts,
            max_new_tokens=args.max_new_tokens,
            stop=ends,
            vocab_size=min(tokenizer.vocab_size, config.vocab_size),
            **sampling,
        )
        _show(stream, [TextStream(tokenizer, prompt, stops) for prompt in prompts], shown, hidden)
    return 0


def note(text: str) -> None:
    """Prints a message that is not text of the model."""
    print(f"gtp-jax generate: {text}", file=sys.stderr, flush=True)


def _show(stream: Iterator[np.ndarray], texts: list[TextStream], found: list[str], hidden: list[int]) -> None:
    """Prints texts: a single one while it is generated, several when all are complete.

    Args:
        stream: the new tokens of all texts.
        texts: the text that the new tokens add to each.
        found: the beginning of each text.
        hidden: tokens that are not shown.
    """
    alone = len(texts) == 1
    say = functools.partial(print, end="", flush=True)
    if alone:
        say(found[0])
    began, count, first = time.perf_counter(), 0, 0.0
    for part in stream:
        first = first or time.perf_counter()
        for row, tokens in enumerate(part):
            new = [int(token) for token in tokens if token >= 0]
            count += len(new)
            added = "" if texts[row].ended else texts[row].add([token for token in new if token not in hidden])
            found[row] += added
            if alone:
                say(added)
        if all(text.ended for text in texts):
            break
    for row, text in enumerate(texts):
        added = "" if text.ended else text.end()
        found[row] += added
        if alone:
            say(added + "\n")
        else:
            say(f"{'' if row == 0 else chr(10)}--- {row + 1} of {len(texts)}\n{found[row]}\n")
    took = time.perf_counter() - began
    note(f"{count} tokens in {took:.1f} s, of which {first - began:.1f} s until the first")


def _tokenizer(args: argparse.Namespace, origin: Origin) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer of a model, and whether prompts are encoded as its publisher encodes them.

    Raises:
        ValueError: if the tokenizer is unknown.
    """
    if args.tokenizer == BYTE_TOKENS:
        return BYTES, False
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer), bool(origin.config)
    return stored_tokenizer(args.source, origin), bool(origin.config)


def _chat(tokenizer: Tokenizer, origin: Origin, where: str) -> Chat:
    """Returns the `Chat` that turns questions into prompts.

    Raises:
        ValueError: if there is no chat template.
    """
    template = stored_template(origin.files, f"the chat template of {where}")
    if template is None:
        raise ValueError(
            f"{where} has no chat template. Give --prompt, or the checkpoint of a model that was imported with one or "
            "trained with --chat-template."
        )
    return Chat(template, tokenizer, answers_only=True)


def _known(tokens: list[int], text: str, tokenizer: Tokenizer, config: ModelConfig) -> list[int]:
    """Returns the tokens of a prompt, or the separator if there are none.

    Raises:
        ValueError: if the model lacks one of the tokens.
    """
    tokens = tokens or [tokenizer.separator]
    if max(tokens) >= config.vocab_size:
        raise ValueError(
            f"`prompt` {text!r} has the token {max(tokens)}, but the model knows {config.vocab_size}: "
            f"{tokenizer.name} is not its tokenizer. Give the model's tokenizer as --tokenizer."
        )
    return tokens


def _warn_of_long(prompts: list[list[int]], longest: int | None) -> None:
    """Warns of prompts with more tokens than the model was trained on; what follows them can be computed, but is poor.

    Args:
        prompts: the tokens of each prompt.
        longest: the longest sequence that the model was trained on, in tokens; `None` if it is unknown.
    """
    for number, prompt in enumerate(prompts, 1):
        if longest is not None and len(prompt) > longest:
            warnings.warn(
                f"prompt {number} has {len(prompt)} tokens, but the model was trained on sequences of at most "
                f"{longest}, so the text after it may make no sense. Shorten the prompt, or train with a larger --seq.",
                stacklevel=2,
            )


def _ends(tokenizer: Tokenizer, origin: Origin, config: ModelConfig) -> list[int]:
    """Returns the tokens that end a text: the separator of documents, and those that the model's publisher names."""
    found = {tokenizer.separator}
    generation = json.loads(origin.files.get(_GENERATION_FILE, b"{}"))
    for named in (origin.config.get(END_TOKEN), generation.get(END_TOKEN) if isinstance(generation, dict) else None):
        found |= {token for token in (named if isinstance(named, list) else [named]) if isinstance(token, int)}
    return sorted(token for token in found if 0 <= token < config.vocab_size)


def _mesh(tp: int | None, config: ModelConfig) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that sets a mesh of all devices, on which only tp shards weights; none on one device.

    Raises:
        ValueError: if tp does not divide the devices or the model.
    """
    devices, heads = jax.device_count(), getattr(config, "num_kv_heads", config.num_heads)
    if tp is None:
        tp = max(n for n in range(1, devices + 1) if devices % n == 0 and n <= heads)
    config.check_mesh(tp=tp, seq=tp)
    if devices % tp:
        raise ValueError(f"`tp` is {tp}, which does not divide the {devices} devices. Choose one that does.")
    return contextlib.nullcontext() if devices == 1 else jax.set_mesh(make_mesh(tp=tp))


def _devices() -> str:
    mesh = jax.sharding.get_abstract_mesh()
    kind = jax.devices()[0].device_kind
    return f"1 {kind}" if mesh.empty else " x ".join(f"{axis} {n}" for axis, n in mesh.shape.items()) + f" {kind}"
