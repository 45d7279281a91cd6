"""Mistakes are refused with one clear line and status 2, before anything is compiled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import pytest

from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import EventLog, Lock, RunDirectory, TrainConfig

from .runs import WORDS, small, write_text
from .test_origin_kept import tokenizer
from .test_resume_from import damage

_compiled: list[str] = []


def _note_program(event: str, duration: float, *, fun_name: str = "", **_: object) -> None:
    """Notes the programs that are compiled, except for those of digests, which a restore needs."""
    if "backend_compile" in event and "sums" not in fun_name:
        _compiled.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_note_program)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    jax.devices()  # started here with its 8 devices, which no run below may change
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run_of_three_steps(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    _compiled.clear()
    assert main(["train", *small(text, out, steps=3, save_every=1)]) == 0
    assert _compiled  # so that the listener is known to listen
    return out


def contents(folder: Path) -> dict[Path, bytes]:
    """All files there, except for the record, to which a refused attempt to go on is added."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "events.jsonl"}


def refused(capsys, *flags: str) -> str:
    """The message with which a run is refused."""
    _compiled.clear()
    capsys.readouterr()
    assert main(["train", *flags]) == 2
    printed = capsys.readouterr()
    assert not _compiled
    assert printed.out == ""
    assert printed.err.startswith("gtp-jax train: error: ")
    assert "Traceback" not in printed.err
    return printed.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(preset="8B"), "unknown `preset` '8B'; the known presets are tiny, 100m, 1b, "),
        (dict(preset="8B"), "Did you mean '8b'?\n"),
        (dict(preset="zzz"), "70b, 70b-3.1, 405b.\n"),
        (dict(steps=0), "`steps` is 0; it must be a whole number of at least 1."),  # noqa: E501
        (dict(tp=-1), "`tp` is -1; it must be a whole number of at least 1."),
        (dict(lr=0), "`lr` is 0.0; it must be a number above 0, at most 3.402823e+38."),
        (dict(lr="nan"), "`lr` is nan; it must be a number above 0, at most 3.402823e+38."),
        (dict(weight_decay=-1), "`weight_decay` is -1.0; it must be a number of at least 0."),
        (dict(warmup=8), "`warmup` is 8; it must be at least 0 and less than `steps`, 8."),
        (dict(unroll=0), "`unroll` is 0; it must be a number of layers, at least 1, or 'full'."),
        (dict(gtp=3), "dp 1 x gtp 3 x tp 1 = 3, but there are 8 devices. Choose degrees"),
        (dict(dp=3), "but there are 8 devices"),
        (dict(tp=8), "tp 8 exceeds the number of key-value heads, 4 (8 query heads)"),
        (dict(gtp=4, tp=2, seq=33), "`seq` is 33, which tp 2 does not divide"),
        (dict(batch=6), "`batch` is 6, which is not divisible by dp * gtp * microbatches = 1 * 4 * 1 = 4. Take 4"),
        (dict(microbatches=4), "`batch` is 8, which is not divisible by dp * gtp * microbatches = 1 * 4 * 4 = 16."),
        (dict(core_tp=3, min_tp=2), "--min-tp, --core-tp: this applies only to a run with failed devices. Add --fail"),
        (dict(data="/nowhere"), "`data` /nowhere does not exist. Give a file, or a directory of files."),
        (dict(data="/proc/self/mem"), "`data` /proc/self/mem cannot be read: "),  # noqa: E501
        (dict(seq=20_000), "to train on, but one batch of 8 sequences of 20000 needs 160001. Give more text"),
        (dict(tokenizer="/nowhere.json"), "`tokenizer` /nowhere.json is not a file."),
        (dict(local_devices=0), "--local-devices is 0; it must be at least 1."),
        (dict(num_processes=0), "--num-processes is 0; it must be at least 1."),
        (dict(join_timeout=0), "--join-timeout is 0; it must be a number of seconds above 0."),
        (dict(num_processes=2), "--coordinator and --process-id missing: a run of several processes needs all of"),
        (
            dict(coordinator="h:1", num_processes=2, process_id=2),
            "--process-id is 2; with --num-processes 2, it must be",
        ),
        (dict(coordinator="h", num_processes=2, process_id=0), "--coordinator is 'h'; it must be HOST:PORT"),
    ],  # noqa: E501
)
def test_mistake_is_named(changes, message, text, tmp_path, capsys):
    out = tmp_path / "run"
    assert message in refused(capsys, *small(text, out, **changes))
    assert not out.exists()


