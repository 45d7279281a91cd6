"""`gtp-jax convert` imports and exports, and `gtp-jax train --from` starts from what was imported."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from trainer.runs import read_records, small, write_text

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import main


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    jax.devices()  # started here with its 8 devices, which no run below may change
    return write_text(tmp_path_factory.mktemp("text"))


def printed(capsys, *args) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(list(map(str, args)))
    out, err = capsys.readouterr()
    return code, out, err


def params(directory, step=None):
    leaves = Checkpoints(directory, read_only=True).manifest(step)["leaves"]
    return {name: leaf for name, leaf in leaves.items() if name.startswith("params/")}


@pytest.mark.slow
def test_a_run_is_exported_imported_and_trained_on(run, text, tmp_path, capsys):
    count = dataclasses.replace(PRESETS["tiny"], num_layers=2).param_count()
    code, out, _ = printed(capsys, "convert", "export", run, tmp_path / "hf", "--dtype", "float32")
    assert code == 0
    assert f"step 4 in {run / 'checkpoints'}: {count:,} parameters as float32" in out
    assert f"wrote 21 tensors, 2.23 MB, of 1 file to {tmp_path / 'hf'}, and config.json" in out
    code, out, _ = printed(capsys, "convert", "import", tmp_path / "hf", tmp_path / "imported")
    assert code == 0
    assert f"read 21 tensors, 2.23 MB, of 1 file in {tmp_path / 'hf'}" in out
    assert f"{count:,} float32 parameters are in {tmp_path / 'imported'}, a checkpoint at step 0" in out
    assert params(tmp_path / "imported") == params(run / "checkpoints")

    flags = small(text, tmp_path / "second", steps=2)
    assert (
        printed(capsys, "train", *flags, "--from", tmp_path / "imported", "--tokenizer=bytes", "--gtp=2", "--tp=4")[0]
        == 0
    )
    before, after = (read_records(out) for out in (run, tmp_path / "second"))
    last = next(r["held_out"] for r in before if r["step"] == 4 and "held_out" in r)
    first = next(r["held_out"] for r in after if r["step"] == 0 and "held_out" in r)
    # summed in another order, as the mesh is another one
    np.testing.assert_allclose(first, last, rtol=1e-5)
    assert json.loads((tmp_path / "second/config.json").read_text())["from_"] == str(tmp_path / "imported")


@pytest.mark.slow
def test_step_dtype_and_size_of_files_are_chosen(run, tmp_path, capsys):
    code, out, _ = printed(
        *(capsys, "convert", "export", run / "checkpoints", tmp_path / "hf"),
        *("--step", 2, "--dtype", "nvfp4", "--shard-gb", 0.0002),
    )
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    assert code == 0 and "step 2 in" in out and f"of {len(files)} files to" in out
    assert len(files) > 2 and all((tmp_path / "hf" / name).stat().st_size < 210_000 for name in files)
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    assert json.loads((tmp_path / "hf/config.json").read_text())["quantization_config"]["quant_algo"] == "W4A16_NVFP4"


def test_mistakes_are_named_with_status_2(run, tmp_path, capsys):
    long = tmp_path / ("x" * 250)  # allowed, but not with the ending that it has until it is complete
    for arguments, message in (
        (("export", tmp_path / "missing", tmp_path / "out"), f"no directory {tmp_path / 'missing'}"),
        (("export", tmp_path, tmp_path / "out"), f"no checkpoint in {tmp_path}"),
        (("export", run, tmp_path / "out", "--step", 7), "no step 7 in"),
        (("export", run, run), "is a directory that is not empty"),
        (("export", run, "/proc/x"), "error: /proc/x: `out` cannot be made there (No such file or directory). Choose"),
        (("export", run, long), f"error: {long}: `out` cannot be made there (File name too long). Choose"),
        (("import", run / "config.json", tmp_path / "out"), "config.json is a file. Give the directory of a"),
        (("import", run, tmp_path / "out"), "config.json has model_type None"),
        (("import", tmp_path / "missing", tmp_path / "out"), "has no config.json"),
    ):
        code, out, err = printed(capsys, "convert", *arguments)
        assert (code, out) == (2, "") and err.startswith("gtp-jax convert: error: ") and message in err
        assert not (tmp_path / "out").exists()
    for arguments in (("--dtype", "int4"), ("--shard-gb", "0"), ("--shard-gb", "much")):
        with pytest.raises(SystemExit) as caught:
            main(["convert", "export", str(run), str(tmp_path / "out"), *arguments])
        assert caught.value.code == 2


def test_help_has_examples(capsys):
    for arguments in ([], ["import"], ["export"]):
        with pytest.raises(SystemExit):
            main(["convert", *arguments, "--help"])
        assert "gtp-jax convert export gtp-run exported" in capsys.readouterr().out


def test_help_of_import_names_what_is_imported(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "import", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "Imports Llama 2 to 3.1, Mistral, Mixtral, Qwen2, Qwen2.5, and Qwen3 with or without experts; rotary" in out
    assert "Llamas only" not in out


def test_a_run_does_not_start_from_another_model(run, text, tmp_path, capsys):
    flags = small(text, tmp_path / "out", steps=2)
    code, _, err = printed(capsys, "train", *flags, "--from", run, "--preset=100m")
    assert code == 2 and "--preset 100m has the hidden_size 1024, but its is 128" in err
    assert not (tmp_path / "out").exists()
    code, _, err = printed(capsys, "train", *flags, "--from", tmp_path / "missing")
    assert code == 2 and f"no directory {tmp_path / 'missing'}" in err
    copy = shutil.copytree(run, tmp_path / "copy")
    code, _, err = printed(capsys, "train", *small(text, copy, steps=4), "--resume", "--from", run)
    assert code == 2 and "`from` applies only to a new run; a resumed run has its own parameters" in err
