"""Continues prompts with new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from .._foreign import brief
from .._numbers import whole
from ..mesh import check_mesh_in_scope, current_roles, current_view, degrees, mesh_of_devices
from ..nn import Layer
from ..recipes import use_recipe
from ._caches import check_filled_once
from ._checks import check_model
from ._programs import NO_TOKEN, Request, decode, prefill, with_ended
from ._sampling import sampling_of
from ._text_stop import Decoder, TextStop
from ._weights import Gather, check_gather, prepared, with_plain_shardings

Stop = int | str | Sequence[int | str]


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
        tokens: the new tokens, `(batch, max_new_tokens)` int32; -1 after the end of a row.
        lengths: the number of new tokens per row, `(batch,)` int32, including the token that stopped the row.
    """

    tokens: np.ndarray
    lengths: np.ndarray


class _Options(NamedTuple):
    """The arguments of `generate` that determine how prompts are continued."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    stop: Stop
    tokenizer: Decoder | None
    seed: int
    vocab_size: int | None
    gather: Gather | None


class _Prompts(NamedTuple):
    """Prompts padded for the programs: the length to a power of two, the rows to fill the mesh's batch axes.

    Attributes:
        tokens: the padded prompts, `(rows, length)` int32.
        lengths: the number of tokens of each prompt, `(rows,)` int32; 0 for padding rows.
        batch: the number of rows that the user passed.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    batch: int


# The prompts, as an array of padded rows or as rows of different lengths; and the number of tokens of each.
Tokens = jax.Array | np.ndarray | Sequence[Sequence[int]]
Lengths = jax.Array | np.ndarray | Sequence[int] | None


def generate(
    model: nnx.Module,
    tokens: Tokens,
    *,
    lengths: Lengths = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Stop = (),
    tokenizer: Decoder | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
) -> Generated:
    """Continues prompts with new tokens, on the mesh in scope.

    One forward pass processes the prompts and caches their keys and values; then each row is extended one token at a
    time. Greedy tokens are those of a full forward pass over all preceding tokens, up to rounding: two logits that are
    almost equal may change places. Rows do not depend on each other. On every mesh, the random numbers of a sampled
    token depend only on `seed`, the row's index and the token's position.

    Weights are multiplied in the model's compute dtype, whichever recipe is in scope; weights that are stored as codes
    stay codes in memory. The width of `tokens` and the number of tokens in the caches are rounded up to powers of two,
    so that calls with similar lengths share the compiled programs.

    Args:
        model: the model. Its call takes `tokens` and `positions`, both `(batch, sequence)`, and returns logits. Only
            causal `gtp_jax.Attention` modules may mix the tokens of a row, and the model must pass `positions` to
            them. If its call also takes `logits_at`, only the logits of each prompt's last token are computed; see
            `gtp_jax.models.Llama`.
        tokens: the prompts: integers `(batch, length)`, or, without `lengths`, a sequence of sequences, which may
            differ in length.
        lengths: the number of tokens of each prompt, `(batch,)`; a prompt is at the beginning of its row. By default,
            the whole row.
        max_new_tokens: the maximum number of new tokens per row.
        temperature: the divisor of the logits before sampling; 0 takes the most likely token.
        top_k: the number of most likely tokens to sample from; all by default.
        top_p: the minimum total probability of the most likely tokens to sample from (nucleus sampling); all tokens by
            default.
        stop: the tokens and texts that end a row, one or several. A row ends with the token that completes a stop text;
            the token's own text may continue past it.
        tokenizer: the tokenizer of `tokens`, needed if `stop` has a text. Its `decode` takes a list of tokens and
            returns text.
        seed: the seed of sampling.
        vocab_size: the number of tokens in the vocabulary, if the model pads it; padding is never chosen.
        gather: when sharded weights are gathered: `"once"` per call, which needs memory for a whole copy in addition to
            the model, or layer by layer for `"each_token"`. By default, they are gathered once if the copy fits, and
            otherwise for each token, with a warning that reports the bytes.

    Raises:
        ValueError: if an argument or the mesh in scope is not allowed, if the model cannot be continued token by token,
            if the call is inside a `shard_map`, or if logits are NaN.
        TypeError: if `tokens` are not integers, `model` is not an `nnx.Module` with a `__call__`, or `tokenizer` has no
            `decode`.
    """
    options = _Options(max_new_tokens, temperature, top_k, top_p, stop, tokenizer, seed, vocab_size, gather)
    parts = list(_stream(model, tokens, lengths, options))
    made = np.concatenate(parts, axis=1)
    made = np.pad(made, ((0, 0), (0, max_new_tokens - made.shape[1])), constant_values=NO_TOKEN)
    return Generated(made, (made != NO_TOKEN).sum(axis=1).astype(np.int32))


