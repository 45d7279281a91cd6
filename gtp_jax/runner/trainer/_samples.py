"""Lets the model write text while it is trained."""

from __future__ import annotations

import textwrap

import jax
import numpy as np

from ...generation import generate
from ...mesh import CP
from ...train import TrainState
from .._exit_codes import out_of_memory
from ..data import Documents
from ._job import Job

# The number of tokens of the first held-out document that the model continues, and the sampling temperature.
_PROMPT_TOKENS = 24
_TEMPERATURE = 0.8


class Samples:
    """Lets the model continue the beginning of the held-out text.

    Args:
        job: the run.
        wanted: whether to write text if the configuration asks for it.

    Attributes:
        wanted: whether to write text. False with replicas of unequal degree, which share no mesh; on a mesh that
            divides sequences, where `generate` does not run; and once the devices have had too little memory for it.
        last: the latest text, including its prompt; empty before the first.
    """

    def __init__(self, job: Job, *, wanted: bool) -> None:
        self._job = job
        uniform = job.meshes.plan is None or job.meshes.plan.uniform
        whole = job.meshes.mesh.shape.get(CP, 1) == 1
        self.wanted = wanted and bool(job.config.sample_tokens) and uniform and whole
        self.last = ""

    def of(self, state: TrainState) -> str:
        """Returns a text that the model writes in this state. Every process must call this."""
        job, tokenizer = self._job, self._job.corpus.tokenizer
        held_out = next(one for one in job.corpus.held_out if len(one.tokens))
        prompt = _begin(held_out, tokenizer.separator, job.config.seq)
        ending = [] if job.corpus.chat is None else [job.corpus.chat.template.ending]
        options = {"temperature": _TEMPERATURE, "seed": job.config.seed}
        try:
            found = generate(
                state.model(),
                prompt[None],
                max_new_tokens=job.config.sample_tokens,
                stop=[tokenizer.separator, *ending],
                tokenizer=tokenizer,
                vocab_size=min(job.corpus.vocab_size, job.model.vocab_size),
                **options,
            )
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            self.wanted = False
            return "(no text: there is not enough memory next to the state; --sample-tokens 0 turns samples off)"
        new = found.tokens[0, : found.lengths[0]]
        self.last = tokenizer.decode([*prompt.tolist(), *new.tolist()])
        return self.last


def _begin(documents: Documents, separator: int, most: int) -> np.ndarray:
    """Returns the beginning of the first document, `(tokens,)` int64.

    For a conversation, this is everything before its first answer, unless that is more than `most` tokens.
    """
    if documents.answers is not None and 0 < (first := int(documents.answers.argmax())) <= most:
        return np.asarray(documents.tokens[:first], np.int64)
    begin = np.asarray(documents.tokens[:_PROMPT_TOKENS], np.int64)
    ends = np.flatnonzero(begin == separator)
    return begin[: ends[0]] if ends.size and ends[0] else begin


def block(text: str) -> str:
    """Returns a text as it is displayed: with a bar before each line, and without characters that could control a
    terminal."""
    shown = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))
    return textwrap.indent("".join(shown), "  | ", lambda _: True)
