"""The task of training a model that `gtp-jax train --model` names."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from ...mesh import Roles, make_mesh, on_gpu, use_roles
from ...nn import cross_entropy
from .._compiled import keep_compiled
from ..data import Loader
from ..launch import Launch
from ._any_model import AnyModel
from ._data_set import DataSet, PlacedData, in_words, rows_of
from ._directory import RunDirectory
from ._evaluations import evaluate_batches, rows_of_evaluations
from ._family_report import UNIT, resume_command, text_in_words, text_losses
from ._job import Evaluation
from ._log import Record
from ._loop import Outcome
from ._meshes import Meshes
from ._model_task import Definition, EvaluateBatch, ModelTask
from ._optimizer import learning_rate, optimizer_of
from ._same_text import check_same_text, stored_text
from ._settings_task import SettingsTask
from ._task import Baseline, Begin
from ._texts import evaluate_texts, held_out_loaders, unigram_of
from ._watch import Supervision, Watch


class NamedTask(SettingsTask, ModelTask):
    """Trains a model that settings name; see `SettingsTask`."""

    def read(self, launch: Launch, watch: Watch, begin: Begin) -> None:
        """Chooses devices, reads the text, and imports what the settings name; see `Task`."""
        super().read(launch, watch, begin)
        config = self.config
        assert config.model_ is not None
        self._model = AnyModel(_imported("model", config.model_), config.seed)
        self._loss = _next_token_loss if config.loss is None else _imported("loss", config.loss)
        if config.dataset is not None:
            self._data = DataSet(_imported("dataset", config.dataset), "dataset")
        self._eval_data = None
        if config.eval_dataset is not None:
            self._eval_data = DataSet(_imported("eval_dataset", config.eval_dataset), "eval_dataset")

    def place(self, launch: Launch, begin: Begin, directory: RunDirectory, supervision: Supervision | None) -> None:
        """Makes the mesh, and finds the shapes of the state; see `Task`."""
        if launch.processes == 1 and (kept := keep_compiled()):
            print(kept, flush=True)
        super().place(launch, begin, directory, supervision)

    @property
    def roles(self) -> Roles:
        """The roles of the axes of the mesh."""
        return self.config.parallelism.roles

    def make_mesh(self) -> Mesh:
        """Returns the mesh of the degrees."""
        degrees = self.config.degrees(jax.device_count(), virtual=not on_gpu())
        with use_roles(self.roles):
            return make_mesh(**degrees)

    def define(self) -> Definition:
        """Returns the model, its loss and its data."""
        config = self.config
        microbatches = config.execution.microbatches
        common: Any = dict(
            model=self._model,
            loss=self._loss,
            optimizer=functools.partial(optimizer_of, config),
            schedule=learning_rate(config),
            recipe=config.recipe,
            recipe_in_words=config.recipe_in_words,
            view="global",
            microbatches=microbatches,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            offload=config.execution.offloaded,
        )
        if config.dataset is not None:
            first = self._data.batch(0)
            source = PlacedData(self._data, self.mesh, self.roles, microbatches)
            source.at(0)  # refuses
            return Definition(
                source=source,
                data=f"data    batches of {in_words(first)}",
                evaluate=None if self._eval_data is None else self._on_batches,
                per_step=(rows_of(first), "examples"),
                **common,
            )
        meshes, self._unigram = Meshes(self.mesh), unigram_of(self.corpus)
        self._held_out = held_out_loaders(config, self.corpus, meshes)
        loader = meshes.loader(self.corpus.rows(config.seq, config.seed), config.batch, microbatches)
        assert isinstance(loader, Loader)
        return Definition(
            source=_TextSource(self, loader),
            data=text_in_words(config, self.corpus, self._unigram),
            evaluate=self._on_texts,
            per_step=(config.batch * config.seq, "tokens"),
            loss_unit=UNIT,
            shown={"unigram": f"{self._unigram:.2f}"},
            **common,
        )

    def _on_batches(self, model: nnx.Module, evaluate_batch: EvaluateBatch) -> Evaluation:
        assert self._eval_data is not None
        placed = PlacedData(self._eval_data, self.mesh, self.roles)
        return evaluate_batches(placed, self.config.eval_batches, evaluate_batch, {})

    def _on_texts(self, model: nnx.Module, evaluate_batch: EvaluateBatch) -> Evaluation:
        return evaluate_texts(self.config, self.corpus, self._held_out, self._unigram, evaluate_batch)

    @property
    def baseline(self) -> Baseline | None:
        """The unigram entropy; `None` without a text."""
        return None if self.config.dataset is not None else Baseline("unigram entropy", self._unigram)

    def evaluated(self, outcome: Outcome, records: Sequence[Record]) -> list[tuple[str, str]]:
        """Returns the rows of the latest evaluations."""
        if self.config.dataset is not None:
            return rows_of_evaluations(outcome, records)
        return text_losses(self.corpus, outcome, records, self._unigram)

    def next_steps(self) -> str:
        """Returns the command that trains on."""
        command = resume_command(RunDirectory.of(self.config.out).root, self.config)
        return f"\nnext:\n  train on, as many steps again:\n    {command}"


class _TextSource:
    """The batches of a text."""

    def __init__(self, task: NamedTask, loader: Loader) -> None:
        self._corpus, self._seq, self._loader = task.corpus, task.config.seq, loader
        self.at, self.steps = loader.at, loader.steps

    @property
    def digest(self) -> str:
        return self._corpus.fingerprint

    def stored(self, position: int, /) -> dict[str, Any]:
        del position  # from which a row is found without reading those before
        return stored_text(self._corpus, self._seq)

    def go_to(self, position: int, extra: Mapping[str, Any], /) -> str:
        check_same_text(extra, self._corpus, self._seq)
        return ""


def _next_token_loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the cross entropy of `model(tokens)` with the targets.

    Raises:
        ValueError: if the batch has no tokens and targets, or has rows of several documents.
    """
    if not isinstance(batch, Mapping) or not {"tokens", "targets"} <= batch.keys():
        raise ValueError(
            "a batch of `dataset` has no `tokens` and `targets`, of which the default loss is the cross entropy. Give "
            "your own with --loss."
        )
    if "segment_ids" in batch:
        raise ValueError(
            "rows are packed with whole documents, which `model(tokens)` cannot tell apart. Use --packing stream, or a "
            "--loss that passes `positions` and `segment_ids` of the batch to the model."
        )
    return cross_entropy(model(batch["tokens"]), batch["targets"], batch.get("weights"))


def _imported(flag: str, name: str) -> Any:
    """Returns the object that `package.module:name` names. Modules may be in the working directory.

    Raises:
        ValueError: if there is none, or its module cannot be imported.
    """
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError(f"`{flag}` is {name!r}; it must be package.module:name, such as my_models:make_model.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the module raises
        raise ValueError(
            f"`{flag}` is {name!r}, but the module {module} cannot be imported from {Path(here).name or here} or the "
            f"installed packages: {type(error).__name__}: {error}"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"`{flag}` is {name!r}, but {found.__name__} has no {part!r}.")
        found = getattr(found, part)
    return found
