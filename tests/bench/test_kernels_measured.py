"""`gtp-jax bench kernels`: what it measures, prints, writes and refuses."""

import json

import pytest
from matplotlib.figure import Figure

import benchmarks
from gtp_jax import native
from gtp_jax.runner.cli import main

needs_kernels = pytest.mark.skipif(not native.has("gtp_quantize", "cpu"), reason=native.describe())


def test_every_operation_is_measured_in_every_format():
    names = {kernel.name for kernel in benchmarks.KERNELS}
    for operation in ("quantize row", "quantize both", "dequantize row", "pack", "unpack"):
        for form in ("NVFP4", "NVFP4_1D", "MXFP8", "FP8_E4M3"):
            assert f"{operation} {form}" in names
    assert {"multi_amax one", "multi_amax small"} <= names


def test_words_in_any_case_choose_kernels():
    assert [k.name for k in benchmarks.kernels(["row NVFP4", "multi_amax"])] == [
        "multi_amax one",
        "multi_amax small",
        "quantize row NVFP4",
        "dequantize row NVFP4",
    ]
    assert benchmarks.kernels(["ROW nvfp4"]) == benchmarks.kernels(["row NVFP4"])
    assert len(benchmarks.kernels([])) == len(benchmarks.KERNELS)
    with pytest.raises(ValueError, match="no kernel is called amin; there are multi_amax one, "):
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
@pytest.mark.parametrize("mebibytes", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_small_arrays_are_measured_too(mebibytes, tmp_path, capsys):
    record = tmp_path / "k.json"
    sizes = ["--mebibytes", mebibytes, "--dtype", "float32"]
    assert main(["bench", "kernels", "--only", "unpack", "--no-reference", *sizes, "--json", str(record)]) == 0
    assert [line.split()[3] for line in capsys.readouterr().out.splitlines() if line.startswith("unpack")] == [
        mebibytes
    ] * 4
    assert all(r["mebibytes"] == float(mebibytes) for r in json.loads(record.read_text())["kernels"])


def test_rates_are_held_to_the_goal_of_a_gpu_only(tmp_path, monkeypatch):
    kernel = benchmarks.KERNELS[0]
    shares = [benchmarks.Measurement(kernel, "float32", 1.0, 1.0, moved, 1e8, None) for moved in (95, 50)]
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    figures: list[Figure] = []
    for goal in (None, 0.85):
        benchmarks.draw_ratios(shares, goal, "rates", tmp_path / "k.png")
    (plain, same), (reached, missed) = ([bar.get_facecolor() for bar in f.axes[0].patches] for f in figures)
    assert plain == same and len({plain, reached, missed}) == 3
    assert [len(f.axes[0].lines) for f in figures] == [0, 1]


@needs_kernels
def test_bad_arguments_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments, message in (
        (["--only", "amin"], "no kernel is called amin"),
        (["--json", str(tmp_path / "no" / "k.json")], "is not a directory; create it first"),
    ):
        assert main(["bench", "kernels", *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "kernels", "--mebibytes", "-1"])
    assert "is '-1'; it must be a positive number" in capsys.readouterr().err
