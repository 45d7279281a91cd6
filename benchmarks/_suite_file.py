"""Reads and writes the results file of a suite, and checks whether a run can continue from it here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import gtp_jax

from ._contenders import SCRIPTS

_WRITER = "gtp-jax bench suite"


@dataclasses.dataclass(frozen=True)
class Result:
    """One contender's process in one round.

    Attributes:
        workload: the workload's name.
        contender: the contender's name.
        round: the number of the round, from 0.
        machine: the machine that it ran on.
        flags: the flags of the contender's script.
        wall_s: the wall-clock seconds of the whole process.
        seconds: the seconds of each timed step; empty if the process failed.
        facts: what else the process reported, as in `Row`.
        failure: why there is no result; empty if there is one.
    """

    workload: str
    contender: str
    round: int
    machine: str
    flags: tuple[str, ...]
    wall_s: float
    seconds: tuple[float, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failure: str = ""


class SuiteFile:
    """The results of a suite, saved after each one.

    Attributes:
        results: all results so far, in the order in which they were measured.

    Raises:
        ValueError: if the file has results of another device, of other versions, or with other settings, or if
            `read_suite` raises an error. Raised by the constructor.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        summarize: Callable[[Sequence[Result]], Any] = lambda results: None,
    ) -> None:
        """Reads the file if it exists.

        Args:
            path: the file; `None` to keep the results only in memory.
            settings: what all results have in common, as returned by `settings_here`.
            summarize: returns the summary that is saved with the results, for readers of the file.
        """
        self._path, self._settings, self._summarize = path, json.loads(json.dumps(dict(settings))), summarize
        self.results: list[Result] = []
        if path is not None and path.exists():
            self.results = self._read(path)

    def add(self, result: Result) -> None:
        """Adds a result and replaces the file atomically, so that an interruption leaves the previous version."""
        self.results.append(result)
        if self._path is None:
            return
        saved = {
            "writer": _WRITER,
            **self._settings,
            "summary": self._summarize(self.results),
            "results": [dataclasses.asdict(r) for r in self.results],
        }
        beside = self._path.with_name(self._path.name + ".part")
        beside.write_text(json.dumps(saved, indent=1) + "\n")
        os.replace(beside, self._path)

    def drop(self, results: Iterable[Result]) -> None:
        """Removes these results. The file changes only when the next result is added."""
        gone = set(map(id, results))
        self.results = [result for result in self.results if id(result) not in gone]

    def _read(self, path: Path) -> list[Result]:
        saved = read_suite(path)
        then = {name: saved.get(name) for name in self._settings}
        differing = list(_differences(then, self._settings))
        if differing:
            raise ValueError(
                f"{path} has results that this run cannot continue: {'; '.join(differing)}. Use another file to start "
                "again, or continue in the environment that wrote it."
            )
        return [Result(**{**r, "flags": tuple(r["flags"]), "seconds": tuple(r["seconds"])}) for r in saved["results"]]


def read_suite(path: Path) -> dict[str, Any]:
    """Returns the content of a suite's file.

    Raises:
        ValueError: if the file is truncated or damaged, or was not written by `gtp-jax bench suite`.
        OSError: if the file cannot be read.
    """
    try:
        saved = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is not complete JSON and may be truncated: {error}. Copy it again, or use another file."
        ) from None
    if not isinstance(saved, dict) or saved.get("writer") != _WRITER:
        raise ValueError(f"{path} was not written by `{_WRITER}`. Use another file.")
    return saved


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterable[str]:
    for name, value in now.items():
        was = then.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            yield from _differences(was, value, f"{within}{name} ")
        elif was != value:
            yield f"{within}{name} is {was} there, {value} here"


def settings_here(device: str, torch_python: str, *, steps: int | None) -> dict[str, Any]:
    """Returns what all results of a file have in common: the device, the versions and the number of steps.

    Args:
        device: the kind of the device, as returned by `probe`.
        torch_python: the interpreter that has PyTorch.
        steps: the number of steps timed per round; `None` for the number in the table.
    """
    versions = {"gtp_jax": gtp_jax.__version__, "jax": metadata.version("jax"), "source": _source()}
    return {"device": device, "versions": {**versions, **_torch(torch_python)}, "steps": steps}


def this_machine(is_gpu: bool) -> str:
    """Returns a name for this machine: the UUIDs of its GPUs or, without GPUs or nvidia-smi, its host name."""
    if is_gpu:
        try:
            ask = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
            done = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=60)
            return " ".join(done.stdout.split())
        except (OSError, subprocess.SubprocessError):
            pass
    return platform.node()


def _torch(python: str) -> dict[str, str | None]:
    ask = (
        "import json\nfrom importlib import metadata\nfound = {}\n"
        "for name in ('torch', 'torchao'):\n"
        "    try: found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError: found[name] = None\n"
        "print(json.dumps(found))"
    )
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True, timeout=60)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return {"torch": None, "torchao": None}


def _source() -> str:
    """Returns a digest of the Python source that contenders run: the package without its commands, and the scripts."""
    package, digest = Path(gtp_jax.__file__).parent, hashlib.sha256()
    commands = package / "runner" / "cli"
    for root in (package, SCRIPTS):
        for path in sorted(root.rglob("*.py")):
            if not path.is_relative_to(commands):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