def generate_stream(
    model: nnx.Module,
    tokens: Tokens,
    *,
    lengths: Lengths = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Stop = (),
    tokenizer: Decoder | None = None,
    seed: int = 0,
    vocab_size: int | None = None,
    gather: Gather | None = None,
) -> Iterator[np.ndarray]:
    """Continues prompts like `generate`, but yields the new tokens as they are computed. The mesh of this call must be
    in scope during the iteration, too.

    Yields:
        New tokens, `(batch, tokens)` int32: the first of each row, then up to 16 at a time; -1 after the end of a row.
        The iterator ends when all rows have ended.

    Raises:
        ValueError, TypeError: for the same reasons as `generate`. This call checks the arguments; the iterator raises
            errors that only running the model shows, and a `ValueError` if the mesh in scope is not that of this call.
    """
    options = _Options(max_new_tokens, temperature, top_k, top_p, stop, tokenizer, seed, vocab_size, gather)
    return _stream(model, tokens, lengths, options)


def _stream(model: nnx.Module, tokens: Tokens, lengths: Lengths, options: _Options) -> Iterator[np.ndarray]:
    """Checks the arguments, and returns the iterator of `generate_stream`."""
    check_mesh_in_scope()
    check_gather(options.gather)
    choice, sampling = sampling_of(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        vocab_size=options.vocab_size,
    )
    stops, texts = _stops(options.stop, options.tokenizer)
    max_new_tokens = whole(options.max_new_tokens)
    if max_new_tokens is None or max_new_tokens < 1:
        raise ValueError(
            f"`max_new_tokens` is {brief(options.max_new_tokens)}; it must be a whole number of at least 1."
        )
    if current_view() == "local":
        raise ValueError("`generate` takes a model of global arrays; call it outside of the `shard_map`.")
    mesh = mesh_of_devices("generate")
    check_model(model)
    prompts = _prompts(tokens, lengths, model)
    room = 2**31 - int(prompts.lengths.max())
    if max_new_tokens > room:
        raise ValueError(
            f"`max_new_tokens` is {brief(max_new_tokens)}; it must be at most {room}: positions are below 2**31."
        )
    ends = [
        TextStop(options.tokenizer, row[:length], texts)
        for row, length in zip(prompts.tokens[: prompts.batch], prompts.lengths, strict=False)
        if texts and options.tokenizer is not None
    ]

    def run() -> Iterator[np.ndarray]:
        _check_same_mesh(mesh)
        with use_recipe(None):
            copy, gathers = prepared(model, options.gather)
        last = np.maximum(prompts.lengths + max_new_tokens - 1, 0).astype(np.int32)
        graph, state = nnx.split(copy)
        arrays, tree = jax.tree.flatten(with_plain_shardings(state))
        request = Request(graph, tree, choice, _power_of_two(int(last.max())), gathers)
        with use_recipe(None):
            rows, caches = prefill(request, arrays, prompts.tokens, prompts.lengths, last, stops, sampling)
        check_filled_once(caches)
        tokens, done, broken = jax.device_get((rows.tokens, rows.done, rows.broken))
        made = np.where(prompts.lengths > 0, tokens, NO_TOKEN)[:, None]
        while True:
            _check_logits(broken, prompts)
            made, ended = _cut(made[: prompts.batch], ends)
            yield made[:, (made != NO_TOKEN).any(axis=0)]
            ended = np.pad(ended, (0, len(done) - len(ended)))
            if (done | ended).all():
                return
            _check_same_mesh(mesh)
            rows = with_ended(rows, ended) if ended.any() else rows
            with use_recipe(None):
                rows, caches, made = decode(request, arrays, rows, caches, stops, sampling)
            made, done, broken = jax.device_get((made, rows.done, rows.broken))

    return run()


def _check_same_mesh(mesh: Mesh) -> None:
    """Checks that the mesh in scope is that of the call of `generate_stream`, for which the prompts are padded.

    Raises:
        ValueError: if it is not; the message names both.
    """
    if (found := mesh_of_devices("generate_stream")) != mesh:
        devices = " on other devices" if dict(found.shape) == dict(mesh.shape) else ""
        raise ValueError(
            f"the iterator of `generate_stream` was made under {_mesh_text(mesh)}, but the next tokens were asked for "
            f"under {_mesh_text(found)}{devices}. Iterate inside of the same `with jax.set_mesh(mesh):` as the call."
        )


def _mesh_text(mesh: Mesh) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    return f"a mesh with {axes}" if axes else "no mesh"


def _cut(made: np.ndarray, ends: Sequence[TextStop]) -> tuple[np.ndarray, np.ndarray]:
    """Replaces new tokens after a text that ends their row by `NO_TOKEN`.

    Returns the new tokens, in the same shape, and whether a text has ended each row, `(batch,)`.
    """
    if not ends:
        return made, np.zeros(len(made), bool)
    made = made.copy()
    for row, end in zip(made, ends, strict=True):
        row[end.take(row[row != NO_TOKEN].tolist()) :] = NO_TOKEN
    return made, np.array([end.ended for end in ends])


