"""Mutants of steps, and what they are given."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "the host takes each step for the one before it, and no phase ends",
        "self.numbers.remember(after.step, low, high + 1)",
        "self.numbers.remember(after.step, low, high)",
        (
            "tests/recipes/test_phases.py::"
            "test_each_step_is_that_of_its_recipe_and_the_host_reads_its_number_at_boundaries_only[False]",
        ),
    ),
    Mutant(
        "a small mean of squares in FP8 becomes zero",
        "code = jnp.where(size > 0, jnp.maximum(code, 1), code)",
        "code = jnp.where(size > 0, code, 0)",
        ("tests/optimizers/test_low_precision.py::test_updates_from_moments_in_fp8_stay_bounded",),
    ),
    Mutant(
        "the scales of a padded moment in FP8 are saved with their padding",
        "for one in (layout, row_blocks_layout(layout)) if is_padded(one)",
        "for one in (layout,) if is_padded(one)",
        (
            "tests/optimizers/test_low_precision.py::"
            "test_losses_follow_float32_and_a_resumed_run_equals_one_never_stopped[optimizer2-float32]",
        ),
    ),
    Mutant(
        "check passes finite numbers beside an infinity",
        "one, other = one[finite], other[finite]",
        "one, other = np.nan_to_num(one), np.nan_to_num(other)",
        ("tests/train/test_views_agree.py::test_check_compares_finite_numbers_next_to_those_that_are_not",),
    ),
    Mutant(
        "zero times infinity counts as zero in padding",
        "return any(zeros) and Kind.ANY not in args",
        "return any(zeros)",
        ("tests/nn/test_padded.py::test_optimizers_see_logical_arrays_and_leave_the_padding_zero",),
    ),
    Mutant(
        "the sum over a NaN number of tokens passes for the mean",
        "jnp.where(tokens == 0, 1, jnp.nan)",
        "1",
        ("tests/train/test_nonfinite_step.py::test_a_step_is_skipped_if_its_number_of_tokens_is_nan_or_negative",),
    ),
    Mutant(
        "per_layer gets padded arrays",
        "with arrays_in_scope(counts, examined=examined):",
        "with arrays_in_scope(counts, examined=True):",
        ("tests/train/test_per_layer.py::test_of_padded_weights_it_sees_each_layers_logical_array",),
    ),
    Mutant(
        "a metric passes for a count in a branch",
        "return {0, *(1 + number for numbers in branches for number in numbers)}",
        "return {1 + number for numbers in branches for number in numbers}",
        ("tests/train/test_step_contract.py::test_a_metric_that_depends_on_weights_is_refused_as_a_count",),
    ),
    Mutant(
        "a metric of codes passes for a count",
        "and not any(id(array) in needs.constants for array in made)",
        "",
        ("tests/train/test_step_contract.py::test_a_metric_that_depends_on_weights_is_refused_as_a_count",),
    ),
    Mutant(
        "an average over steps passes for a count",
        "kept = {number: after[path] for path, number in before.items() if path in after}",
        "kept: dict[int, int] = {}",
        (
            "tests/train/test_step_contract.py::test_a_count_may_come_from_variables_unless_they_are_computed_from_weights",
        ),
    ),
    Mutant(
        "scales of delayed scaling are rounded",
        'if str(value).lower() in ("false", "0"):',
        "if False:",
        ("tests/train/test_recipe_of_a_step.py::test_delayed_scales_that_xla_would_round_are_refused_on_gpus",),
    ),
    Mutant(
        "an optimizer treats layers as one tensor without a warning",
        "    if not found:\n        return\n    few",
        "    if True:\n        return\n    few",
        ("tests/train/test_per_layer.py::test_a_warning_names_the_optimizers_whose_updates_are_not_those_of_a_list",),
    ),
    Mutant(
        "a step that is not finite is not skipped",
        "skipped = ~finite if skip_nonfinite else jnp.zeros((), jnp.bool)",
        "skipped = jnp.zeros((), jnp.bool)",
        ("tests/train/test_nonfinite_step.py::test_a_step_is_skipped_if_its_number_of_tokens_is_nan_or_negative",),
    ),
    Mutant(
        "a NaN gradient is applied if the loss is finite",
        "finite if norm is None else finite & jnp.isfinite(norm)",
        "finite",
        ("tests/train/test_nonfinite_step.py::test_a_flagged_step_changes_nothing_and_the_next_goes_on_from_there",),
    ),
    Mutant(
        "backward does not wait for an update",
        "self._known |= zip(waiting, after, strict=True)",
        "pass",
        (
            "tests/train/test_offload.py::"
            "test_a_trace_is_evaluated_in_steps_and_what_follows_waits_for_what_came_between",
        ),
    ),
    Mutant(
        "a reference is read before it is written",
        "if self._in_order and numbers:",
        "if False:",
        ("tests/train/test_offload.py::test_a_trace_with_references_is_evaluated_in_its_order",),
    ),
    Mutant(
        "a skipped step updates what is on the host",
        "[lax.select(skipped, *pair) for pair in zip(given[1:], after, strict=True)]",
        "[new for _, new in zip(given[1:], after, strict=True)]",
        ("tests/train/test_offload.py::test_steps_with_the_state_on_the_host_equal_steps_without_up_to_fusion",),
    ),
    Mutant(
        "amaxes of delayed scaling are those of the last microbatch",
        "return found, (sums, jax.tree.map(jnp.maximum, amaxes, more))",
        "return found, (sums, more)",
        ("tests/recipes/test_fp8_delayed.py::test_the_history_is_that_of_one_device_bit_for_bit",),
    ),
    Mutant(
        "amaxes of delayed scaling are those of the first rank",
        "vector = jnp.max(lax.with_sharding_constraint(vector, PartitionSpec(names)), axis=0)",
        "vector = lax.with_sharding_constraint(vector, PartitionSpec(names))[0]",
        ("tests/recipes/test_fp8_delayed.py::test_the_history_is_that_of_one_device_bit_for_bit",),
    ),
    Mutant(
        "the history of delayed scaling does not move",
        "return jnp.roll(history, -1, axis=-1).at[..., 0].set(0), jnp.where",
        "return history, jnp.where",
        ("tests/recipes/test_fp8_delayed.py::test_scales_follow_from_histories_as_in_the_rule",),
    ),
    Mutant(
        "an amax that is not finite sets a scale",
        "usable = (top > 0) & jnp.isfinite(top)",
        "usable = top > 0",
        ("tests/recipes/test_fp8_delayed.py::test_scales_follow_from_histories_as_in_the_rule",),
    ),
    Mutant(
        "a diagnosis names the first layer",
        "number = (self._calls[layers] - 1) % self._lengths[layers]",
        "number = 0",
        ("tests/train/test_diagnose.py::test_a_layer_that_calls_a_module_twice_has_its_own_number",),
    ),
    Mutant(
        "moments of a padded parameter keep values in the padding",
        "return jnp.where(within, leaf, jnp.zeros((), leaf.dtype))",
        "return leaf",
        ("tests/nn/test_padded.py::test_optimizers_see_logical_arrays_and_leave_the_padding_zero",),
    ),
    Mutant(
        "a step that the caller skips is made",
        "return skipped if skip is None else skipped | skip",
        "return skipped",
        ("tests/train/test_nonfinite_step.py::test_a_flagged_step_changes_nothing_and_the_next_goes_on_from_there",),
    ),
    Mutant(
        "every rank computes what only some own",
        "lax.cond(begin >= 0,",
        "lax.cond(begin >= -1,",
        ("tests/optimizers/test_muon.py::test_arguments_mean_what_they_mean_to_optax[aol, dion]",),
    ),
    Mutant(
        "axes that divide a dimension are joined after it",
        "for i in (*map(self.divides.index, own), dim)]",
        "for i in (dim, *map(self.divides.index, own))]",
        ("tests/optimizers/test_muon.py::test_arguments_mean_what_they_mean_to_optax[aol, dion]",),
    ),
    Mutant(
        "a plan models every collective as if NVLink joined all hosts",
        "shape.chip, options.network, faster=options.faster)",
        "shape.chip, None, faster=options.faster)",
        ("tests/inspect/test_plan.py::test_degrees_that_are_given_stay_and_a_network_costs_what_crosses_hosts",),
    ),
    Mutant(
        "a wait for a collective that another holds up counts for the axes of both",
        "found[axes] -= held / 1e3",
        "found[axes] -= 0.0",
        ("tests/inspect/test_plan.py::test_a_plan_lists_the_fastest_placements_and_says_why",),
    ),
)
