"""Mutants of generation, conversion, data, checkpoints, runs and compiled programs that are read."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "codes of gpt-oss are read in the wrong order",
        "_E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], -1)",
        "_E2M1[np.stack([codes >> 4, codes & 15], axis=-1)].reshape(*codes.shape[:-1], -1)",
        ("tests/convert/test_quantized_import.py::test_experts_of_gpt_oss_in_mxfp4_are_the_values_of_their_codes",),
    ),
    Mutant(
        "a Stack that calls one attention twice generates tokens",
        "if any((fills > 1).any() for fills in",
        "if any((fills > 9).any() for fills in",
        (
            "tests/generation/test_errors.py::test_attention_that_a_stack_calls_twice_is_refused_however_weights_are_gathered",
        ),
    ),
    Mutant(
        "tokens wrap in int32",
        "if least < 0 or most >= 2**31:",
        "if least < 0:",
        ("tests/generation/test_errors.py::test_a_bad_argument_is_named",),
    ),
    Mutant(
        "a temperature leaves the range of float32",
        "np.float32(min(max(temperature, 1 / _HOTTEST), _HOTTEST)),",
        "np.float32(temperature),",
        ("tests/generation/test_sampling.py::test_extreme_temperatures_take_the_likeliest_token_or_all_alike",),
    ),
    Mutant(
        "all rows draw by the same random numbers",
        "jax.random.fold_in(jax.random.fold_in(key, row), place)",
        "jax.random.fold_in(key, place)",
        ("tests/generation/test_sampling.py::test_tokens_come_with_the_probabilities_of_those_that_are_left",),
    ),
    Mutant(
        "part of each head is said to be rotated, and whole heads are",
        "{_PART: content.get(_PART)}",
        "{}",
        ("tests/convert/test_conversion_errors.py::test_configurations_that_our_llama_does_not_compute",),
    ),
    Mutant(
        "a scaling of rotary frequencies without a type is dropped",
        "            if said:\n",
        "            if False:\n",
        ("tests/convert/test_conversion_errors.py::test_configurations_that_our_llama_does_not_compute",),
    ),
    Mutant(
        "contradictory rotary fields are taken",
        "if value != first[1]:",
        "if False:",
        ("tests/convert/test_conversion_errors.py::test_configurations_that_our_llama_does_not_compute",),
    ),
    Mutant(
        "a Qwen2 without max_window_layers has windows",
        '_QWEN_DENSE = {**_QWEN, "max_window_layers": 28}',
        "_QWEN_DENSE = _QWEN",
        ("tests/convert/test_families.py::test_windows_that_are_left_out_are_those_of_transformers",),
    ),
    Mutant(
        "a damaged scalar amax of a base is taken",
        "read = {array.name: array for array in arrays}",
        "read = {array.name: array for array in arrays if array.shape}",
        ("tests/models/test_base_arrays.py::test_each_part_of_a_matrix_that_differs_from_what_was_saved_is_named",),
    ),
    Mutant(
        "an imported weight may hold NaN",
        "if not np.isfinite(values).all():",
        "if False:",
        ("tests/hostile/test_hostile_files.py::test_weights_that_are_not_numbers_are_refused",),
    ),
    Mutant(
        "an average near 1 cancels in float32",
        "share = (1 - decay) / -jnp.expm1(steps.astype(jnp.float32) * (math.log(decay) if decay else -math.inf))",
        "share = (1 - decay) / (1 - jnp.float32(decay) ** steps)",
        ("tests/trainer/test_averages.py::test_the_initial_weights_do_not_count_and_the_shares_add_up_to_one",),
    ),
    Mutant(
        "a mixture takes the rows of another text",
        "which, inner = np.where(takes, text, which), np.where(takes, before, inner)",
        "which, inner = np.where(takes, text, which), np.where(takes, left, inner)",
        ("tests/data/test_rows.py::test_each_text_of_a_mixture_is_read_in_its_own_order_without_a_gap",),
    ),
    Mutant(
        "the latest step is deleted while its successor is written",
        "if step not in paths or step == max(paths) or jax.process_index() != 0:",
        "if step not in paths or jax.process_index() != 0:",
        ("tests/checkpoint/test_checkpoints_commit.py::test_a_step_is_never_pruned_before_a_later_one_counts",),
    ),
    Mutant(
        "two paths become one array on disk",
        "        if joined in names:\n",
        "        if False:\n",
        (
            "tests/checkpoint/test_checkpoints_errors.py::test_two_arrays_that_would_be_one_or_one_below_another_on_disk_are_refused",
        ),
    ),
    Mutant(
        "a digest ignores where an element lies",
        "hashes = [mixed(words * jnp.uint32(lane) ^ place) for lane in _LANES]",
        "hashes = [mixed(words * jnp.uint32(lane)) for lane in _LANES]",
        ("tests/checkpoint/test_checkpoints_integrity.py::test_a_digest_depends_on_every_element_and_on_no_mesh",),
    ),
    Mutant(
        "padding counts in a digest",
        "hashes = [jnp.where(within, one, 0) for one in hashes]",
        "hashes = list(hashes)",
        ("tests/nn/test_padded.py::test_a_checkpoint_is_logical_and_moves_between_meshes",),
    ),
    Mutant(
        "copies of a replicated array may differ",
        "if (first * np.uint32(copies) != all_copies).any():",
        "if False:",
        (
            "tests/checkpoint/test_checkpoints_integrity.py::test_copies_of_an_array_that_differ_are_an_error_by_path_and_no_step",
        ),
    ),
    Mutant(
        "weighted texts of which one contains another are trained on what is held out",
        "if inner.is_relative_to(place):",
        "if False:",
        ("tests/trainer/test_data_formats.py::test_what_cannot_be_read_is_refused_before_anything_is_written",),
    ),
    Mutant(
        "files that no run has written are deleted",
        "            if foreign:\n",
        "            if False:\n",
        (
            "tests/trainer/test_train_errors.py::test_what_a_run_would_write_or_delete_is_left_alone_where_no_run_has_written_it",
        ),
    ),
    Mutant(
        "streams delete what a guard protects",
        "self._check_guard()  # because",
        "pass  # because",
        ("tests/checkpoint/test_checkpoints_streams.py::test_streams_delete_nothing_if_the_guard_forbids_it",),
    ),
    Mutant(
        "a negative number of positions is exported",
        "if max_positions is not None and (type(max_positions) is not int or max_positions < 1):",
        "if False:",
        ("tests/convert/test_conversion_errors.py::test_arguments_out_of_range",),
    ),
    Mutant(
        "tokenizers with the same ids count as the same",
        "return mine == _definition(from_buffer(other))",
        'return mine["model"]["vocab"] == _definition(from_buffer(other))["model"]["vocab"]',
        ("tests/data/test_tokens_encoding.py::test_with_the_same_ids_every_other_part_counts",),
    ),
    Mutant(
        "a run that has lost its lock goes on writing",
        "if found[:_TOKEN_DIGITS] != self.token:",
        "if False:",
        ("tests/trainer/test_lock.py::test_who_has_lost_the_lock_publishes_prunes_and_logs_nothing",),
    ),
    Mutant(
        "records are trained on as the text that encodes them",
        'LINES = (".jsonl", ".ndjson")',
        'LINES = (".lines",)',
        ("tests/data/test_text_files.py::test_documents_are_the_texts_of_records_and_not_their_encoding",),
    ),
    Mutant(
        "one row of a base of one row is read",
        "row = begin if self._stacked else None",
        "row = begin if self.rows == 1 else None",
        ("tests/models/test_base_arrays.py::test_a_single_matrix_is_that_which_was_saved",),
    ),
    Mutant(
        "all experts share a scale in NVFP4",
        """return f"{self.path.rpartition('kernel')[0]}{self.layer}.{self.expert}\"""",
        """return f"{self.path.rpartition('kernel')[0]}{self.layer}\"""",
        ("tests/convert/test_experts_round_trip.py::test_weights_that_share_a_scale_are_of_one_expert",),
    ),
    Mutant(
        "a combined collective counts its first array alone",
        "operands=tuple(shape for name in inner.operands for shape in scope[name].shapes)",
        "operands=tuple(shape for name in inner.operands[:1] for shape in scope[name].shapes)",
        (
            "tests/hlo/test_collectives_counts.py::test_a_combined_collective_counts_every_array_with_its_bytes_and_dtype",
        ),
    ),
    Mutant(
        "where a ragged all-to-all writes counts as sent",
        'return self.operands[:1] if self.kind == "ragged-all-to-all" else self.operands',
        "return self.operands",
        (
            "tests/hlo/test_collectives_counts.py::test_of_a_ragged_all_to_all_rows_count_once_and_where_they_begin_does_not",
        ),
    ),
)
