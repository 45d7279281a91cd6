"""Mutants of layers, experts and sequences that ranks divide."""

from __future__ import annotations

from .mutant import Mutant

_RECORDED = "tests/convert/test_recorded_models.py"
_DIVIDED = "tests/parity/test_divided_sequences.py"

MUTANTS = (
    Mutant(
        "an MLP in FP8 with another activation runs as SwiGLU",
        "ours and self.activation is jax.nn.silu and",
        "ours and",
        ("tests/recipes/test_swiglu_as_one.py::test_other_layers_run_one_after_another",),
    ),
    Mutant(
        "an MLP in FP8 takes its first kernel for the gate, whatever its name",
        ' and up.names == ("gate", "up")',
        "",
        ("tests/recipes/test_swiglu_as_one.py::test_replaced_parts_run_as_they_are",),
    ),
    Mutant(
        "codes of inputs are made under policies that do not save them",
        "with named_values_saved(remat in _SAVE_NAMED):",
        "with named_values_saved(True):",
        ("tests/recipes/test_kept_codes.py::test_by_default_codes_are_kept_where_the_policy_saves_them",),
    ),
    Mutant(
        "every layer of a stack gets the arguments of the first",
        "link.remat, shared, each[start])",
        "link.remat, shared, each[0])",
        ("tests/nn/test_stack_factory.py::test_each_layer_gets_arguments_of_its_own_also_where_layers_run_in_a_loop",),
    ),
    Mutant(
        "a token that is generated sees all cached tokens in layers with a window",
        "causal=True, window=window, query_position=places",
        "causal=True, window=None, query_position=places",
        (f"{_RECORDED}::test_logits_and_greedy_tokens_on_a_mesh_are_those_of_transformers",),
    ),
    Mutant(
        "every tp rank adds the biases of experts",
        "shares = shares * (lax.axis_index(tensor) == 0)",
        "shares = shares * 1",
        (f"{_RECORDED}::test_logits_and_greedy_tokens_on_a_mesh_are_those_of_transformers",),
    ),
    Mutant(
        "a layer that sets a parameter on its rank loses it",
        "if not isinstance(v, Cache) and any(id(leaf)",
        "if not isinstance(v, Cache | nnx.Param) and any(id(leaf)",
        (
            "tests/chain/test_stack_on_a_mesh.py::test_a_parameter_that_a_layer_in_local_view_writes_is_refused_under_a_mesh",
        ),
    ),
    Mutant(
        "a layer of a chain that sets a gathered weight loses it",
        "    if _ids(before) == _ids(after):",
        "    if True:",
        (
            "tests/chain/test_stack_on_a_mesh.py::test_a_gathered_weight_that_a_layer_of_a_chain_sets_is_refused_and_others_are_read",
        ),
    ),
    Mutant(
        "a layer of a chain that appends to a list of its own is not noticed",
        "return type(value), [_form(one) for one in value]",
        "return type(value), value",
        (
            "tests/meaning/test_arrays_of_modules.py::test_what_a_call_does_to_an_attribute_is_refused_by_name_where_it_would_be_lost",
        ),
    ),
    Mutant(
        "backward runs through all layers below those that are trained",
        "return _Trained(tuple(frozen), next(wanted, 0))",
        "return _Trained(tuple(frozen), 0)",
        ("tests/hook/test_ways_to_call.py::test_backward_ends_at_the_first_block_that_is_trained",),
    ),
    Mutant(
        "a new array in a gathered weight is taken for the old one",
        "found = {path: [next(returned) for _ in arrays] for path, arrays in after.items()}",
        "found = held",
        (
            "tests/meaning/test_writes_in_a_step.py::test_a_layer_of_a_stack_may_not_set_a_gathered_weight_and_may_pass_it_through_remat",
        ),
    ),
    Mutant(
        "a None that is passed to a Stack is dropped",
        "args, kwargs = shared.arguments([])",
        "args, kwargs = (), {}",
        ("tests/meaning/test_plain_inputs.py::test_they_reach_every_layer_of_a_stack",),
    ),
    Mutant(
        "rows of a padded table are sent for few tokens",
        "not (layout.takes_part or layout.shard_padding.size)",
        "not layout.takes_part",
        ("tests/nn/test_embed_rows.py::test_rows_of_a_padded_table_are_those_of_one_device",),
    ),
    Mutant(
        "cross_entropy partitions dimension 2 whatever the rank of the logits",
        "tokens = (*by_token, *(None,) * (targets.ndim - len(by_token)))",
        "tokens = (*by_token, *(None,) * (2 - len(by_token)))",
        (
            "tests/nn/test_cross_entropy.py::test_logits_of_any_rank_and_any_batch_have_the_loss_and_gradient_of_the_formula",
        ),
    ),
    Mutant(
        "the loss of a token of weight zero reaches the sum",
        "targets = jnp.where(weights == 0, -1, to_index(jnp.asarray(targets)))",
        "targets = to_index(jnp.asarray(targets))",
        ("tests/nn/test_cross_entropy.py::test_a_weight_of_zero_leaves_a_token_out_even_if_its_logits_are_not_finite",),
    ),
    Mutant(
        "whole logits inside a shard_map are taken for parts",
        "return width != vocab_size, vocab_size",
        "return True, vocab_size",
        ("tests/nn/test_cross_entropy.py::test_inside_a_shard_map_sharded_and_whole_logits_give_the_same",),
    ),
    Mutant(
        "an id outside the table gets another token's row",
        'return jnp.where(inside[..., None], jnp.take(table, ids, axis=0, mode="clip"), jnp.nan)',
        'return jnp.take(table, ids, axis=0, mode="clip")',
        ("tests/ops/test_embedding_lookup.py::test_rows_are_those_of_the_table_to_the_bit_and_of_nan_for_ids_outside",),
    ),
    Mutant(
        "an unsigned id wraps",
        "ids = jnp.minimum(ids, min(jnp.iinfo(ids.dtype).max, jnp.iinfo(dtype).max))",
        "ids = ids",
        ("tests/nn/test_ids.py::test_ids_of_every_integer_type_are_compared_as_numbers",),
    ),
    Mutant(
        "a target outside the vocabulary has a finite loss",
        "return jnp.where(targets < vocab_size, losses, jnp.nan), (logits",
        "return losses, (logits",
        ("tests/nn/test_ids.py::test_a_bad_target_makes_the_loss_nan_and_leaves_every_gradient_finite",),
    ),
    Mutant(
        "gradients of an embedding are summed in bfloat16",
        "wide = table.astype(jnp.promote_types(table.dtype, jnp.float32))\n",
        "wide = table\n",
        ("tests/ops/test_embedding_lookup.py::test_gradient_of_a_frequent_row_is_the_exact_sum_rounded_once",),
    ),
    Mutant(
        "an adapter goes to one place of a shared layer",
        "others.setdefault(first, f\"layer that is also {'.'.join(words)}\")",
        "pass",
        ("tests/hook/test_lora.py::test_what_is_no_projection_of_its_own_is_refused",),
    ),
    Mutant(
        "a sharded weight that the recipe quantizes is frozen as values",
        "if recipe is not None:\n        _refuse_sharded(",
        "if False:\n        _refuse_sharded(",
        ("tests/hook/test_lora.py::test_a_recipe_that_quantizes_a_sharded_weight_is_refused_where_it_is_frozen",),
    ),
    Mutant(
        "a loss that sets a parameter loses it",
        "if _changed(before, _held(model)):",
        "if False:",
        ("tests/meaning/test_writes_in_a_step.py::test_what_is_written_to_a_parameter_is_refused_by_its_path",),
    ),
    Mutant(
        "an array is broadcast to a weight",
        "if len(given) <= len(held) and all(a in (1, b)",
        "if False and all(a in (1, b)",
        ("tests/nn/test_plain_path.py::test_an_array_that_would_be_repeated_is_refused",),
    ),
    Mutant(
        "a chain's link and a call in it share a key",
        "return _folded(words, _LINK) if link else words",
        "return words",
        ("tests/nn/test_rounding_keys.py::test_no_key_of_a_call_is_that_of_a_chains_link_or_of_a_call_in_one",),
    ),
    Mutant(
        "a sequence that tp does not divide is cut off",
        '    if rest:\n        raise ValueError(\n            f"an input of shape',
        '    if False:\n        raise ValueError(\n            f"an input of shape',
        (
            "tests/nn/test_sequence_in_parts.py::test_a_sequence_that_tp_does_not_divide_is_refused_behind_a_row_parallel_layer",
        ),
    ),
    Mutant(
        "partial sums of more than two parts are added in the dtype of the gradient",
        "return dtype if degree(axis) <= 2 else jnp.promote_types(dtype, jnp.float32)",
        "return dtype",
        ("tests/nn/test_sequence_in_parts.py::test_more_than_two_parts_lose_nothing_of_a_bfloat16_weight_gradient",),
    ),
    Mutant(
        "sums between CPU processes are reduce-scatters of gloo",
        "return jnp.sum(lax.all_to_all(parts, axes, 0, 0), axis=0)",
        "return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)",
        ("tests/collectives/test_over_gloo.py::test_no_reduce_scatter_is_left_in_a_step_between_processes",),
    ),
    Mutant(
        "a balance term is too large by the number of tokens",
        "            weight /= logits.shape[0] * degrees(batch) * length\n",
        "            weight /= 1\n",
        (
            "tests/experts/test_balance_in_global_view.py::test_a_step_adds_the_mean_of_each_term_over_tokens_and_refuses_a_loss_of_the_other_kind",
        ),
    ),
    Mutant(
        "a term of the other kind of loss is added",
        "if not isinstance(module, MoE) or module.loss_reduction == reduction or not module.added_terms:",
        "if True:",
        (
            "tests/experts/test_balance_in_global_view.py::test_a_step_adds_the_mean_of_each_term_over_tokens_and_refuses_a_loss_of_the_other_kind",
        ),
    ),
    Mutant(
        "rounds of a rank's experts after the first are dropped",
        "rounds = jnp.maximum(1, -(-one.ends[-1] // one.size))",
        "rounds = jnp.int32(1)",
        ("tests/experts/test_expert_ranks.py::test_every_routing_agrees_with_every_token_through_every_expert",),
    ),
    Mutant(
        "router biases move towards the load",
        "return value - self.rate *",
        "return value + self.rate *",
        ("tests/experts/test_routing.py::test_a_step_moves_biases_by_the_load_of_all_microbatches_and_ranks_once",),
    ),
    Mutant(
        "codes of another format are multiplied",
        "if x.codes.format != FP8_E4M3:",
        "if False:",
        ("tests/ops/test_places.py::test_codes_of_another_format_are_refused",),
    ),
    Mutant(
        "a layer that sets its parameters in every call is trained",
        "if isinstance(module, nnx.WeightNorm | nnx.SpectralNorm):",
        "if False:",
        ("tests/meaning/test_modules_that_write.py::test_a_step_which_would_drop_what_they_set_refuses_them",),
    ),
    Mutant(
        "layers of a Stack have the arrays of the first",
        "lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)",
        "lax.dynamic_index_in_dim(stack, 0 * index, 0, keepdims=False)",
        ("tests/meaning/test_arrays_of_modules.py::test_every_layer_of_a_stack_has_its_own",),
    ),
    Mutant(
        "layers of a Stack round by the same key",
        "first = key[0] + jnp.arange(length, dtype=jnp.uint32)",
        "first = key[0] + jnp.zeros(length, jnp.uint32)",
        ("tests/nn/test_rounding_keys.py::test_layers_of_a_stack_round_by_keys_of_their_own",),
    ),
    Mutant(
        "every activation counts as a sequence",
        "return self.sequence_parallel and ndim > 2",
        "return self.sequence_parallel and ndim > 1",
        ("tests/nn/test_ranks_of_inputs.py::test_experts_have_the_value_and_gradient_of_their_formula",),
    ),
    Mutant(
        "a balance term counts once per tensor rank",
        "weight /= loss_copies(self.roles)\n",
        "weight /= 1\n",
        ("tests/nn/test_ranks_of_inputs.py::test_experts_have_the_value_and_gradient_of_their_formula",),
    ),
    Mutant(
        "a token of infinite scores leaves its groups",
        "size = grouped.shape[-1]\n        own =",
        "size = grouped.shape[-1]\n"
        "        inside = jnp.any(taken[..., None] == jnp.arange(self.num_groups), axis=-2)[..., None]\n"
        "        kept = jnp.reshape(jnp.where(inside, grouped, -jnp.inf), scores.shape)\n"
        "        return lax.top_k(kept, top_k)[1]\n"
        "        own =",
        ("tests/experts/test_expert_ranks.py::test_no_score_takes_a_token_out_of_its_groups",),
    ),
    Mutant(
        "results for several parts of the keys count equally",
        "jnp.exp(own - lse), 1, 2)",
        "jnp.exp(0 * (own - lse)), 1, 2)",
        (f"{_DIVIDED}::test_ranks_that_do_not_divide_heads_exchange_keys_and_halves_of_queries",),
    ),
    Mutant(
        "queries of a rank attend to a part of later keys",
        "of_earlier = lax.axis_index(axis) // 2",
        "of_earlier = (lax.axis_index(axis) + 1) // 2",
        (f"{_DIVIDED}::test_ranks_that_do_not_divide_heads_exchange_keys_and_halves_of_queries",),
    ),
    Mutant(
        "gradients of copies of a key head are summed in bfloat16",
        "jnp.repeat(x.astype(wide), ranks // heads, axis=2)",
        "jnp.repeat(x, ranks // heads, axis=2)",
        (f"{_DIVIDED}::test_the_gradients_of_copies_of_a_key_head_are_summed_in_float32",),
    ),
)