def test_empty_text_is_named(text, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    message = refused(capsys, *small(tmp_path / "empty", tmp_path / "run"))
    assert "empty: the directory holds no UTF-8 text (0 files read" in message


def test_another_run_is_not_overwritten_unless_told(run_of_three_steps, text, capsys):
    before = (run_of_three_steps / "log.jsonl").read_text()
    message = refused(capsys, *small(text, run_of_three_steps))
    assert "already holds a run. Continue it (--resume), replace it (--force), or choose another --out." in message
    refused(capsys, *small("/nowhere", run_of_three_steps), "--force")  # a mistake elsewhere must not cost the old run
    assert (run_of_three_steps / "log.jsonl").read_text() == before


def test_a_text_that_is_the_directory_to_write_to_is_named(text, capsys):
    before = sorted(text.iterdir())
    assert f"`data` {text} is also `out`, so the run would train on" in refused(capsys, *small(text, text))
    assert sorted(text.iterdir()) == before


def test_nothing_to_resume_is_said(text, tmp_path, capsys):
    assert f"there is no run in {tmp_path} to resume." in refused(capsys, f"--out={tmp_path}", "--resume")


def test_output_that_is_a_file_is_named(text, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "file is a file. Choose a directory." in refused(capsys, *small(text, tmp_path / "file"))


def test_checkpoint_of_another_model_is_named(run_of_three_steps, capsys):
    _compiled.clear()
    assert main(["train", f"--out={run_of_three_steps}", "--resume", "--preset=100m"]) == 2
    message = capsys.readouterr().err
    assert "a resumed run keeps its model, and these contradict it:\n  its hidden_size is 128, not 1024\n" in message
    assert "\nRemove --preset, or start another run" in message
    assert not _compiled
    assert TrainConfig.load(run_of_three_steps / "config.json").preset == "tiny"


def test_changed_text_is_not_resumed_on(run_of_three_steps, tmp_path, capsys):
    other = write_text(tmp_path / "other", documents=41)
    before = TrainConfig.load(run_of_three_steps / "config.json")
    assert main(["train", f"--out={run_of_three_steps}", "--resume", f"--data={other}"]) == 2
    message = "differ from those that this run was trained on: the content of the text or of the tokenizer has changed"
    assert f"by the tokenizer bytes {message}, or --data or --tokenizer" in capsys.readouterr().err
    assert TrainConfig.load(run_of_three_steps / "config.json") == before


@pytest.mark.parametrize("ids", [30, 300], ids=["that the model has rows for", "beyond the model"])
def test_another_tokenizer_is_named_where_a_run_is_resumed_or_replayed(run_of_three_steps, tmp_path, capsys, ids):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer([*WORDS, "?", *(f"unused{i}" for i in range(ids - len(WORDS) - 1))]))
    out = tmp_path / "run"
    shutil.copytree(run_of_three_steps, out)
    _compiled.clear()
    assert main(["train", f"--out={out}", "--resume", f"--tokenizer={path}"]) == 2
    message = (
        "by the tokenizer tokenizer.json differ from those that this run was trained on: the content of the text or of"
    )
    assert (
        f"{message} the tokenizer has changed, or --data or --tokenizer names another one. Res"
        in capsys.readouterr().err
    )
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "tokenizer": str(path)}))
    assert main(["replay", f"--out={out}"]) == 2
    assert f"{message} the tokenizer has changed. Restore both." in capsys.readouterr().err
    assert not _compiled


def test_damaged_configuration_is_named(run_of_three_steps, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"preset": "tiny", "unknown": 1}')
    message = refused(capsys, f"--out={tmp_path}", "--resume")
    assert "config.json is not the configuration of a run" in message


def test_a_directory_of_something_else_is_left_alone(text, tmp_path, capsys):
    (tmp_path / "checkpoints/mine").mkdir(parents=True)
    (tmp_path / "checkpoints/mine/weights").write_text("precious")
    for flags in ((), ("--force",), ("--resume",)):
        message = refused(capsys, *small(text, tmp_path), *flags)
        assert "holds checkpoints, which no run of gtp-jax has written. Choose an empty or new" in message
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for flags in ((), ("--force",), ("--resume",)):
        assert "config.json is not the configuration of a run" in refused(capsys, *small(text, tmp_path), *flags)
    assert (tmp_path / "checkpoints/mine/weights").read_text() == "precious"


