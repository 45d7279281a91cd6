"""`train --config` reads what `--save-config` writes, and refuses what no flag takes."""

from __future__ import annotations

import argparse
import json

import jax
import pytest
from trainer.runs import read_records, refused, small

from gtp_jax.runner.cli import main
from gtp_jax.runner.cli._main import parser
from gtp_jax.runner.elastic import ElasticOptions
from gtp_jax.runner.flags import from_settings, knobs, read_settings, settings_of, write_settings
from gtp_jax.runner.launch import LaunchOptions
from gtp_jax.runner.trainer import TrainConfig

jax.devices()  # fixes the number of devices to what the suite runs with

EVERY = [field for kind in (TrainConfig, ElasticOptions, LaunchOptions) for field in knobs(kind)]
SIZES = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32)


def written(folder, text: str):
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def saved(text, tmp_path_factory):
    """A run of two steps, and the file of its settings."""
    root = tmp_path_factory.mktemp("saved")
    flags = small(text, root / "run", steps=2, seq=16, lr=1e-3, **SIZES)
    assert main(["train", *flags, f"--save-config={root / 'run.yaml'}"]) == 0
    return root


@pytest.mark.full
def test_a_saved_file_gives_the_same_run(saved, tmp_path):
    assert main(["train", f"--config={saved / 'run.yaml'}", f"--out={tmp_path}"]) == 0
    assert read_records(tmp_path) == read_records(saved / "run") and len(read_records(tmp_path)) > 1
    assert read_settings(saved / "run.yaml", EVERY) == read_settings(saved / "run" / "config.json", EVERY)


@pytest.mark.full
def test_a_flag_takes_the_place_of_the_files_and_a_resumed_run_takes_both(saved, tmp_path, capsys):
    flags = [f"--config={saved / 'run.yaml'}", f"--out={tmp_path / 'run'}"]
    assert main(["train", *flags, "--steps=1", "--hidden-size=16"]) == 0
    config = TrainConfig.load(tmp_path / "run" / "config.json")
    assert (config.steps, config.sizes.hidden_size, config.sizes.num_layers) == (1, 16, 1)
    again = tmp_path / "again.yaml"
    assert main(["train", *flags, "--resume", "--hidden-size=16", f"--save-config={again}"]) == 0
    assert "changed steps from 1 to 2" in capsys.readouterr().out
    assert read_settings(again, EVERY)["hidden_size"] == 16


def test_every_setting_is_read_as_it_was_written(tmp_path):
    odd = {
        **{"data": ("a b", "1e3", "no", "\u00e4: #"), "tokenizer": "bytes", "lr": 1e-5, "override": ("mlp.*=fp8",)},
        **{"failed_devices": (3, 1), "tp": 2, "keep_gathered": 2, "prefetch": False, "seed": 2**32 - 1},
        **{"from_": "null", "router_normalize": False},
    }
    settings = {field.name: odd.get(field.name, field.default) for field in EVERY}
    write_settings(tmp_path / "run.yaml", settings, "1")
    found = read_settings(tmp_path / "run.yaml", EVERY)
    assert found == {name: value for name, value in settings.items() if value is not None}
    flat = settings_of(TrainConfig(steps=7))
    write_settings(tmp_path / "run.yaml", flat, "1")
    assert from_settings(TrainConfig, read_settings(tmp_path / "run.yaml", knobs(TrainConfig))) == TrainConfig(steps=7)


def test_every_flag_of_train_is_a_key_or_of_one_start():
    commands = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = {action.dest for action in commands.choices["train"]._actions}
    assert flags - {field.name for field in EVERY} == {"help", "resume", "force", "step", "config", "save_config"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("num_layer: 3\nbacth: 2", "'num_layer' (did you mean 'num_layers'?) 'bacth' (did you mean 'batch'?)"),
        ("steps: 2.5", "`steps` 2.5 whole"),
        ("steps: true", "`steps` True whole"),
        ("recipe: no", "`recipe` False"),
        ("failed_devices: [1, x]", "`failed_devices` 'x' --failed-devices"),
        ("steps: 2\nsteps: 3", "YAML 'steps' (line 1)"),
        ("save_every: 2\nsave-every: 3", "'save-every' twice"),
        ("!!python/object/apply:os.system ['true']", "YAML constructor"),
        ("retries: 2", "--retries --elastic"),
        ("num_heads: 3", "preset 'tiny'"),
    ],
)
def test_what_no_flag_takes_is_refused(lines, message, tmp_path, capsys):
    refused(capsys, message, "train", f"--config={written(tmp_path, lines)}", f"--out={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_text_that_its_flag_would_take_is_a_number(tmp_path):
    path = written(tmp_path, "lr: 1e-3\nsteps: '7'\nunroll: '2'\ndata: one.txt\nfrom: model\nsave-every: 3\n")
    wanted = {"lr": 1e-3, "steps": 7, "unroll": 2, "data": ("one.txt",), "from_": "model", "save_every": 3}
    assert read_settings(path, EVERY) == wanted
    assert read_settings(written(tmp_path, ""), EVERY) == {}
    path = written(tmp_path, "steps: 010\nwarmup: 0\nlr: 0.5")
    assert read_settings(path, EVERY) == {"steps": 10, "warmup": 0, "lr": 0.5}


def test_only_a_run_that_may_begin_saves_its_settings_and_no_other_file_is_replaced(text, run, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    refused(capsys, "already run", "train", *small(text, run), f"--save-config={path}")
    assert not path.exists()
    written(tmp_path, "steps: 3  # mine\n")
    flags = ["train", *small(text, tmp_path / "run", seq=10**6), f"--save-config={path}"]
    refused(capsys, f"{path} written", *flags)
    assert path.read_text() == "steps: 3  # mine\n"
    path.write_text(json.dumps({"gtp_jax": "0", "steps": 3}))
    refused(capsys, "sequences 1000000 8000001", *flags)  # there is not so much text
    assert read_settings(path, EVERY)["seq"] == 10**6
    refused(capsys, "no directory", *flags, f"--save-config={tmp_path / 'no' / 'run.yaml'}")
