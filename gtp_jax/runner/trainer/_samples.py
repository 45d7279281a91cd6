"""Text that the model writes while it is trained."""

from __future__ import annotations

import textwrap

import jax
import numpy as np

from ...generation import generate
from ...train import TrainState
from .._exit_codes import out_of_memory
from ..data import Documents
from ._job import Job

# Of the first held-out document, how many tokens the model continues, and how boldly.
_PROMPT_TOKENS = 24
_TEMPERATURE = 0.8


class Samples:
    """Has the model continue the beginning of the held-out text.

    Args:
        job: what is run.
        wanted: whether there is any, as far as the configuration asks for it.

    Attributes:
        wanted: whether there is any; not of replicas of unequal degree, which have no model in one place, nor after the
            devices' memory was too small for it.
        last: the latest text, with its prompt.
    """

    def __init__(self, job: Job, *, wanted: bool) -> None:
        self._job = job
        uniform = job.meshes.plan is None or job.meshes.plan.uniform
        self.wanted = wanted and bool(job.config.sample_tokens) and uniform
        self.last = ""

    def of(self, state: TrainState) -> str:
        """Returns a text of the model in this state. Every process must call this."""
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
            return "(no text: there is not enough memory beside the state; --sample-tokens 0 leaves it out)"
        new = found.tokens[0, : found.lengths[0]]
        self.last = tokenizer.decode([*prompt.tolist(), *new.tolist()])
        return self.last


def _begin(documents: Documents, separator: int, most: int) -> np.ndarray:
    """Returns the beginning of the first document, `(tokens,)` int64; of a conversation what comes before its first
    answer, unless that is more than `most` tokens."""
    if documents.answers is not None and 0 < (first := int(documents.answers.argmax())) <= most:
        return np.asarray(documents.tokens[:first], np.int64)
    begin = np.asarray(documents.tokens[:_PROMPT_TOKENS], np.int64)
    ends = np.flatnonzero(begin == separator)
    return begin[: ends[0]] if ends.size and ends[0] else begin


def block(text: str) -> str:
    """Returns a text as it is shown: a bar before each line, without what a terminal would take for a command."""
    shown = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text.expandtabs(4))
    return textwrap.indent("".join(shown), "  | ", lambda _: True)
