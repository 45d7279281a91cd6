"""Any NNX model is trained as ours are: resumed bit for bit, from a program or from the command line."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from trainer.any_model import Net, Stateful, batches, loss
from trainer.runs import finish, losses, python, read_records, refused, small, write_text

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import abstract_model
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig, _loop
from gtp_jax.runner.trainer._data_set import DataSet, PlacedData
from gtp_jax.runner.trainer._evaluations import evaluate_batches
from gtp_jax.runner.trainer._optimizer import optimizer_of
from gtp_jax.train import _host_memory

STEPS = 7  # more than two passes of the data
RATE = optax.linear_schedule(3e-3, 1e-3, STEPS)


def trainer(out: Path, data: Any = batches, **changes: Any) -> gtp.Trainer:
    options: Any = dict(steps=STEPS, save_every=2, eval_every=3, eval_data=list(batches())[:1], schedule=RATE)
    recipe = gtp.recipes.FP8Delayed(history=3)  # whose amaxes are resumed too
    options |= dict(mesh=gtp.make_mesh(gtp=2, devices=jax.devices()[:2]), evaluate=of_table, recipe=recipe)
    return gtp.Trainer(Net, loss, optax.adamw(RATE), data, out=out, **options | changes)


def of_table(model: Net) -> dict[str, float]:
    assert model.dropout.deterministic, "evaluations are without dropout"
    return {"table": float(np.abs(np.asarray(model.embed.embedding[...])).mean())}


def digests(out: Path) -> dict[str, str]:
    content = Checkpoints(out / "checkpoints", read_only=True).manifest(STEPS)
    return {name: leaf["digest"] for name, leaf in content["leaves"].items()}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("never") / "run"
    return out, trainer(out).run()


def test_a_run_leaves_a_log_a_picture_a_report_and_the_trained_model(never_stopped):
    out, report = never_stopped
    steps = [record for record in report.records if "loss" in record]
    assert [record["step"] for record in steps] == [*range(1, STEPS + 1)] and report.steps == STEPS
    assert [record["learning_rate"] for record in steps] == pytest.approx([float(RATE(i)) for i in range(STEPS)])
    evaluated = [record for record in report.records if "held_out" in record]
    assert [record["step"] for record in evaluated] == [0, 3, 6, STEPS] and all("table" in one for one in evaluated)
    assert evaluated[-1]["held_out"] < evaluated[0]["held_out"]
    assert (out / "loss.png").stat().st_size > 1000 and str(report) == (out / "report.txt").read_text().rstrip("\n")
    assert re.search(naming("steps 7 of 7 parameters held out table"), str(report))
    trained = report.model()
    assert isinstance(trained, Net)
    assert of_table(nnx.view(trained, deterministic=True))["table"] == pytest.approx(evaluated[-1]["table"])


def test_a_mistake_in_a_loss_is_raised_and_printed_once(tmp_path, capfd):
    def mistaken(model: Net, batch: Any) -> Any:
        rows: int = batch["tokens"].shape[0]
        return loss(model, batch)[0] * (1 / (rows - 8))

    with pytest.raises(ZeroDivisionError):
        gtp.Trainer(
            Net,
            mistaken,
            optax.sgd(0.1),
            batches,
            out=tmp_path / "run",
            steps=1,
            mesh=gtp.make_mesh(gtp=2, devices=jax.devices()[:2]),
        ).run()
    assert capfd.readouterr().err.count("\nZeroDivisionError") == 1


@pytest.mark.parametrize(
    ("data", "offloads"),
    [
        pytest.param(lambda: batches, [None] * 3, id="a function", marks=pytest.mark.full),
        pytest.param(lambda: list(batches()), [None] * 3, id="a list", marks=pytest.mark.full),
        pytest.param(Stateful, [None] * 3, id="iterators with a state", marks=pytest.mark.full),
        pytest.param(lambda: batches, ["masters", None, "optimizer"], id="a state that moves to the host and back"),
    ],
)
def test_killed_stopped_by_a_signal_and_resumed_equals_never_stopped(
    data, offloads, never_stopped, tmp_path, monkeypatch, capsys
):
    out, log_step, at = tmp_path / "run", _loop.Progress.step, {3: "kill", 5: "signal"}

    def end(self, number, metrics):
        log_step(self, number, metrics)
        what = at.pop(number, None)
        if what == "kill":
            raise SystemExit("killed")
        if what == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(_loop.Progress, "step", end)
    monkeypatch.setattr(_host_memory, "_LEAST_ELEMENTS", 1 << 12)  # the model is small
    with pytest.raises(SystemExit, match="killed"):
        trainer(out, data(), offload=offloads[0]).run()
    with pytest.raises(SystemExit, match="143"):
        trainer(out, data(), offload=offloads[1]).run(resume=True)
    assert not at and "run(resume=True)" in capsys.readouterr().out
    state = trainer(out, data(), offload=offloads[2]).run(resume="auto").state
    kinds = {moment.sharding.memory_kind for moment in jax.tree.leaves(state.opt_state) if moment.ndim > 1}
    assert kinds == {"device" if offloads[2] is None else "pinned_host"}
    assert set(state.scaling) == {"layers.0.kernel", "layers.1.kernel"}
    if not any(offloads):
        assert read_records(out) == read_records(never_stopped[0])
        assert digests(out) == digests(never_stopped[0])
    else:  # XLA's CPU compiler rounds differently where it fuses differently
        assert losses(out) == pytest.approx(losses(never_stopped[0]), rel=1e-5)
        pairs = zip(
            *(jax.tree.leaves((one.params, one.opt_state)) for one in (state, never_stopped[1].state)), strict=True
        )
        for own, other in pairs:
            np.testing.assert_allclose(np.asarray(own), np.asarray(other), rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_the_command_line_trains_as_a_program_does(tmp_path):
    named = {"model": "Net", "loss": "loss", "dataset": "batches", "eval-dataset": "batches"}
    flags = [f"--{flag}=trainer.any_model:{name}" for flag, name in named.items()]
    flags += ["--steps=3", "--eval-every=3", "--warmup=0", "--dp=4", "--gtp=2", "--tp=1", "--weight-decay=0.5"]
    assert main(["train", *flags, f"--out={tmp_path / 'named'}"]) == 0
    config = TrainConfig.load(tmp_path / "named/config.json")
    mesh = gtp.make_mesh(dp=4, gtp=2)
    with jax.set_mesh(mesh):
        optimizer = optimizer_of(config, abstract_model(Net))
    options: Any = dict(steps=3, eval_every=3, eval_data=batches, eval_batches=4, max_grad_norm=1.0, mesh=mesh)
    gtp.Trainer(Net, loss, optimizer, batches, out=tmp_path / "program", **options).run()
    found = [{k: v for k, v in one.items() if k != "learning_rate"} for one in read_records(tmp_path / "named")]
    assert found == read_records(tmp_path / "program"), "a program that does not give its schedule logs no rate"


@pytest.mark.full
def test_the_command_line_trains_any_model_on_text(tmp_path, capsys):
    text = write_text(tmp_path / "text")
    flags = ["--model=trainer.any_model:Net", "--optimizer=muon", "--average=0.9", "--microbatches=2", "--gtp=4"]
    run = small(text, tmp_path / "run", num_layers=None, sample_tokens=None, **{"tp": 2})
    assert main(["train", *flags, *run, "--steps=4"]) == 0
    assert re.search(naming("unigram entropy held-out loss tokens/s --resume"), capsys.readouterr().out)
    before = read_records(tmp_path / "run")
    assert main(["train", "--resume", f"--out={tmp_path / 'run'}", "--step=2"]) == 0
    assert read_records(tmp_path / "run") == before
    other = write_text(tmp_path / "other", documents=30)
    refused(capsys, "tokens text changed", "train", "--resume", f"--out={tmp_path / 'run'}", f"--data={other}")
    refused(capsys, "--elastic --model", "train", "--elastic", *flags, *run, "--force")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--preset=tiny", "--num-layers=3", "--lora=8"], "--preset --num-layers --lora --model"),
        (["--dataset=trainer.any_model:batches", "--seq=64"], "--seq --dataset"),
        (["--eval-dataset=trainer.any_model:batches"], "--eval-dataset --dataset"),
        (["--loss=trainer.any_model:lost"], "`loss` 'trainer.any_model:lost' 'lost'"),
        (["--dataset=nowhere.at_all:batches"], "`dataset` nowhere.at_all imported"),
        (["--dataset=batches"], "`dataset` 'batches' package.module:name"),
        (["--failed-devices=1"], "--failed-devices --model"),
    ],
)
def test_flags_that_do_not_apply_to_any_model_are_refused_by_name(flags, named, tmp_path, capsys):
    refused(capsys, named, "train", "--model=trainer.any_model:Net", *flags, f"--out={tmp_path / 'run'}")
    assert not (tmp_path / "run").exists()


def test_flags_of_any_model_are_refused_without_one(tmp_path, capsys):
    refused(capsys, "--loss --model", "train", "--loss=trainer.any_model:loss", f"--out={tmp_path / 'run'}")


ROWS = {"tokens": np.zeros((7, 4), np.int32), "targets": np.zeros((7, 4), np.int32)}


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (dict(data=[ROWS]), ValueError, "batch 0 7 rows gtp 2 6 rows"),
        (dict(data=[]), ValueError, "`data` no batches"),
        (dict(data=lambda: iter([])), ValueError, "`data` no batches"),
        (dict(data=ROWS), TypeError, "`data` dict list"),
        (dict(data=np.zeros((8, 4))), TypeError, "`data` an array"),
        (dict(data=5), TypeError, "`data` 5"),
        (dict(data=lambda: 5), TypeError, "`data` function returned 5"),
        (dict(data=[{"tokens": "words"}]), TypeError, "batch 0 of `data` ['tokens'] str"),
        (dict(eval_data=batches), ValueError, "`eval_batches` `eval_data` length"),
        (dict(steps=0), ValueError, "`steps` 0"),
        (dict(microbatches=0), ValueError, "`microbatches` 0"),
        (dict(nonfinite="skip", spike=3.0), ValueError, "`spike` `nonfinite`"),
        (dict(dp=2), ValueError, "`mesh` dp"),
        (dict(model=5), TypeError, "`model` 5"),
        (dict(model=lambda rngs: 5), TypeError, "`model` function returned 5"),
        (dict(out=""), ValueError, "`out` empty"),
        (dict(log_to="wandbx"), ValueError, "`log_to` 'wandbx'"),
    ],
)
@pytest.mark.bad_input
def test_mistakes_are_refused_before_anything_is_written(changes, error, named, tmp_path):
    given: Any = dict(model=Net, loss=loss, optimizer=optax.adamw(RATE), data=batches, out=tmp_path / "run", steps=2)
    given |= dict(mesh=gtp.make_mesh(gtp=2, devices=jax.devices()[:2]))
    with pytest.raises(error, match=naming(named)):
        gtp.Trainer(**given | changes).run()
    assert not (tmp_path / "run").exists()


def test_a_run_of_a_program_is_neither_resumed_by_the_command_nor_with_other_data(never_stopped, capsys):
    out, _ = never_stopped
    refused(capsys, "Trainer run(resume=True)", "train", "--resume", f"--out={out}")
    with pytest.raises(ValueError, match=naming("`data` first batch other values")):
        trainer(out, list(batches())[1:]).run(resume=True)
    with pytest.raises(ValueError, match=naming("`data` 6 batches None")):
        trainer(out, list(batches()) * 2).run(resume=True)
    with pytest.raises(ValueError, match=naming("`data` generator function list")):
        trainer(out, batches()).run(resume=True)
    with pytest.raises(ValueError, match=naming("already holds a run `resume` `force` `out`")):
        trainer(out).run()
    with pytest.raises(ValueError, match=naming("`steps` 3 7")):
        trainer(out, steps=3).run(resume=True)


@pytest.mark.parametrize("kind", ["list", "function", "stateful"])
def test_batches_after_a_stop_are_those_that_would_have_come(kind):
    def opened() -> DataSet:
        return DataSet({"list": list(batches()), "function": batches, "stateful": Stateful()}[kind])

    whole, stopped = opened(), opened()
    every = [whole.batch(position)["tokens"] for position in range(10)]
    stored = [None] * 8
    for position in range(8):
        stopped.batch(position + 1)  # as it is read ahead
        stored[position] = stopped.stored(position)  # pyright: ignore[reportArgumentType]
    for position, extra in enumerate(stored):
        resumed = opened()
        said = resumed.go_to(position, extra)  # pyright: ignore[reportArgumentType]
        assert ("read" in said) == (kind == "function" and position > 0)
        for following in range(position, 10):
            np.testing.assert_array_equal(resumed.batch(following)["tokens"], every[following])


def test_an_iterator_with_a_state_reads_no_batch_again_but_the_first():
    data = Stateful()
    extra = {"data": {"first": DataSet(batches).digest, "batches": None, "state": {"bytes": "Mg=="}}}  # 2
    resumed = DataSet(data)
    resumed.go_to(5, extra)
    np.testing.assert_array_equal(resumed.batch(5)["tokens"], list(batches())[2]["tokens"])
    assert data.made == 2
    with pytest.raises(ValueError, match=naming("state of an iterator `data` `get_state`")):
        DataSet(batches).go_to(5, extra)


class _Changing:
    """Three batches of one pass, whose state is the object that it changes."""

    def __init__(self, number: int) -> None:
        self.number, self.state = number, {"next": 0}

    def __iter__(self) -> _Changing:
        return self

    def __next__(self) -> np.ndarray:
        if self.state["next"] == 3:
            raise StopIteration
        self.state["next"] += 1
        return np.full((8,), 10 * self.number + self.state["next"], np.int32)

    def get_state(self) -> dict[str, int]:
        return self.state

    def set_state(self, state: dict[str, int]) -> None:
        self.state = state


@pytest.mark.parametrize("position", [1, 3, 7])
def test_a_function_that_returns_other_batches_for_each_pass_resumes_in_the_same_pass(position: int):
    def opened() -> DataSet:
        numbers = itertools.count()
        return DataSet(lambda: _Changing(next(numbers)))

    whole, resumed = opened(), opened()
    whole.batch(position + 1)  # reads ahead
    resumed.go_to(position, json.loads(json.dumps(whole.stored(position))))
    for following in range(position, position + 5):
        expected = whole.batch(following)
        np.testing.assert_array_equal(resumed.batch(following), expected)


@pytest.mark.parametrize(("counted", "expected"), [(None, 2.5), ([1, 3], 3.75)])
def test_a_batch_is_evaluated_with_the_weight_of_what_the_loss_counts_or_else_of_its_rows(counted, expected):
    mesh = gtp.make_mesh(gtp=2, devices=jax.devices()[:2])
    rows = np.arange(6, dtype=np.float32)[:, None]
    placed = PlacedData(DataSet([{"x": rows[:4]}, {"x": rows[4:]}]), mesh, gtp.mesh.Roles())
    counts = itertools.repeat({}) if counted is None else ({"tokens": count} for count in counted)

    def evaluate(batch: dict[str, jax.Array]) -> dict[str, Any]:
        return {"loss": np.asarray(batch["x"]).mean(), **next(counts)}

    assert evaluate_batches(placed, None, evaluate, {}).values == {"held_out": expected}


def test_a_generator_object_ends_where_it_ends_and_says_so():
    data = DataSet(batches())
    for position in range(3):
        data.batch(position)
    with pytest.raises(ValueError, match=naming("`data` 3 batches function list")):
        data.batch(3)


def test_grains_iterators_are_stored():
    grain: Any = pytest.importorskip("grain")
    rows = grain.MapDataset.source(list(range(40))).shuffle(seed=3).repeat()
    data = rows.map(lambda i: {"tokens": np.full((4,), i, np.int32)}).batch(8)

    def opened(kind: str) -> DataSet:
        return DataSet(data if kind == "map" else data.to_iter_dataset())

    for kind in ("map", "iter"):
        whole = opened(kind)
        every = [whole.batch(position)["tokens"] for position in range(9)]
        stopped = opened(kind)
        stopped.batch(5)
        resumed = opened(kind)
        assert resumed.go_to(4, stopped.stored(4)) == ""
        for position in range(4, 9):
            np.testing.assert_array_equal(resumed.batch(position)["tokens"], every[position])


PROGRAM = """
import sys
import jax
address, count, own, out, skipped = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4], int(sys.argv[5])
import optax
import gtp_jax as gtp
jax.config.update("jax_num_cpu_devices", 2 // count)
assert gtp.distributed(address, count, own) == count
from trainer.any_model import Net, batches, loss
data = list(batches())[skipped * own:]
report = gtp.Trainer(Net, loss, optax.adamw(1e-2), data, out=out, steps=4, save_every=2, gtp=2).run(resume="auto")
assert report.steps == 4 and bool(report.text) == (own == 0)
"""


def in_processes(folder: Path, count: int, out: Path, *, skipped: int = 0) -> list[str]:
    """Runs the program in processes that JAX connects, and returns their outputs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "program.py").write_text(PROGRAM)
    env = {"JAX_PLATFORMS": "cpu"}
    root = Path(gtp.__file__ or "").parents[1]
    script = (
        f"import sys; sys.path.insert(0, {str(root / 'tests')!r}); exec(open({str(folder / 'program.py')!r}).read())"
    )
    runs = [
        python("-c", script, address, count, i, out, skipped, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for i in range(count)
    ]
    return [finish(run) for run in runs]


@pytest.mark.slow
def test_two_processes_train_as_one_and_refuse_batches_that_differ(tmp_path):
    in_processes(tmp_path, 1, tmp_path / "one")
    in_processes(tmp_path, 2, tmp_path / "two")
    one, two = losses(tmp_path / "one", "loss"), losses(tmp_path / "two", "loss")
    assert len(one) == 4 and two == pytest.approx(one, rel=1e-5)
    for output in in_processes(tmp_path, 2, tmp_path / "other", skipped=1):
        assert re.search(naming("processes different batches"), output), output
    assert not (tmp_path / "other/config.json").exists()
