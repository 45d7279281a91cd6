"""A run over hosts equals one process, is not harmed by a short cut, and continues with the hosts that are left. A long
cut, a dead host, a partition, a full disk or the loss of process 0 end it within a minute, with the host named."""

from __future__ import annotations

import re
import signal
import time

import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.trainer._events import read_lines

from ..trainer.runs import logged, losses, small, train, write_text
from .hosts import Hosts, hosts

pytestmark = pytest.mark.slow

RETRY = 75
HOUR_S = 3600
# Words in messages about a host or a step that has trouble.
TROUBLE = ("no sign of life", "cannot go on", "slow: ", "suspended", "gtp recorder: ")
FLAGS = dict(gtp=2, dp=2, lr=1e-3, dtype="float32", save_every=2, eval_every=100_000)
FLAGS |= dict(hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1)


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


def check_ended(on: Hosts, out, *left: int, named: str, seconds: float = 60) -> None:
    """Checks that these hosts end soon, with a status that a scheduler acts on and one sentence that names a host, and
    that what they saved is whole."""
    assert on.wait(seconds, *left) == [RETRY] * len(left), [on.said(i)[-2000:] for i in left]
    latest = Checkpoints(out / "checkpoints", read_only=True).latest()
    assert latest is not None
    for host in left:
        last = on.said(host).split(f"gtp-jax: process {host} cannot go on: ")
        assert len(last) == 2, on.said(host)[-3000:]
        assert f" on {named}" in last[1].splitlines()[0], last[1]
        assert f"The last checkpoint is of step {latest}" in last[1]


def test_four_hosts_train_like_one_process_and_the_run_continues_on_two(text, tmp_path):
    flags = FLAGS | {"gtp": 4, "steps": 4, "eval_every": 2}
    train(small(text, tmp_path / "one", **flags))
    train([*small(text, tmp_path / "one", **flags | {"steps": 6}), "--resume"])
    with hosts(4, tmp_path / "four") as on:
        on.train(small(text, tmp_path / "run", **flags))
        assert on.wait(240) == [0] * 4, on.said(0)[-3000:]
    with hosts(2, tmp_path / "two") as on:
        on.train([*small(text, tmp_path / "run", **flags | {"gtp": 2, "steps": 6}), "--resume=auto"])
        assert on.wait(240) == [0] * 2, on.said(0)[-3000:]
    found, wanted = losses(tmp_path / "run"), losses(tmp_path / "one")
    assert found.keys() == wanted.keys() and (6, "loss") in found
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_link_that_is_cut_for_five_seconds_changes_nothing(text, tmp_path):
    flags = FLAGS | {"steps": 60}
    train(small(text, tmp_path / "one", **flags))
    with hosts(2, tmp_path / "two") as on:
        on.train(small(text, tmp_path / "run", **flags))
        on.until(lambda: logged(tmp_path / "run", 2))
        on.cut(1)
        time.sleep(5)
        on.mend(1)
        assert on.wait(240) == [0, 0], on.said(0)[-3000:]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.parametrize("what", ["late", "lossy", "narrow"])
def test_links_that_are_late_lossy_or_narrow_change_nothing(what, text, tmp_path):
    flags = FLAGS | {"steps": 20}
    with hosts(2, tmp_path / "two") as on:
        if what == "late":
            on.worsen("netem", "delay", "20ms", "5ms", "loss", "1%")
        elif what == "lossy":
            on.lose(3)
        else:
            on.worsen("tbf", "rate", "20mbit", "burst", "32kbit", "latency", "200ms")
        on.train(small(text, tmp_path / "run", **flags))
        assert on.wait(300) == [0, 0], on.said(0)[-3000:]
        assert what != "lossy" or min(on.lost(0), on.lost(1)) > 0
        said = on.said(0) + on.said(1)
        assert not [word for word in TROUBLE if word in said], said
    train(small(text, tmp_path / "one", **flags))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_clocks_that_differ_and_are_set_while_hosts_train_change_nothing(text, tmp_path):
    out, flags = tmp_path / "run", FLAGS | {"steps": 60}
    began = time.time()
    with hosts(2, tmp_path / "two") as on:
        on.set_clock(0, -HOUR_S)
        on.set_clock(1, HOUR_S)
        on.train(small(text, out, **flags | {"steps": 40}))
        on.until(lambda: logged(out, 10))
        on.set_clock(0, 2 * HOUR_S)
        on.set_clock(1, -2 * HOUR_S)
        assert on.wait(240) == [0, 0], on.said(0)[-3000:]
        said = [on.said(0), on.said(1)]
        on.set_clock(0, -HOUR_S)
        on.train([*small(text, out, **flags), "--resume=auto"])
        assert on.wait(240) == [0, 0], on.said(0)[-3000:]
        said = "".join([*said, on.said(0), on.said(1)])
    times = [event["time"] - began for event in read_lines(out / "events.jsonl")]
    assert min(times) < 0 and max(times) > HOUR_S, "the clock of host 0 was not set"
    assert not [word for word in TROUBLE if word in said], said
    assert not re.search(r"\[\d+:\d\d:\d\d<", said), "the progress says that the run took hours"
    train(small(text, tmp_path / "one", **flags | {"steps": 40}))
    train([*small(text, tmp_path / "one", **flags), "--resume"])
    assert losses(out) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.parametrize("what", ["cut", "kill", "coordinator"])
