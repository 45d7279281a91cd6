"""Evaluates a model on batches of a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._foreign import printable
from ._data_set import PlacedData, rows_of
from ._job import Evaluation, Metrics
from ._log import HELD_OUT, Record
from ._loop import Outcome
from ._report import last_of, measured_at


def evaluate_batches(
    placed: PlacedData | None,
    batches: int | None,
    evaluate: Callable[[Any], Metrics],
    others: Mapping[str, float],
) -> Evaluation:
    """Returns the mean loss over the first batches of a data set, which are the same every time, and other numbers.

    The mean is over tokens if the loss counts them, and otherwise over rows: a scalar is the mean over those of its
    batch.

    Args:
        placed: the data set; `None` for no loss.
        batches: the number of batches; `None` for all.
        evaluate: evaluates one batch.
        others: further numbers, by name.

    Raises:
        ValueError: if the loss counts nothing of the batches.
    """
    values: dict[str, float] = {}
    if placed is not None:
        found: list[tuple[Metrics, int]] = []
        for i, batch in enumerate(placed.data.pass_of(batches)):
            found.append((evaluate(placed.placed(batch, i)), rows_of(batch)))
        losses = [float(metrics["loss"]) for metrics, _ in found]
        weights = [float(metrics.get("tokens", rows)) for metrics, rows in found]
        if not sum(weights):
            raise ValueError(f"the batches of `{placed.data.name}` have no tokens that the loss counts. Pass others.")
        values[HELD_OUT] = float(np.dot(losses, weights) / sum(weights))
    values |= others
    shown = {name.replace("_", " "): f"{value:.4g}" for name, value in values.items()}
    text = "   ".join(f"{printable(name)} {value}" for name, value in shown.items())
    return Evaluation(values, values.get(HELD_OUT), shown, text)


def rows_of_evaluations(outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Returns the rows of the latest evaluations in a report."""
    names = dict.fromkeys(name for record in records if "loss" not in record for name in record if name != "step")
    rows = []
    for name in names:
        if (found := last_of(records, name)) is not None:
            rows.append((printable(name).replace("_", " "), f"{found[1]:.4g}{measured_at(found[0], outcome)}"))
    return rows
