"""Compiled programs are kept for later runs on GPUs, and no folder that they are kept in breaks a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from messages import naming
from trainer.runs import finish, small, start, write_text

from gtp_jax.runner import _compiled
from gtp_jax.runner._compiled import keep_compiled
from gtp_jax.runner.trainer import read_log

# Compiles a program on a single CPU device, which is taken for a GPU; the argument limits the size of a file, in bytes.
PROGRAM = """
import json, resource, sys
import jax
import jax.numpy as jnp
from gtp_jax.runner import _compiled

_compiled.on_gpu = lambda: True
said, events = _compiled.keep_compiled(), []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name.removeprefix("/jax/compilation_cache/")))
if limit := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
value = float(jax.jit(lambda x: jnp.sin(x @ x).sum())(jnp.ones((8, 8))))
hits, asked = events.count("cache_hits"), events.count("compile_requests_use_cache")
most = jax.config.jax_compilation_cache_max_size
print(json.dumps(dict(said=said, value=value, hits=hits, asked=asked, most=most)))
"""


def begin(home: Path | str, limit: int = 0, **variables: str) -> subprocess.Popen[str]:
    """Starts the program, with its cache in a folder of `home`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment = {**own, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home), **variables}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    command = [sys.executable, "-c", PROGRAM, str(limit)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(program: subprocess.Popen[str]) -> SimpleNamespace:
    """Returns what a program printed: `asked` is how many programs it asked the cache for, `hits` how many it got."""
    printed, errors = program.communicate(timeout=120)
    assert program.returncode == 0, errors
    return SimpleNamespace(**json.loads(printed))


@pytest.fixture(scope="module")
def value(tmp_path_factory) -> float:
    """The result without a cache."""
    home = tmp_path_factory.mktemp("none")
    found = end(begin(home, JAX_ENABLE_COMPILATION_CACHE="false"))
    assert (found.said, found.hits, found.asked) == ("", 0, 0) and not list(home.iterdir())
    return found.value


def test_a_second_run_compiles_nothing_that_the_first_has_compiled(tmp_path, value):
    folder = tmp_path / "gtp_jax" / "compiled"
    first = end(begin(tmp_path))
    assert re.search(naming(f"{folder} JAX_ENABLE_COMPILATION_CACHE=false"), first.said)
    assert (first.value, first.hits, first.most) == (value, 0, 4 << 30) and first.asked > 0
    assert folder.stat().st_mode & 0o777 == 0o700
    second = end(begin(tmp_path))
    assert second.value == value and second.hits == second.asked == first.asked


@pytest.mark.full
def test_a_full_disk_and_what_is_half_written_then_break_no_run(tmp_path, value):
    assert end(begin(tmp_path, limit=100)).value == value
    assert any(file.stat().st_size == 100 for file in (tmp_path / "gtp_jax" / "compiled").iterdir())
    assert end(begin(tmp_path)).value == value


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """This process, as if it had GPUs, with the settings of JAX as they are by default."""
    monkeypatch.setattr(_compiled, "on_gpu", lambda: True)
    settings = SimpleNamespace(
        jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, jax_compilation_cache_max_size=-1
    )
    settings.update = lambda name, value: setattr(settings, name, value)
    monkeypatch.setattr(_compiled.jax, "config", settings)
    return settings


def test_a_folder_to_which_others_can_write_is_not_used(tmp_path, monkeypatch, as_on_a_gpu):
    """What it holds is run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (folder := tmp_path / "gtp_jax" / "compiled").mkdir(parents=True)
    for mode in (0o777, 0o770, 0o702):
        folder.chmod(mode)
        assert f"not kept: {folder} can be written by other users, who could put programs there" in keep_compiled()
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert f"not kept: {folder} belongs to another user" in keep_compiled()
    assert as_on_a_gpu.jax_compilation_cache_dir is None


def test_on_cpus_nothing_is_kept():
    """With several devices, programs from the cache have computed other results there."""
    assert keep_compiled() == "" and jax.config.jax_compilation_cache_dir is None  # pyright: ignore


@pytest.mark.gpu
@pytest.mark.slow
def test_a_run_with_kept_programs_has_the_bits_of_the_run_that_compiled_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    text, logs = write_text(tmp_path / "text"), []
    for name in ("first", "second"):
        printed = finish(start(small(text, tmp_path / name), gpus=os.environ.get("CUDA_VISIBLE_DEVICES", "0")))
        assert f"compiled programs are kept in {tmp_path}/cache/gtp_jax/compiled" in printed
        logs.append([entry["loss"] for entry in read_log(tmp_path / name / "log.jsonl") if "loss" in entry])
    assert logs[0] and logs[0] == logs[1]
