"""`gtp-jax bench checkpoint`, `generate`, `sequence`, `kernels`, `collectives`, `attention`: what they measure."""

import json
import os
import re
import sys
import time

import jax
import pytest
from messages import naming

import benchmarks
import gtp_jax as gtp
from benchmarks import CheckpointTimes
from benchmarks._process import run
from gtp_jax import native
from gtp_jax.models import LlamaConfig
from gtp_jax.recipes import GRAD_WIRES, RECIPES
from gtp_jax.runner.cli import main

SIZES = dict(vocab_size=64, hidden_size=64, num_layers=1, head_dim=16, intermediate_size=128)
needs_kernels = pytest.mark.skipif(not native.has("gtp_quantize", "cpu"), reason=native.describe())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("checkpoint --dir none", "`--dir` none directory"),
        ("checkpoint --json none/x.json", "none directory create"),
        ("checkpoint --contenders tar", "tar gtp_jax orbax torch-DCP async"),
        ("checkpoint --preset 405b --dir .", "--preset --num-layers --dir"),
        ("generate --tokens 16", "`tokens` 16 more"),
        ("generate --prompt 0", "--prompt '0' whole"),
        ("sequence --tp 1", "tp 1 `--tp 2`"),
        ("sequence --tp 2 --mebibytes 0.25 --shares 7", "`shares` 7"),
        ("kernels --only amin", "amin multi_amax one"),
        ("kernels --mebibytes -1", "'-1' positive"),
        ("collectives --gtp 1", "gtp 1 `--gtp 2`"),
        ("collectives --gtp 64", "gtp 64 64 devices 8"),
        ("attention --documents 128 129", "`documents` 129 128 tokens"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["bench", *words.split()])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and re.search(naming(message), capsys.readouterr().err)


