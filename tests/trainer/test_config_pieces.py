"""A configuration is composed of pieces; flags and files of settings name their fields as if they were its own."""

from __future__ import annotations

import json
import re

import pytest
from messages import naming

from gtp_jax.inspect import InspectOptions
from gtp_jax.runner.flags import (
    Execution,
    Parallelism,
    Quantization,
    from_settings,
    knobs,
    settings_of,
)
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._loss_chunk import choose_loss_chunk
from gtp_jax.runner.trainer._train_flags import padded_seq

CONFIG = TrainConfig(
    steps=7,
    parallelism=Parallelism(dp=2, tp=2),
    execution=Execution(microbatches=2, keep_gathered="all", prefetch=False, loss_chunk=64),
    quantization=Quantization(recipe="nvfp4", override=("mlp.down=fp8",)),
)


@pytest.mark.parametrize("kind", [TrainConfig, InspectOptions])
def test_settings_make_the_same_configuration_and_no_name_stands_twice(kind):
    names = [field.name for field in knobs(kind)]
    assert len(set(names)) == len(names)
    assert from_settings(kind, settings_of(kind())) == kind()


def test_a_saved_configuration_is_flat_and_loads_as_it_was(tmp_path):
    CONFIG.save(tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["dp"], saved["keep_gathered"], saved["recipe"], saved["steps"]) == (2, "all", "nvfp4", 7)
    assert TrainConfig.load(tmp_path / "config.json") == CONFIG


def test_a_model_gets_the_fields_of_its_execution():
    assert {name: getattr(CONFIG.model(256, dtype="float32"), name) for name in CONFIG.execution.of_model} == {
        **{"prefetch": False, "unroll": "full", "keep_gathered": "all", "grad_reduce": "float32"},
        **{"remat": "matmuls", "sequence_exchange": None, "loss_chunk": 64},
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Execution(microbatches=True), "`microbatches` True 1"),
        (lambda: TrainConfig(seed=1 << 32), "`seed` 4294967296 0 4294967295"),
        (lambda: TrainConfig(dtype="int8"), "`dtype` 'int8' float32 bfloat16"),
    ],
)
def test_values_out_of_range_are_refused_by_the_piece_that_has_them(make, message):
    with pytest.raises(ValueError, match=naming(message)):
        make()


@pytest.mark.parametrize("knob", [knob for knob in knobs(TrainConfig) if knob.metadata["type"] in (int, float)])
def test_no_number_is_too_large_to_be_refused(knob):
    with pytest.raises(ValueError) as caught:
        from_settings(TrainConfig, {knob.name: 10**400})
    assert re.search(naming("100000000000000000...0000000000000000000"), str(caught.value))
    assert re.search("from [01] to (9223372036854775807|4294967295)|at most 3.402823e.38|above 0", str(caught.value))


@pytest.mark.parametrize(("changes", "tp"), [({}, 2), ({"seq": 31}, 1), ({"num_heads": 3, "num_kv_heads": 1}, 1)])
def test_virtual_devices_have_tp_2_where_it_divides_heads_and_sequence(changes, tp):
    config = from_settings(TrainConfig, changes)
    assert config.degrees(8, virtual=True) == {"dp": 1, "gtp": 8 // tp, "tp": tp}
    assert config.degrees(8, virtual=False)["tp"] == 1


def test_rows_that_cp_does_not_divide_are_padded_but_not_those_of_experts():
    changes = {"cp": 2, "seq": 31, "gtp": 2}
    degrees = from_settings(TrainConfig, {**changes, "tp": 2}).degrees(8, virtual=True)
    assert degrees == {"dp": 1, "gtp": 2, "cp": 2, "tp": 2}
    assert [padded_seq(31, degrees), padded_seq(32, degrees), padded_seq(31, {"gtp": 8, "tp": 2})] == [32, 32, 31]
    with pytest.raises(ValueError, match=naming("`seq` 31 cp 2")):
        from_settings(TrainConfig, {**changes, "preset": "tiny-moe"}).degrees(4, virtual=False)
    with pytest.raises(ValueError, match=naming("`seq` 31 tp 2")):
        from_settings(TrainConfig, {"seq": 31, "tp": 2}).degrees(8, virtual=False)


def test_the_loss_has_chunks_where_all_logits_take_more_than_an_eighth_of_memory_unless_the_settings_say():
    """At gtp 2, cp 2, tp 2 and two microbatches: 4 x 32 / 4 / 2 tokens, 128 logits of 4 bytes, twice."""
    degrees = {"dp": 1, "gtp": 2, "cp": 2, "tp": 2}
    logits, changes = 2 * 16 * 128 * 4, {"batch": 4, "seq": 32, "microbatches": 2}

    def chosen(memory, **more):
        config = from_settings(TrainConfig, {**changes, **more})
        return choose_loss_chunk(config, config.model(256, dtype="float32"), degrees, memory)

    chunk, why = chosen(8 * logits - 1)
    assert chunk == 4096 and re.search(naming("4096 16.4 kB 1/8 131 kB --loss-chunk 0"), why)
    assert chosen(8 * logits) == chosen(None) == chosen(1, loss_chunk=0) == (0, "")
    assert chosen(1, loss_chunk=64) == (64, "")


@pytest.mark.parametrize("faults", [{"failed_devices": [3]}, {"replica_batches": [4, 4]}])
def test_failures_are_refused_where_the_healthy_grid_is_not_said(faults):
    ((name, value),) = faults.items()
    config = from_settings(TrainConfig, {"dp": 2, **faults})
    for check in (lambda: config.virtual_devices(1), lambda: config.degrees(4, virtual=True)):
        with pytest.raises(ValueError, match=naming(f"`{name}` {value} --gtp --tp")):
            check()
    assert from_settings(TrainConfig, {"dp": 2, "tp": 2, "batch": 8, **faults}).virtual_devices(1) == 4
