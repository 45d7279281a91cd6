"""Evaluates a model on texts that are not trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..._foreign import printable
from ..data import Corpus, Loader, bits_per_byte, unigram_entropy
from ._family_report import UNIT
from ._job import Evaluation, Metrics
from ._log import HELD_OUT, loss_key
from ._meshes import Meshes
from ._train_flags import TrainConfig


def unigram_of(corpus: Corpus) -> float:
    """Returns the unigram entropy of the held-out tokens under the counts of the training text, in nats per token."""
    train, held_out = ([one.counted for one in side] for side in (corpus.train, corpus.held_out))
    return unigram_entropy(train, held_out, corpus.vocab_size)


def held_out_loaders(config: TrainConfig, corpus: Corpus, meshes: Meshes) -> dict[str, Loader]:
    """Returns the batches of texts that are not trained on, by the name of their loss in the log."""
    rows = {HELD_OUT: corpus.held_out_rows(config.seq, config.seed)}
    rows |= {loss_key(text.name): corpus.rows_of(text, config.seq, config.seed) for text in corpus.evaluated}
    return {name: meshes.held_out_loader(each, config.batch) for name, each in rows.items()}


def evaluate_texts(
    config: TrainConfig,
    corpus: Corpus,
    loaders: dict[str, Loader],
    unigram: float,
    evaluate: Callable[[Any], Metrics],
) -> Evaluation:
    """Returns the mean loss per token of each text, next to the unigram entropy.

    Args:
        config: the configuration of the run.
        corpus: the text.
        loaders: what `held_out_loaders` returned.
        unigram: the unigram entropy, in nats per token.
        evaluate: evaluates one batch.

    Raises:
        ValueError: if the loss counts none of the tokens of a text.
    """
    losses = {name: _loss(loader, config.eval_batches, evaluate) for name, loader in loaders.items()}
    loss = losses.pop(HELD_OUT)
    bits = bits_per_byte(loss, corpus.bytes_per_token)
    lines = [f"held-out loss {loss:.3f} {UNIT} ({bits:.2f} bits per byte)   unigram entropy {unigram:.3f}"]
    for text in corpus.evaluated:
        lines.append(f"{'':>14}loss on {printable(text.name)} {losses[loss_key(text.name)]:.3f} {UNIT}")
    values = {HELD_OUT: loss, "bits_per_byte": bits, **losses}
    return Evaluation(values, loss, {"held out": f"{loss:.3f}"}, "\n".join(lines))


def _loss(loader: Loader, batches: int, evaluate: Callable[[Any], Metrics]) -> float:
    """Returns the mean loss per token over the first batches of a text: the same batches every time."""
    whole = -(-len(loader.windows) // loader.batch)
    evaluations = [evaluate(batch) for batch in loader.steps(0, min(batches, whole))]
    tokens = [float(metrics["tokens"]) for metrics in evaluations]
    if not sum(tokens):
        raise ValueError(
            f"the first {len(tokens)} evaluation batches contain no answers, and the loss counts only answers. "
            "Use more --eval-batches, a larger --seq, or --loss-on all."
        )
    return float(np.dot([float(metrics["loss"]) for metrics in evaluations], tokens) / sum(tokens))
