"""The directory of a run: its files, and who may write to it."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from ...checkpoint import Checkpoints, check_encodes, real_path
from ._config_file import PROGRAM, draft, is_config, read_config, write_config
from ._events import is_of_supervisor
from ._lock import is_lock
from ._own_file import stranger
from ._tracker import TRACKERS, delete_tracked

NOT_BEGUN = "Nothing was saved: the run had not begun."

# What the files in `RunDirectory.elastic` begin with that ask a supervisor to use a device again.
REJOIN = "rejoin."


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """The files of a run.

    Attributes:
        root: the directory, which all processes of a run share.
        replaced: when the configuration of the run to be replaced was written, in ns; 0 if there is none. Until this
            run has written its own, the directory holds the other run.
    """

    root: Path
    replaced: int = 0

    @classmethod
    def of(cls, out: str | Path) -> Self:
        """Returns the directory that `out` of a configuration names."""
        return cls(Path(out).expanduser().absolute())

    @classmethod
    def checked(cls, out: str | Path, *, resume: bool, force: bool) -> Self:
        """Returns the directory that `out` of a configuration names, for a run that may be started or resumed there.

        Raises:
            ValueError: if the directory does not allow such a run; see `check` and `check_writable`.
        """
        if not str(out):  # as of `--out "$UNSET"`; it would be the working directory
            raise ValueError("`out` is empty. Give a directory; the working directory is `.`.")
        directory = cls.of(out)
        directory.check(resume=resume, force=force)
        directory.check_writable()
        return directory if resume else directory.replacing()

    @classmethod
    def around(cls, source: Path) -> Self:
        """Returns the directory of the run that `source` names: itself, or its directory of checkpoints."""
        if (source / "checkpoints").is_dir():
            return cls.of(source)
        # an import may be inside the directory of a run, and is not of that run
        places = (source.absolute(), source.resolve())
        return cls.of(next((place.parent for place in places if place.name == "checkpoints"), source))

    def replacing(self) -> Self:
        """Returns this directory for a run that replaces the one in it."""
        return dataclasses.replace(self, replaced=_written_ns(self.config))

    @property
    def is_of_run(self) -> bool:
        """Whether a run of any version has written here."""
        return is_config(self.config)

    @property
    def config(self) -> Path:
        """The configuration, in JSON. A directory is that of a run if it has this file."""
        return self.root / "config.json"

    @property
    def log(self) -> Path:
        """The log, one JSON object per line."""
        return self.root / "log.jsonl"

    @property
    def curve(self) -> Path:
        """The picture of the loss curve."""
        return self.root / "loss.png"

    @property
    def report(self) -> Path:
        """The report that is printed at the end."""
        return self.root / "report.txt"

    @property
    def checkpoints(self) -> Path:
        """The directory of saved steps."""
        return self.root / "checkpoints"

    @property
    def lock(self) -> Path:
        """The lock, which says which run writes here; see `Lock`."""
        return self.root / "lock"

    @property
    def events(self) -> Path:
        """The record of the run, one JSON object per line; see `EventLog`."""
        return self.root / "events.jsonl"

    @property
    def elastic(self) -> Path:
        """The files of a supervisor: compiled programs and requests."""
        return self.root / "elastic"

    @property
    def compiled(self) -> Path:
        """The programs that a supervisor's processes have compiled."""
        return self.elastic / "compiled"

    @property
    def _doomed(self) -> Path:
        """The steps of a run that is being replaced, while they are deleted."""
        return self.root / "checkpoints.deleted"

    @property
    def _directories(self) -> set[Path]:
        """The directories in the table, and links to such; the other entries are regular files."""
        return {self.checkpoints, self._doomed, self.elastic, *(self.root / name for name in TRACKERS)}

    @property
    def _table(self) -> dict[Path, Callable[[Path], bool]]:
        """Everything that a run writes or deletes here.

        The function of each path returns whether the path may be left from a start that ended before it wrote its
        configuration.
        """
        return {
            self.config: _never,
            draft(self.config): is_config,
            self.log: _never,
            self.curve: _never,
            self.report: _never,
            self.checkpoints: _never,
            self._doomed: _never,
            self.lock: is_lock,
            self.events: is_of_supervisor,
            **{self.root / name: _never for name in TRACKERS},
            self.elastic: lambda path: (
                path.is_dir() and all(one == self.compiled or one.name.startswith(REJOIN) for one in path.iterdir())
            ),
        }

    def check(self, *, resume: bool, force: bool) -> None:
        """Checks that a run may be started or resumed here.

        Raises:
            ValueError: if there is a run but neither `resume` nor `force`; if `resume` but there is no run; or if a run
                would overwrite something else.
        """
        check_encodes(real_path(self.checkpoints))
        if self.root.exists() and not self.root.is_dir():
            raise ValueError(f"`out` {self.root} is a file. Choose a directory.")
        ours = self.config.exists()
        if ours:
            read_config(self.config)
        else:
            foreign = [path.name for path, known in self._table.items() if path.exists() and not known(path)]
            if foreign:
                raise ValueError(
                    f"{self.root} holds {', '.join(foreign)}, which no run of gtp-jax has written. Choose an empty "
                    "or new directory for --out."
                )
        self._check_kinds()
        if resume and not ours:
            raise ValueError(
                f"there is no run in {self.root} to resume. Remove --resume, or set --out to the directory of the run."
            )
        if resume:
            self._check_steps()
        if ours and force and self.checkpoints.is_symlink():
            raise ValueError(
                f"{self.checkpoints} is a link to {self.checkpoints.readlink()}, and --force deletes nothing outside "
                "--out, so the new run would take the old steps there for its own. Delete those steps and the link "
                "yourself, or choose another --out."
            )
        if ours and not (resume or force):
            raise ValueError(
                f"{self.root} already holds a run. Continue it (--resume), replace it (--force), or choose another "
                "--out."
            )

    def _check_kinds(self) -> None:
        """Refuses what no run has made: a link that leads out of the directory, a FIFO, or the wrong kind of file.

        Raises:
            ValueError: names the path, and what it is.
        """
        for path in self._table:
            directory = path in self._directories
            if (what := stranger(path, directory=directory)) is not None:
                raise ValueError(
                    f"{path} is {what}. A run needs a {'directory' if directory else 'regular file'} there, and writes "
                    f"nothing outside --out. Move it away, or choose another --out."
                )

    def _check_steps(self) -> None:
        """Refuses what has the number of a step and is no directory, because that step could not be saved.

        Raises:
            ValueError: names the path, and what it is.
        """
        for path in sorted(self.checkpoints.iterdir()) if self.checkpoints.exists() else ():
            if path.name.isdecimal() and (what := stranger(path, directory=True)) is not None:
                raise ValueError(
                    f"{path} is {what}, so step {path.name} could not be saved. Move it away, or choose another --out."
                )

    def check_writable(self) -> None:
        """Checks that a run may write here.

        Raises:
            ValueError: if the directory, or the nearest one above it that exists, cannot be written.
        """
        nearest = next(path for path in (self.root, *self.root.parents) if path.exists())
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(f"`out` is {self.root}, but {nearest} cannot be written. Choose another --out.")

    def prepare(self, settings: Mapping[str, Any], *, keep: bool) -> None:
        """Prepares the directory for a run. Call this only after all checks have passed.

        Args:
            settings: the settings of the run, by name.
            keep: whether the run in the directory is resumed. Otherwise, deletes what an earlier run wrote, and nothing
                else.

        Raises:
            OSError: if something cannot be deleted.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        if self.is_of_run and not keep:
            before = read_config(self.config)
            # Removes all steps first, in one rename, so that a kill leaves no old step with a new configuration.
            if self._doomed.is_symlink():
                self._doomed.unlink()
            elif self._doomed.exists():
                shutil.rmtree(self._doomed)
            if self.checkpoints.exists() and not self.checkpoints.is_symlink():
                self.checkpoints.rename(self._doomed)
                shutil.rmtree(self._doomed)
            for file in (self.log, self.curve, self.report, self.events):
                file.unlink(missing_ok=True)
            tracked = before.get("log_to")
            delete_tracked(tracked if isinstance(tracked, list) else (), self.root)
        write_config(self.config, settings)

    def how_to_resume(self) -> str:
        """Returns a message that names the last checkpoint, and the command that continues from it."""
        if not self.is_of_run or _written_ns(self.config) == self.replaced:
            return NOT_BEGUN
        command = f"gtp-jax train --resume --out {shlex.quote(str(self.root))}"
        try:
            if (program := read_config(self.config).get(PROGRAM)) is not None:
                command = f"`run(resume=True)` in {program}"
            latest = Checkpoints(self.checkpoints, read_only=True).latest()
        except (OSError, ValueError) as error:  # must not prevent a process from ending
            return f"{self.checkpoints} cannot be read now ({error}); continue with: {command}"
        if latest is None:
            return f"There is no checkpoint yet; start again from the beginning with: {command}"
        return f"The last checkpoint is of step {latest}, in {self.checkpoints}; continue with: {command}"


def _written_ns(path: Path) -> int:
    """Returns when a file was written, in ns; 0 if it cannot be read."""
    try:
        with path.open("rb") as file:  # so that a network file system asks its server
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _never(path: Path) -> bool:
    del path
    return False