def _prompts(tokens: Tokens, lengths: Lengths, model: nnx.Module) -> _Prompts:
    """Checks the prompts and pads them.

    Raises:
        ValueError, TypeError: if the prompts are invalid; the message names the argument and what is allowed.
    """
    ragged = isinstance(tokens, list | tuple) and all(hasattr(row, "__len__") for row in tokens)
    if ragged and lengths is None:
        lengths = np.array([len(row) for row in tokens], np.int64)
        if 0 in lengths:
            raise ValueError(
                f"`tokens` has no token in row {lengths.argmin()}; a prompt has at least one, such as one that begins "
                "a document."
            )
        longest = int(lengths.max(initial=0))
        array = _array([[*row, *[0] * (longest - len(row))] for row in tokens])
    else:
        array = _array(tokens)
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(
            f"`tokens` has the shape {array.shape}; it must be (batch, length), or a sequence of prompts. A prompt has "
            "at least one token, such as one that begins a document."
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"`tokens` are {array.dtype}; they must be integers, such as a tokenizer returns.")
    batch, length = array.shape[0], array.shape[-1]
    sizes = np.full(batch, length) if lengths is None else np.asarray(lengths)
    if sizes.shape != (batch,) or not np.issubdtype(sizes.dtype, np.integer) or sizes.min() < 1 or sizes.max() > length:
        raise ValueError(
            f"`lengths` is {np.array2string(sizes, threshold=8)}; it must be {batch} whole numbers from 1 to {length}, "
            "one for each row of `tokens`."
        )
    array = np.where(np.arange(length) < sizes[:, None], array, 0)
    least, most = int(array.min()), int(array.max())
    if least < 0 or most >= 2**31:
        raise ValueError(
            f"`tokens` holds {least if least < 0 else most}; tokens are indices of a vocabulary, at least 0 and below "
            "2**31."
        )
    ranks = 1 if jax.sharding.get_abstract_mesh().empty else degrees(_roles(model).batch)
    more = (-batch % ranks, _power_of_two(length) - length)
    return _Prompts(
        np.pad(array, ((0, more[0]), (0, more[1]))).astype(np.int32),
        np.pad(sizes, (0, more[0])).astype(np.int32),
        batch,
    )


def _array(tokens: Any) -> np.ndarray:
    try:
        return np.asarray(tokens)
    except ValueError as error:
        raise ValueError(
            "`tokens` has rows or entries of different lengths, so it is no array (batch, length). Pad the rows, or "
            "give rows of integers without `lengths`."
        ) from error


def _roles(model: nnx.Module) -> Any:
    """Returns the mesh roles with which a model was built; the current ones if it has no `Layer`."""
    found = [module.roles for _, module in nnx.iter_modules(model) if isinstance(module, Layer)]
    return found[0] if found else current_roles()


def _stops(stop: Any, tokenizer: Any) -> tuple[np.ndarray, tuple[str, ...]]:
    """Returns the tokens that end a row, padded to a power of two, and the texts that end a row.

    Raises:
        ValueError: if an entry is neither a token nor a text, a token is out of range, a text is empty, or there is no
            tokenizer for texts.
        TypeError: if the tokenizer has no `decode`.
    """
    several = isinstance(stop, Sequence | np.ndarray) and not isinstance(stop, str | bytes)
    given: list[Any] = list(stop) if several else [stop]
    texts = tuple(one for one in given if isinstance(one, str))
    tokens = [number for one in given if not isinstance(one, str) and (number := whole(one)) is not None]
    if len(tokens) + len(texts) < len(given):
        raise ValueError(f"`stop` is {brief(stop)}; it must be tokens (whole numbers) or texts, one or a list of them.")
    if not all(0 <= token < 1 << 31 for token in tokens):
        raise ValueError(f"`stop` is {brief(stop)}; tokens are indices of a vocabulary, at least 0 and below 2**31.")
    if "" in texts:
        raise ValueError(f"`stop` is {stop!r}; an empty text would end every row. Leave it out.")
    if texts and tokenizer is None:
        raise ValueError(f"`stop` is {stop!r}; its texts need a tokenizer. Give `tokenizer`, or stop at tokens.")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"`tokenizer` is a {type(tokenizer).__name__}; it must have `decode(tokens)`, which returns text."
        )
    return np.array([*tokens, *[NO_TOKEN] * (_power_of_two(len(tokens)) - len(tokens))], np.int32), texts


def _check_logits(broken: np.ndarray, prompts: _Prompts) -> None:
    rows = np.flatnonzero(broken[: prompts.batch])
    if rows.size:
        row = int(rows[0])
        raise ValueError(
            f"the logits of row {row} are NaN. Either a token of its prompt, the largest of which is "
            f"{prompts.tokens[row].max()}, is outside the vocabulary, or weights or activations are not finite."
        )


def _power_of_two(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()
