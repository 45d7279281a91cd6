"""The part of a task that comes from the settings of `gtp-jax train`: its directory, its text, its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...mesh import choose_devices
from ..data import Corpus
from ..flags import Faults, from_settings, knobs, settings_of
from ..launch import Launch
from ._agreement import Description
from ._corpus import read_corpus
from ._description import describe
from ._directory import RunDirectory
from ._start import check_same_adapters, check_same_model, check_same_optimizer, started_from
from ._task import Begin, Task
from ._tracker import check_trackers
from ._train_flags import TrainConfig
from ._watch import Supervision, Watch


class SettingsTask(Task):
    """A task that settings describe.

    Args:
        given: the fields of `TrainConfig` and of its pieces, by name. A resumed run keeps its earlier values of fields
            that are not given.

    Attributes:
        config: the configuration of the run; known once `resolve` has returned.
        corpus: the text, if there is one; known once `read` has returned.
    """

    config: TrainConfig
    corpus: Corpus

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self.out = given.get("out", TrainConfig.out)

    def resolve(self, begin: Begin) -> tuple[RunDirectory, list[str]]:
        """Checks the settings and the directory; see `Task`."""
        config, directory, changes = resolve(self._given, resume=begin.resume, force=begin.force)
        self.config = self.limits = config
        return directory, changes

    @property
    def settings(self) -> Mapping[str, Any]:
        """All settings by name."""
        return settings_of(self.config)

    @property
    def seeds(self) -> Mapping[str, int]:
        """The seeds of the run: all are the one of the configuration."""
        return dict.fromkeys(("weights", "data", "rounding"), self.config.seed)

    def read(self, launch: Launch, watch: Watch, begin: Begin) -> None:
        """Chooses devices, and reads the text; see `Task`."""
        total = self.config.virtual_devices(launch.processes)
        choose_devices(total, processes=launch.processes, local=launch.local_devices)
        watch.doing("check")
        if self.config.dataset is None:
            self.corpus = read_corpus(self.config, resume=begin.resume)

    def describe(self, begin: Begin, supervision: Supervision | None) -> Description:
        """Returns everything that must be the same in all processes; see `Task`."""
        corpus = self.corpus if self.config.dataset is None else None
        order = {} if supervision is None else supervision.order
        return describe(self.config, corpus, resume=begin.resume, force=begin.force, at=begin.at, order=order)


def resolve(settings: Mapping[str, Any], *, resume: bool, force: bool) -> tuple[TrainConfig, RunDirectory, list[str]]:
    """Returns the configuration of a run, its directory, and the changes of a resumed run's configuration.

    Raises:
        ValueError: if a setting is invalid, or the directory does not allow such a run.
    """
    out = settings.get("out", TrainConfig.out)
    directory = RunDirectory.checked(out, resume=resume, force=force)
    changes: list[str] = []
    if resume:
        before = TrainConfig.load(directory.config)
        if settings.get("from_", before.from_) != before.from_:
            raise ValueError(
                "`from` applies only to a new run; a resumed run has its own parameters. Remove --from or --resume."
            )
        config = from_settings(TrainConfig, {**settings_of(before), **settings, "out": out})
        check_same_model(before, config, settings)
        check_same_optimizer(before, config)
        check_same_adapters(before, config)
        changes = config.changes(before)
    else:
        config = from_settings(TrainConfig, started_from(settings))
    check_trackers(config.log_to)
    if not config.faults.any:
        names = {field.name for field in knobs(Faults)}
        from_settings(Faults, {name: settings[name] for name in names & settings.keys()}).check_healthy()
    return config, directory, changes
