"""`gtp-jax convert` imports and exports, and `gtp-jax train --from` starts from what was imported."""

import dataclasses
import json

import pytest
from trainer.runs import losses, refused, small

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import main


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

    flags = small(text, tmp_path / "second", steps=2, tokenizer="bytes", gtp=2, tp=4)
    assert printed(capsys, "train", *flags, "--from", tmp_path / "imported")[0] == 0
    # summed in another order, as the mesh is another one
    assert losses(tmp_path / "second")[0, "held_out"] == pytest.approx(losses(run)[4, "held_out"], rel=1e-5)
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
    out = tmp_path / "out"
    for words, message in (
        (("export", tmp_path / "missing", out), f"no directory {tmp_path / 'missing'}"),
        (("export", tmp_path, out), f"no checkpoint {tmp_path}"),
        (("export", run, out, "--step", 7), "no step 7"),
        (("export", run, run), "directory not empty"),
        (("export", run, "/proc/x"), "/proc/x `out` (No such file or directory)"),
        (("export", run, long), f"{long} `out` (File name too long)"),
        (("import", run / "config.json", out), "config.json file Give directory"),
        (("import", run, out), "config.json model_type None"),
        (("import", tmp_path / "missing", out), "no config.json"),
    ):
        refused(capsys, message, "convert", *words)
        assert not out.exists()
    for arguments in (("--dtype", "int4"), ("--shard-gb", "0"), ("--shard-gb", "much")):
        with pytest.raises(SystemExit) as caught:
            main(["convert", "export", str(run), str(tmp_path / "out"), *arguments])
        assert caught.value.code == 2
