"""Processes find each other, and everything in which they differ is named."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from messages import naming

import gtp_jax
from gtp_jax.runner._exit_codes import MISTAKE, RETRY, of_error
from gtp_jax.runner.data import BYTES, Corpus
from gtp_jax.runner.flags import flag_of, from_settings, knobs, settings_of
from gtp_jax.runner.launch import Launch, NoCoordinator
from gtp_jax.runner.trainer import RunDirectory, TrainConfig, _agreement
from gtp_jax.runner.trainer._agreement import check_shared, differences
from gtp_jax.runner.trainer._description import describe
from gtp_jax.runner.trainer._peers import Peers, several

OWN = {"--chat-template", "--out", "--data", "--tokenizer", "--from", "--eval-data"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(launches: list[Launch], body, timeout_s: float = 20) -> list[Any]:
    """What each process returns or raises, played by a thread with sockets of its own."""
    results: list[Any] = [None] * len(launches)

    def play(i: int) -> None:
        try:
            with Peers(dataclasses.replace(launches[i], join_timeout_s=timeout_s)) as peers:
                results[i] = body(peers, launches[i].process)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=play, args=(i,)) for i in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def launches(*numbers: int, processes: int | None = None) -> list[Launch]:
    address = f"127.0.0.1:{free_port()}"
    return [Launch(processes or len(numbers), number, address) for number in numbers]


def description(**changes: Any) -> dict[str, Any]:
    corpus = Corpus("text", BYTES, ())
    return describe(from_settings(TrainConfig, changes), corpus, resume=False, force=False, at=None, order={})


def test_process_0_decides_by_what_all_say_as_often_as_asked():
    def body(peers: Peers, process: int):
        return [peers.ask(process, sum), peers.ask([process], lambda every: every[::-1])]

    assert run(launches(2, 0, 3, 1), body) == [[6, [[3], [2], [1], [0]]]] * 4


def test_every_setting_is_compared_but_for_paths_whose_contents_are():
    described = description()
    flags = {flag_of(field) for field in knobs(TrainConfig)}
    assert flags - described.keys() == OWN
    assert {
        "what is in the text",
        "what is in the tokenizer",
        "what is in the chat template",
        "what is in --from",
    } < described.keys()
    for name in ("code of gtp_jax", "version of jaxlib", "version of flax", "XLA_FLAGS", "jax_enable_x64"):
        assert described[name] is not None
    json.dumps(described)
    assert settings_of(TrainConfig())["seed"] == described["--seed"]


def test_all_that_differs_is_named_once_with_who_has_it():
    same, other = description(), description(seed=7, lr=0.5, out="elsewhere", recipe="mxfp8")
    assert differences([same, same]) == []
    lines = differences([same, other, same, other])
    assert sorted(line.split(":")[0].strip() for line in lines) == ["--lr", "--recipe", "--seed"]
    assert "  --seed: 0 in processes 0, 2; 7 in processes 1, 3" in lines
    assert several("process", range(12)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"
    long = [{"flags": ["-" * 90 + str(i)]} for i in range(2)]
    assert len(differences(long)) == 1 and len(differences(long)[0]) < 200


def test_environment_and_kind_of_a_missing_field_are_compared(monkeypatch):
    before = description()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/mine --xla_gpu_autotune_level=0")
    [line] = differences([before, description()])
    assert "XLA_FLAGS" in line and "--xla_gpu_autotune_level=0" in line and "/mine" not in line
    assert differences([{"a": 1}, {}]) == ["  a: 1 in process 0; null in process 1"]


def test_two_processes_with_one_number_are_told_at_once():
    began = time.monotonic()
    raised = run(launches(0, 1, 1, processes=3), lambda *_: None, timeout_s=5)
    for error in raised:
        assert re.search(naming("two processes --process-id 1"), str(error)), raised
        assert of_error(error) == MISTAKE
    assert time.monotonic() - began < 4


def test_other_count_of_processes_is_refused():
    first, second = launches(0, 1)
    raised = run([first, dataclasses.replace(second, processes=3)], lambda *_: None)
    for error in raised:
        assert re.search(naming("--num-processes 2 process 0 3 process 1"), str(error))


def test_process_that_does_not_come_is_named():
    raised = run(launches(0, 2, processes=4), lambda *_: None, timeout_s=1)
    for error in raised:
        named = naming("processes 1, 3 process 0 127.0.0.1: 1 s --coordinator --join-timeout")
        assert re.search(named, str(error)) and of_error(error) == RETRY
    [alone] = run(launches(1, processes=2), lambda *_: None, timeout_s=1)
    named = naming("process 1 of 2 process 0 127.0.0.1: refused 1 s --join-timeout")
    assert re.search(named, str(alone)) and of_error(alone) == RETRY


@pytest.mark.full
def test_process_that_ends_is_named():
    def body(peers: Peers, process: int):
        if process == 1:
            raise KeyError("a mistake of ours")
        return peers.ask(None, len)

    raised = run(launches(0, 1, 2), body)
    assert re.search(naming("process 1 ended"), str(raised[0]))
    assert of_error(raised[0]) == of_error(raised[1])  # launchers look at any of them
    assert isinstance(raised[2], NoCoordinator)


@pytest.mark.full
def test_process_that_says_nothing_is_named():
    said = threading.Event()

    def body(peers: Peers, process: int):
        if process == 1:
            return said.wait(10)
        try:
            return peers.ask(None, len, timeout_s=0.3)
        finally:
            if process == 0:  # process 2 may give up earlier, and process 1 must not end before 0 has asked
                said.set()

    raised = run(launches(0, 1, 2), body)
    assert re.search(naming("process 1 answer"), str(raised[0])) and of_error(raised[0]) == RETRY
    assert isinstance(raised[2], NoCoordinator)  # process 0 did not answer either, or has ended


def test_directories_that_are_not_one_are_named_and_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("gtp_jax.runner.trainer._agreement._SHARED_WITHIN_S", 0.3)

    def body(*roots: str):
        return lambda peers, process: check_shared(peers, RunDirectory(tmp_path / roots[process]))

    assert run(launches(0, 1), body("one", "one")) == [None, None]
    for error in run(launches(0, 1, 2), body("one", "one", "two")):
        assert re.search(naming(f"`out` {tmp_path} not shared process 2 --out"), str(error))
    assert list((tmp_path / "one").iterdir()) == []
    (tmp_path / "file").touch()
    for error in run(launches(0, 1), body("file/run", "file/run")):
        assert re.search(naming(f"process 0 `out` {tmp_path}/file/run [Errno 20]"), str(error))


def test_all_refuse_what_one_refuses():
    def body(peers: Peers, process: int):
        def check() -> int:
            if process == 1:
                raise FileNotFoundError("no such text")
            return process

        return peers.together(check)

    raised = run(launches(0, 1, 2), body)
    assert str(raised[0]) == str(raised[2]) and re.search(naming("process 1 refused"), str(raised[0]))
    assert isinstance(raised[1], FileNotFoundError)


def test_processes_agree_on_the_code_and_the_kernels_of_the_whole_package(monkeypatch):
    package = Path(gtp_jax.__file__).parent
    seen = []
    monkeypatch.setattr(_agreement, "digest", lambda *files, root: seen.append((root, set(files))))
    _agreement.software()
    (root, code), (_, kernels) = seen
    assert root == package and {package / "__init__.py", package / "ops" / "__init__.py"} <= code
    assert kernels == set((package / "native").glob("*.so"))