@pytest.mark.slow
def test_checkpoints_are_measured_and_nothing_is_left_behind(tmp_path, capsys):
    record, picture = tmp_path / "times.json", tmp_path / "times.png"
    flags = [
        "--preset=tiny",
        "--num-layers=1",
        "--devices=4",
        "--rounds=1",
        "--contenders=gtp_jax",
        f"--dir={tmp_path}",
    ]
    assert main(["bench", "checkpoint", *flags, "--json", str(record), "--png", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "on 4 x cpu" in printed and "moved / restored" in printed and "did not complete" not in printed, printed
    assert sorted(os.listdir(tmp_path)) == ["times.json", "times.png"]
    (times,) = (CheckpointTimes(**times) for times in json.loads(record.read_text())["times"])
    assert times.who == "gtp_jax" and times.state_bytes > 2**20 and not times.failure
    assert len(times.saved) == len(times.restored) == len(times.moved) == 2
    assert 0 < times.median("blocked") < times.median("saved")
    assert 0 < times.ratio("save_checksums", "saved") < 1 and 0 < times.ratio("restore_checksums", "restored") < 1


def test_a_program_is_ended_with_all_that_it_started():
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    code, _ = run([sys.executable, "-c", parent], dict(os.environ), 1)
    assert code is None and time.monotonic() - begin < 30, "its output was waited for"  # the child holds the pipe


@pytest.mark.full
def test_a_generated_token_is_timed_beside_the_bytes_that_it_must_read(capsys, tmp_path):
    path = tmp_path / "g.json"
    flags = ["--num-layers", "1", "--prompt", "8", "--tokens", "40"]
    assert main(["bench", "generate", *flags, "--json", str(path)]) == 0
    printed, written = capsys.readouterr().out, json.loads(path.read_text())
    assert f"{1e3 * written['seconds']:.3f} ms, the median of 2 calls" in printed
    assert 0 < written["low_s"] <= written["seconds"] <= written["high_s"]
    assert (written["preset"], written["num_layers"], written["prompt"], written["tokens"]) == ("tiny", 1, 8, 40)
    # a layer has q, k, v, o and gate, up, down; the head has a column for each of 256 tokens
    matrices = 128 * 32 * (2 * 8 + 2 * 4) + 3 * 128 * 384 + 256 * 128
    assert written["weight_bytes"] == 2 * matrices
    # keys and values of 4 heads: the prompt, the first token, and half of the 32 that were timed
    assert written["cache_bytes"] == 2 * 2 * 4 * 32 * (8 + 1 + 16)
    assert "time / reading" not in printed and written["ratio"] is None  # of a CPU's memory no rate is known


def test_rates_are_those_of_the_chip_that_a_device_names():
    known = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
    others = ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-80GB", "cpu"]
    for kind, rate in {**known, **dict.fromkeys(others)}.items():
        assert benchmarks.memory_rate(kind) == rate


@pytest.mark.slow
def test_shapes_over_tp_are_those_of_a_rank_of_the_larger_degree_and_bytes_those_of_the_mesh():
    config = LlamaConfig(**SIZES, num_heads=8, num_kv_heads=4)
    with jax.set_mesh(gtp.make_mesh(gtp=1, tp=2, devices=jax.devices()[:2])):
        found = {m.name: m for m in benchmarks.measure_sequence(config, part=16, shares=4)}
    outputs = {"attention.qkv": (64, (128 + 64 + 64) // 4), "attention.out": (128 // 4, 64)}
    outputs |= {"mlp.up": (64, 256 // 4), "mlp.down": (128 // 4, 64)}
    assert set(found) == {f"{name} {way}" for name in outputs for way in ("forward", "backward")}
    for name, (into, out) in outputs.items():
        forward, backward = found[f"{name} forward"], found[f"{name} backward"]
        assert forward.flops == 2 * 32 * into * out and backward.flops == 2 * forward.flops
        # one part of 16 tokens leaves, in bfloat16: of the whole features, 64
        assert forward.wire_bytes == 16 * 64 * 2
        # a column-parallel layer gathers its input again
        assert backward.wire_bytes == forward.wire_bytes * (2 if name in ("attention.qkv", "mlp.up") else 1)
        assert min(forward.alone_s, forward.parts_s, forward.at_once_s) > 0


def test_words_in_any_case_choose_kernels():
    wanted = ["multi_amax one", "multi_amax small", "quantize row NVFP4", "dequantize row NVFP4"]
    assert [k.name for k in benchmarks.kernels(["row NVFP4", "multi_amax"])] == wanted
    assert benchmarks.kernels(["ROW nvfp4"]) == benchmarks.kernels(["row NVFP4"])
    assert len(benchmarks.kernels([])) == len(benchmarks.KERNELS)


@needs_kernels
def test_kernels_are_measured_beside_a_copy(tmp_path, capsys):
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


@pytest.mark.full
def test_bytes_of_collectives_are_those_of_the_format_and_rates_come_from_this_run():
    config, each = LlamaConfig(**SIZES, num_heads=4, num_kv_heads=4), {"bf16": 2.0, "nvfp4": 0.5 + 1 / 256}
    each["fp8-blocks"] = 1.0  # scales are not sent
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        links = benchmarks.measure_links(1.0)
        found = list(benchmarks.measure_movements(config, {name: RECIPES[name]() for name in each}, links))
    assert links.mebibytes == pytest.approx(1.0, rel=0.01)
    bf16, nvfp4, tiles, scatter, *exchanges = found
    share = (config.matmul_params() - 64 * 64) / 2 / 2  # of a rank of tp, half comes from the other rank of gtp
    sizes = [each["bf16"], each["nvfp4"], each["fp8-blocks"], each["bf16"]]
    for movement, size in zip((bf16, nvfp4, tiles, scatter), sizes, strict=True):
        # scales of small weights are filled up to 16 bytes
        assert movement.wire_bytes == pytest.approx(size * share, rel=0.02 if movement is nvfp4 else 1e-9)
        rate = links.scatter_rate if movement is scatter else links.gather_rate
        assert movement.bound_s == pytest.approx(movement.wire_bytes / rate)
        assert movement.seconds > 0 and (movement.whole_s is None) == (movement is scatter)
    scales = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32}
    for movement, (name, size) in zip(exchanges, scales.items(), strict=True):
        assert movement.name == f"exchange gradient {name}"
        assert movement.wire_bytes == pytest.approx(size * share, rel=0.02)
    # gradients in bfloat16 lose nothing on the wire; codes of random numbers lose 3 %
    assert [m.error for m in exchanges] == [0, pytest.approx(0.027, rel=0.1), pytest.approx(0.027, rel=0.1)]


@pytest.mark.slow
def test_collectives_are_printed_for_every_format(capsys):
    assert main(["bench", "collectives", "--gtp", "2"]) == 0
    printed = capsys.readouterr().out
    assert all(f"gather {name}" in printed for name in RECIPES) and "scatter gradient" in printed
    assert all(f"exchange gradient {name}" in printed for name in GRAD_WIRES)


@pytest.mark.full
def test_attention_is_measured_over_more_and_more_documents(capsys, tmp_path):
    path = tmp_path / "a.json"
    assert main(["bench", "attention", "--documents", "2", "4", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    kinds = [(r["documents"], r["lengths"]) for r in rows]
    assert kinds == [(0, ""), (2, "even"), (2, "uneven"), (4, "even"), (4, "uneven"), (4, "id comes back")]
    assert all(r["seconds"] > 0 and f"{1e3 * r['seconds']:.3f}" in printed for r in rows)
    even = {r["documents"]: r["work"] for r in rows if r["lengths"] == "even"}
    # of 128 tokens, in documents of 64 and of 32
    assert even == {2: pytest.approx(2 * 64 * 65 / (128 * 129)), 4: pytest.approx(4 * 32 * 33 / (128 * 129))}
