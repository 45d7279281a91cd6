"""`gtp-jax bench kernels`: what it measures, prints, writes and refuses."""

import json
import re

import pytest
from messages import naming

import benchmarks
from gtp_jax import native
from gtp_jax.runner.cli import main

needs_kernels = pytest.mark.skipif(not native.has("gtp_quantize", "cpu"), reason=native.describe())


def test_words_in_any_case_choose_kernels():
    wanted = ["multi_amax one", "multi_amax small", "quantize row NVFP4", "dequantize row NVFP4"]
    assert [k.name for k in benchmarks.kernels(["row NVFP4", "multi_amax"])] == wanted
    assert benchmarks.kernels(["ROW nvfp4"]) == benchmarks.kernels(["row NVFP4"])
    assert len(benchmarks.kernels([])) == len(benchmarks.KERNELS)
    with pytest.raises(ValueError, match=naming("amin multi_amax one")):
        benchmarks.kernels(["amin"])


@needs_kernels
def test_the_command_prints_a_table_and_writes_json_and_a_picture(tmp_path, capsys):
    record, picture = tmp_path / "k.json", tmp_path / "k.png"
    words = ["--only", "pack NVFP4", "--only", "multi_amax one", "--no-reference"]
    files = ["--json", str(record), "--png", str(picture)]
    assert main(["bench", "kernels", *words, "--mebibytes", "2", "--dtype", "float32", *files]) == 0
    printed = capsys.readouterr().out
    assert "of copy" in printed and "pack NVFP4" in printed
    written = json.loads(record.read_text())["kernels"]
    packed = next(r for r in written if r["operation"] == "pack" and not r["variant"])
    # 512 x 1024 of float32; a code of half a byte and a 256th of a scale each
    assert packed["bytes_moved"] == 2**19 * 4 + 2**19 // 2 + 2**19 // 256
    assert packed["of_copy"] == pytest.approx(packed["bytes_a_second"] / packed["copy_bytes_a_second"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_kernels
@pytest.mark.full
@pytest.mark.parametrize("mebibytes", ["1", "2"])
def test_small_arrays_are_measured_too(mebibytes, tmp_path, capsys):
    record = tmp_path / "k.json"
    sizes = ["--mebibytes", mebibytes, "--dtype", "float32"]
    assert main(["bench", "kernels", "--only", "unpack", "--no-reference", *sizes, "--json", str(record)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unpack")]
    assert [line.split()[3] for line in lines] == [mebibytes] * 4
    assert all(r["mebibytes"] == float(mebibytes) for r in json.loads(record.read_text())["kernels"])


@needs_kernels
def test_bad_arguments_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments, message in (
        (["--only", "amin"], "amin"),
        (["--json", str(tmp_path / "no" / "k.json")], "directory create"),
    ):
        assert main(["bench", "kernels", *arguments]) == 2
        assert re.search(naming(message), capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--mebibytes", "-1"])
    assert re.search(naming("'-1' positive"), capsys.readouterr().err)