@pytest.mark.parametrize(
    "name",
    ["config.json.new", "log.jsonl", "loss.png", "report.txt", "checkpoints.deleted/", "lock", "lock/", "events.jsonl",
     "elastic/"],
)  # fmt: skip
def test_what_a_run_would_write_or_delete_is_left_alone_where_no_run_has_written_it(name, text, tmp_path, capsys):
    out = tmp_path / "run"
    file = out / name / "notes" if name.endswith("/") else out / name
    file.parent.mkdir(parents=True)
    file.write_text('{"time": 1, "event": "mine"}\n')
    for flags in ((), ("--force",), ("--resume",), ("--elastic",)):
        said = refused(capsys, *small(text, out), *flags)
        assert f"{out} holds {name.rstrip('/')}, which no run of gtp-jax has written. Choose an empty or" in said
    assert [path for path in out.rglob("*") if path.is_file()] == [file]
    assert file.read_text() == '{"time": 1, "event": "mine"}\n'


def test_a_link_in_the_place_of_a_file_of_a_run_is_left_alone(text, tmp_path, capsys):
    for name in ("config.json", "log.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    assert "holds config.json, log.jsonl, which no run of gtp-jax has" in refused(capsys, *small(text, tmp_path))


def test_what_a_start_leaves_that_was_killed_before_its_run_began_hinders_no_other(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.compiled.mkdir(parents=True)
    (directory.compiled / "program").touch()
    (directory.elastic / "rejoin.1").touch()
    EventLog(directory.events).write("start", devices=["GPU 0"], degrees={"gtp": 1})
    TrainConfig().save(tmp_path / "config.json.new")
    Lock(directory.lock).acquire()
    directory.check(resume=False, force=False)


def test_fewer_steps_than_were_made_are_refused(run_of_three_steps, capsys):
    assert main(["train", f"--out={run_of_three_steps}", "--resume", "--steps=1"]) == 2
    assert "`steps` is 1, but the run in" in capsys.readouterr().err
    assert TrainConfig.load(run_of_three_steps / "config.json").steps == 3


AHEAD = ["--pregathered-layers=99"]  # refused where the step is traced
NO_CODES = "`pregathered_layers` is 99, but no layers of a `Stack` are sent as codes"


@pytest.mark.parametrize(("flags", "message"), [(["--steps=1"], "`steps` is 1, but the run in"), (AHEAD, NO_CODES)])
def test_a_mistake_in_the_arguments_of_a_resumed_run_changes_nothing(
    flags, message, run_of_three_steps, tmp_path, capsys
):
    out = shutil.copytree(run_of_three_steps, tmp_path / "run")
    before = contents(out)
    assert main(["train", f"--out={out}", "--resume", "--step=2", *flags]) == 2
    assert message in capsys.readouterr().err
    assert contents(out) == before


def test_a_start_that_is_refused_before_its_first_step_leaves_the_directory_as_it_was(
    run_of_three_steps, text, tmp_path, capsys
):
    out, source = tmp_path / "run", shutil.copytree(run_of_three_steps / "checkpoints", tmp_path / "source")
    damage(source / "3")
    for flags, message in ((AHEAD, NO_CODES), ([f"--from={source}", "--tokenizer=bytes"], "3 is damaged:")):
        assert main(["train", *small(text, out), *flags]) == 2
        assert message in capsys.readouterr().err
        assert not list(out.iterdir())
    shutil.copytree(run_of_three_steps, out, dirs_exist_ok=True)
    before, record = contents(out), (out / "events.jsonl").read_bytes()
    assert main(["train", *small(text, out), "--force", *AHEAD]) == 2  # a mistake must not cost the old run
    assert NO_CODES in capsys.readouterr().err
    assert contents(out) == before and (out / "events.jsonl").read_bytes() == record


def test_traceback_is_shown_when_asked_for(text, tmp_path):
    with pytest.raises(ValueError, match="unknown `preset`"):
        main(["--traceback", "train", *small(text, tmp_path / "run", preset="x")])


def test_words_where_numbers_belong_are_refused_by_the_parser(text, tmp_path, capsys):
    for flag in ("steps", "unroll"):
        with pytest.raises(SystemExit, match="2"):
            main(["train", f"--{flag}=many"])
        assert f"argument --{flag}: " in capsys.readouterr().err