def test_a_host_that_is_gone_ends_the_other_which_names_it(what, text, tmp_path):
    out = tmp_path / "run"
    gone = 0 if what == "coordinator" else 1
    with hosts(2, tmp_path / "two") as on:
        on.train(small(text, out, **FLAGS | {"steps": 100_000}))
        on.until(lambda: logged(out, 4))
        if what == "cut":
            on.cut(gone)
        else:
            on.cut(gone)  # a host without power does not say goodbye
            on.kill(gone)
        check_ended(on, out, 1 - gone, named=on.names[gone])


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_hangs_is_named_with_the_layer_before_the_run_ends_even_if_steps_are_long(stopped, text, tmp_path):
    out, left = tmp_path / "run", 1 - stopped
    with hosts(2, tmp_path / "two") as on:
        on.set_clock(stopped, HOUR_S)
        on.worsen("tbf", "rate", "250kbit", "burst", "32kbit", "latency", "2s")
        on.train(small(text, out, **FLAGS | {"steps": 100_000, "eval_batches": 1}))
        on.until(lambda: logged(out, 3), 240)
        on.signal(stopped, signal.SIGSTOP)
        check_ended(on, out, left, named=on.names[stopped])
        said, names = on.said(left), on.names
    before, _, end = said.partition(f"process {left} cannot go on: ")
    assert before.count("gtp recorder: step ") == 1, said[-3000:]
    found = before.partition("gtp recorder: ")[2].splitlines()[0]
    usual_s = float(re.search(r"steps took (\S+) s before", found)[1])
    assert 3 * usual_s > 15, "at this duration, the recorder would have asked by itself"
    if stopped == 0:
        assert f"hangs: process 0 on {names[0]}, which holds JAX's coordinator, does not answer; process 1 on" in found
    else:
        assert f"hangs: process 1 on {names[1]} has given no sign of life for " in found, found
        assert re.search(f"process 0 on {names[0]} waits for it (in|after|at) ", found), found


def test_of_two_halves_that_lose_each_other_both_end_and_name_the_other(text, tmp_path):
    out = tmp_path / "run"
    with hosts(3, tmp_path / "three") as on:
        on.train(small(text, out, gtp=2, dp=3, batch=12, dtype="float32", steps=100_000, eval_every=100_000))
        on.until(lambda: logged(out, 4))
        on.cut(2)
        check_ended(on, out, 0, 1, named=on.names[2])
        check_ended(on, out, 2, named=on.names[0])


def test_a_full_disk_on_one_host_ends_the_run_and_is_named(text, tmp_path):
    out = tmp_path / "run"
    with hosts(2, tmp_path / "two") as on:
        on.train(small(text, out, **FLAGS | {"steps": 100_000}))
        on.until(lambda: logged(out, 4))
        on.within(1, "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(out / "checkpoints"))
        assert on.wait(60) == [RETRY, RETRY], on.said(0)[-3000:]
        assert "No space left on device" in on.said(1), on.said(1)[-3000:]
        assert f"process 1 on {on.names[1]}" in on.said(0), on.said(0)[-3000:]
    assert Checkpoints(out / "checkpoints", read_only=True).latest() is not None


def test_a_host_whose_name_is_not_known_yet_is_waited_for(text, tmp_path):
    with hosts(2, tmp_path / "two") as on:
        tables = [f"/etc/netns/{name}/hosts" for name in on.names]
        whole = [open(table).read() for table in tables]
        for table in tables:
            with open(table, "w") as file:
                file.write("127.0.0.1 localhost\n")
        on.train([*small(text, tmp_path / "run", **FLAGS | {"steps": 2}), "--join-timeout=120"])
        time.sleep(15)
        for table, known in zip(tables, whole, strict=True):
            with open(table, "w") as file:
                file.write(known)
        assert on.wait(120) == [0, 0], on.said(0)[-3000:]
