"""Mutants of operations, weights and recipes."""

from __future__ import annotations

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "backward of an MLP in FP8 scales hidden by the amax of the gradient",
        "gate_up, of_hidden, hidden_amax, gradient_amax, options",
        "gate_up, of_hidden, gradient_amax, gradient_amax, options",
        ("tests/ops/test_swiglu_fp8.py::test_it_is_two_matmuls_with_swiglu_between_them_bit_for_bit",),
    ),
    Mutant(
        "gate and up of one rank's part are taken for those of all parts",
        "jnp.reshape(gate_up, (rows, parts, columns // parts))",
        "jnp.reshape(gate_up, (rows, 1, columns))",
        ("tests/recipes/test_swiglu_as_one.py::test_loss_and_gradients_are_those_of_the_layers_one_after_another",),
    ),
    Mutant(
        "a scale around 0 multiplies by itself",
        "(normed * (1 + factor if zero_centered else factor))",
        "(normed * factor)",
        ("tests/ops/test_norm.py::test_a_zero_centered_scale_is_what_a_factor_exceeds_one_by",),
    ),
    Mutant(
        "a query that sees no key gets the mean of all values",
        "far = self.window is not None and queries >= keys + self.window",
        "far = False",
        (
            "tests/ops/test_attention.py::test_queries_beyond_the_window_of_all_keys_have_no_output_and_give_no_gradient",
        ),
    ),
    Mutant(
        "attention in FP8 does not round its weights",
        "rounded = _in_e4m3(weights, SCALE_OF_WEIGHTS).astype(jnp.float32)",
        "rounded = (weights * SCALE_OF_WEIGHTS).astype(jnp.float32)",
        ("tests/ops/test_attention_fp8.py::test_forward_is_that_of_rounded_operands_weights_and_outputs",),
    ),
    Mutant(
        "documents of a row see earlier ones",
        "same = (of_queries[:, :, None] == of_keys[:, None, :])[:, None]",
        "same = (of_queries[:, :, None] >= of_keys[:, None, :])[:, None]",
        ("tests/nn/test_attention_views.py::test_module_without_a_mesh_is_its_formula",),
    ),
    Mutant(
        "keys that fill the last block up are seen",
        "if self.padded[1] > self.lengths[1]:",
        "if False:",
        ("tests/ops/test_attention_blocks.py::test_output_and_gradients_are_those_of_one_query_at_a_time",),
    ),
    Mutant(
        "blocks of keys that only some queries of a block see are left out",
        "seen &= columns <= last_row",
        "seen &= columns <= rows",
        ("tests/ops/test_attention_blocks.py::test_output_and_gradients_are_those_of_one_query_at_a_time",),
    ),
    Mutant(
        "a query that sees no key makes gradients of blocks NaN",
        "return jnp.where(jnp.isneginf(lse), 0, lse)",
        "return lse",
        (
            "tests/ops/test_attention_blocks.py::test_log_sum_exp_is_minus_infinity_where_nothing_is_seen_and_has_a_gradient_elsewhere",
        ),
    ),
    Mutant(
        "all blocks drop the same weights",
        "pair[0] * (self.padded[1] // self.options.sides[1]) + pair[1])",
        "0)",
        (
            "tests/ops/test_attention_blocks.py::test_dropout_drops_the_same_weights_in_backward_and_others_in_each_block",
        ),
    ),
    Mutant(
        "positions go on from document to document",
        "return place - lax.cummax(",
        "return place - 0 * lax.cummax(",
        ("tests/ops/test_attention.py::test_positions_begin_again_with_each_document",),
    ),
    Mutant(
        "a window has one key too many",
        "jnp.abs(ahead) < window",
        "jnp.abs(ahead) <= window",
        ("tests/nn/test_attention_views.py::test_module_without_a_mesh_is_its_formula",),
    ),
    Mutant(
        "YaRN does not scale queries and keys",
        "cos, sin = cos * scaling.amplitude, sin * scaling.amplitude",
        "pass",
        ("tests/convert/test_families.py::test_yarn_has_the_frequencies_and_the_factor_of_transformers",),
    ),
    Mutant(
        "a tile of one kernel begins within another kernel",
        "return (*(-(-rows // RUN) * RUN for rows in self.rows[:-1]), self.rows[-1])",
        "return self.rows",
        ("tests/ops/test_linear_fp8_blocks.py::test_kernels_that_share_codes_have_tiles_and_features_of_their_own",),
    ),
    Mutant(
        "kernels for all GPUs multiply where those for Hopper could",
        "TABLE = (HOPPER_TILES, HOPPER_FP8, HOPPER, PALLAS, XLA)",
        "TABLE = (HOPPER_TILES, HOPPER_FP8, PALLAS, HOPPER, XLA)",
        ("tests/ops/test_grouped_matmul.py::test_the_first_implementation_that_takes_a_problem_is_picked",),
    ),
    Mutant(
        "a user's wire with another format is dropped in a Stack",
        "if wire.format != form:",
        "if False:",
        ("tests/weights/test_wires.py::test_a_wire_of_ones_own_that_is_not_what_was_asked_for_is_refused",),
    ),
    Mutant(
        "shared inputs' gradients are summed in bfloat16",
        "return [jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in floats]",
        "return [jnp.zeros(leaf.shape, leaf.dtype) for leaf in floats]",
        ("tests/chain/test_inputs_and_outputs.py::test_gradients_of_shared_floats_are_summed_in_float32",),
    ),
    Mutant(
        "stochastic rounding is biased",
        "(octets.astype(jnp.float32) + 0.5) * (1 / 256)",
        "octets.astype(jnp.float32) * (1 / 256)",
        ("tests/ops/test_stochastic_rounding.py::test_it_is_unbiased_and_biased_variants_are_told_apart",),
    ),
    Mutant(
        "a model of another mesh is used",
        "if built == here:",
        "if True:",
        ("tests/nn/test_errors_messages.py::test_a_model_is_refused_under_another_mesh_than_its_own",),
    ),
    Mutant(
        "a recipe's pattern without a match is passed over",
        "if not matched:\n            frozen",
        "if False:\n            frozen",
        ("tests/recipes/test_recipe_errors.py::test_recipes_that_speak_of_what_a_model_lacks_are_refused",),
    ),
    Mutant(
        "a recipe's pattern behind others is passed over",
        "if all(any(matches(ahead, path) for ahead in patterns[:index]) for path in matched):",
        "if False:",
        (
            "tests/recipes/test_recipe_errors.py::test_the_remedy_for_a_pattern_without_effect_is_possible_and_names_only_patterns_of_its_modules",
        ),
    ),
    Mutant(
        "a second derivative through rounded operands is that of no operand",
        'raise TypeError(SECOND_DERIVATIVE.format(f"`{operation}`"))',
        "return primals[0], tangents[0]",
        ("tests/hook/test_recipe_refusals.py::test_second_derivatives_of_fp8_matmuls_are_refused",),
    ),
    Mutant(
        "the gradient of a head is summed over chunks in bfloat16",
        "jnp.zeros(head.weight.shape, wide) if wanted.weight else None",
        "jnp.zeros(head.weight.shape, x.dtype) if wanted.weight else None",
        ("tests/nn/test_linear_cross_entropy.py::test_in_bfloat16_statistics_and_the_sum_over_chunks_are_in_float32",),
    ),
    Mutant(
        "tokens of two chunks count twice",
        "own = jnp.where(jnp.arange(size) + first < begin, -1, own)",
        "own = jnp.where(False, -1, own)",
        (
            "tests/nn/test_linear_cross_entropy.py::test_two_derivatives_equal_the_formula_whatever_the_options_and_the_last_chunk",
        ),
    ),
)
