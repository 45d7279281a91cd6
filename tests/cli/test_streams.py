"""A command whose standard streams are closed or full does its work, or says why not, and its status is right."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner._exit_codes import DONE, MISTAKE, RETRY, of_signal
from gtp_jax.runner.cli._streams import open_closed_streams
from gtp_jax.runner.trainer import read_log

# Files that a command opens must not get the numbers of closed streams.
NUMBERS = """
import os, sys
from gtp_jax.runner.cli._streams import open_closed_streams
from gtp_jax.runner.trainer import read_log
open_closed_streams()
with open(sys.argv[1], "w") as file:
    assert file.fileno() > 2, file.fileno()
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
os.write(2, b"from a native library")
assert sys.stdin.read() == ""
"""


def shell(line: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a line of a shell, in which `$0` is Python, with buffered streams, and `$1` the first argument."""
    command = ["sh", "-c", line, sys.executable, *map(str, arguments)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=buffered)


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path):
    for closed in ("<&- >&- 2>&-", "</dev/null >&-", "<&- 2>&-"):
        done = shell(f'"$0" -c "$1" "$2" {closed}', NUMBERS, tmp_path / "file")
        assert done.returncode == 0, (closed, done)
        assert (tmp_path / "file").read_bytes() == b""
    before = sys.stdin, sys.stdout, sys.stderr
    open_closed_streams()  # changes nothing where all are open
    assert (sys.stdin, sys.stdout, sys.stderr) == before


@pytest.mark.parametrize(
    ("streams", "status", "said"),
    [
        pytest.param(">&-", DONE, "", marks=pytest.mark.full),
        (">/dev/full", RETRY, "standard output"),
        pytest.param(">&- 2>&- <&-", DONE, "", marks=pytest.mark.full),
        pytest.param("2>/dev/full", DONE, "", marks=pytest.mark.full),
    ],
)
def test_the_status_of_a_command_does_not_depend_on_who_reads_what_it_prints(streams, status, said):
    done = shell(f'"$0" -m gtp_jax plan-faults --tp 8 --failed-devices 3 {streams}')
    assert done.returncode == status and said in done.stderr and "Traceback" not in done.stderr, done


@pytest.mark.full
def test_a_mistake_has_its_status_where_nobody_reads_of_it():
    assert shell('"$0" -m gtp_jax checkpoint list /nowhere 2>/dev/full').returncode == MISTAKE


@pytest.mark.full
def test_a_run_trains_and_saves_without_standard_streams(tmp_path):
    (tmp_path / "text.txt").write_text("a b c d e f g h\n" * 4000)
    flags = "--num-layers=1 --steps=2 --seq=32 --batch=8 --eval-every=2 --eval-batches=1 --gtp=1 --sample-tokens=4"
    done = shell(
        f'"$0" -m gtp_jax train --data "$1" --out "$2" {flags} >&- 2>&-', tmp_path / "text.txt", tmp_path / "run"
    )
    assert done.returncode == DONE and Path(tmp_path / "run/checkpoints/2").is_dir()
    assert done.stdout == done.stderr == ""
    assert '"step": 2' in (tmp_path / "run/log.jsonl").read_text()
    generated = shell('"$0" -m gtp_jax generate "$1" --prompt a --max-new-tokens 2 >&-', tmp_path / "run")
    assert generated.returncode == DONE


@pytest.mark.full
@pytest.mark.parametrize("streams", ["| head -n 12", "2>&1 | head -n 20"])
def test_a_run_whose_output_breaks_off_saves_its_last_step(tmp_path, streams):
    (tmp_path / "text.txt").write_text("a b c d e f g h\n" * 4000)
    flags = "--num-layers=1 --steps=2000 --seq=32 --batch=8 --eval-every=1 --eval-batches=1 --gtp=1 --sample-tokens=0"
    line = f'{{ "$0" -m gtp_jax train --data "$1" --out "$2" {flags}; echo $? >"$2/status"; }} {streams}'
    shell(line, tmp_path / "text.txt", tmp_path / "run")
    assert int((tmp_path / "run/status").read_text()) == of_signal(signal.SIGPIPE)
    last = max(record["step"] for record in read_log(tmp_path / "run/log.jsonl"))
    assert last < 2000 and Checkpoints(tmp_path / "run/checkpoints", read_only=True).latest() == last
