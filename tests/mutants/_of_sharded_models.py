"""Mutants of models that `gtp_jax.shard` has sharded."""

from __future__ import annotations

from .mutant import Mutant

_DELAYED = (
    "tests/recipes/test_fp8_delayed.py::test_a_sharded_model_of_stock_layers_has_the_history_and_losses_of_own_layers"
)

MUTANTS = (
    Mutant(
        "a loss reads a rank's shard",
        "if placement is not None and placement.gathered:\n        where, remedy",
        "if False:\n        where, remedy",
        ("tests/hook/test_reads.py::test_a_loss_that_reads_a_weight_is_refused_and_may_read_the_shard",),
    ),
    Mutant(
        "a closure within a call reads a rank's shard",
        "placement = placement_of(variable) if on_parts() else None",
        "placement = placement_of(variable) if on_parts() and not is_within_unit() else None",
        ("tests/hook/test_reads.py::test_a_block_that_reaches_the_shards_of_another_module_by_a_function_is_refused",),
    ),
    Mutant(
        "without the hook, ranks compute with shards",
        "for path, node in nodes.items() if on_parts() and not is_within_unit() else ():",
        "for path, node in ():",
        (
            "tests/hook/test_models_stay_theirs.py::test_without_the_hook_local_view_is_refused_because_each_rank_would_compute_with_its_shard",
        ),
    ),
    Mutant(
        "weights with the same path are rounded by the same bits",
        "CallKeys(key_for(key, place))",
        'CallKeys(key_for(key, variable.get_metadata()["weight_paths"].each[0]))',
        ("tests/hook/test_recipe_products.py::test_weights_with_the_same_path_are_rounded_by_bits_of_their_own",),
    ),
    Mutant(
        "weights with the same path share codes",
        "return str(tuple(place))",
        "return str(tuple(place)[-2:])",
        (
            "tests/hook/test_quantized_once.py::test_modules_with_the_same_path_keep_their_own_codes_and_share_those_of_a_layer_in_common",
        ),
    ),
    Mutant(
        "a second call of shard ignores its options",
        "if asked not in (used[name], defaults[name]):",
        "if False:",
        ("tests/hook/test_shard_errors.py::test_a_second_call_refuses_options_that_differ_from_those_of_the_first",),
    ),
    Mutant(
        "blocks of a second call of shard are ignored",
        "if set(map(id, asked.values())) != set(map(id, used.values())):",
        "if False:",
        ("tests/hook/test_shard_errors.py::test_a_second_call_refuses_options_that_differ_from_those_of_the_first",),
    ),
    Mutant(
        "a partition without axes loses to an annotation",
        "named = annotation(variable) if pattern is None else specs[pattern]",
        "named = annotation(variable) if pattern is None else specs[pattern] or annotation(variable)",
        (
            "tests/hook/test_axes_of_authors.py::test_rules_per_path_come_before_annotations_which_may_be_named_shardings",
        ),
    ),
    Mutant(
        "a weight keeps the first of its paths alone",
        "return {tuple(dict.fromkeys((path, *names.get(id(v), ())))): v for path, v in found.items()}",
        "return {(path,): v for path, v in found.items()}",
        ("tests/hook/test_shared_and_stacked.py::test_what_a_shared_module_shares_is_known_by_each_of_its_paths",),
    ),
    Mutant(
        "the state of an unsharded model leaves weights whole",
        "for path in stripped(nodes, placements):\n        raise",
        "for path in ():\n        raise",
        (
            "tests/hook/test_shard_errors.py::test_after_nnx_update_with_arrays_on_one_device_the_next_call_refuses_them",
        ),
    ),
    Mutant(
        "in local view, ranks compute with parts that no call gathers",
        "for path, variable in nnx.iter_graph(owner) if on_parts() else ():",
        "for path, variable in ():",
        ("tests/hook/test_axes_of_authors.py::test_in_local_view_a_part_that_no_call_gathers_is_refused",),
    ),
    Mutant(
        "a holder's weight that a block shares is gathered twice",
        "variable.set_metadata(**dict.fromkeys(stored))\n",
        "",
        (
            "tests/hook/test_shared_and_stacked.py::test_a_weight_of_the_model_itself_that_a_module_shares_is_gathered_once",
        ),
    ),
    Mutant(
        "the condition of a loop is followed with the operands of its body",
        "_followed(condition, [*read[:of_condition], *state], found)",
        "_followed(condition, [*read, *state][-len(condition.invars) :], found)",
        (
            "tests/hook/test_float32_gradients.py::test_explain_tells_the_weights_of_a_loops_condition_from_those_of_its_body",
        ),
    ),
    Mutant(
        "a stock layer behind an adapter is passed over",
        'and not getattr(type(module), "wraps_stock", False)',
        "",
        ("tests/hook/test_lora.py::test_sharding_behind_adapters_is_refused",),
    ),
    Mutant(
        "codes of a step go to another array in the variable",
        "return None if made is None else made.of(original_array(variable.get_raw_value()))",
        "return None if made is None else made.of(made._stored.shard)",
        ("tests/hook/test_quantized_once.py::test_weights_that_a_loss_has_replaced_are_quantized_anew",),
    ),
    Mutant(
        "an amax of a product that ranks repeat is that of a rank's share of the gradient",
        "shares = jax.sharding.get_abstract_mesh().size // degrees(parted) if in_global else 1",
        "shares = 1",
        (_DELAYED,),
    ),
    Mutant(
        "a sharded weight is multiplied with the scale of its own amax",
        "codes, of_weight = fp8_codes_and_slot(weight, amaxes[1])",
        "codes, of_weight = fp8_codes_and_slot(weight)",
        (_DELAYED,),
    ),
    Mutant(
        "codes of a sharded weight have the scale of its own amax",
        "given[name] = amaxes[path]",
        "pass",
        (_DELAYED,),
    ),
    Mutant(
        "layers that a scan takes from a stacked weight share a scale",
        'if placement.ndim < variable.get_metadata()["placement"].ndim:',
        "if False:",
        ("tests/recipes/test_fp8_delayed.py::test_what_cannot_be_scaled_by_earlier_steps_is_refused_by_name",),
    ),
    Mutant(
        "gradients of a block's weights are not summed in local view",
        "gradient = reduce_scatter(gradient, axes, dim=dim)",
        "gradient = jnp.split(gradient, lax.axis_size(axes), dim)[0]",
        ("tests/hook/test_axes_of_authors.py::test_in_local_view_tensor_ranks_gather_whole_weights",),
    ),
    Mutant(
        "other gradients of an exchanged weight are dropped",
        "own.astype(found[i].dtype) + found[i]",
        "found[i]",
        (
            "tests/hook/test_exchanged_gradients.py::test_a_weight_has_the_sum_of_the_gradients_of_its_products_and_of_its_other_uses",
        ),
    ),
    Mutant(
        "a method that nnx.jit decorates runs without the hook",
        'return callable(member) and hasattr(type(member), "__get__")',
        "return inspect.isfunction(member)",
        ("tests/hook/test_ways_to_call.py::test_a_block_whose_method_is_decorated_gathers_and_quantizes_as_others_do",),
    ),
    Mutant(
        "a node that a unit returns twice becomes two",
        "template, leaves = split_nodes(nodes)\n    a",
        "template, leaves = split_nodes(list(map(nnx.clone, nodes)))\n    a",
        (
            "tests/hook/test_what_blocks_write.py::test_what_new_nodes_share_when_a_block_returns_them_they_share_afterwards",
        ),
    ),
    Mutant(
        "what a recorded model writes to a weight is taken for a gathered weight",
        "stored=lambda _, value: value)",
        'stored=__import__("gtp_jax.hook._trace", fromlist="_").stored_part)',
        ("tests/hook/test_padded.py::test_a_weight_that_a_call_writes_is_padded_again",),
    ),
    Mutant(
        "effects between calls of blocks are reordered",
        "if eqn.effects and not is_call(eqn):",
        "if False:",
        (
            "tests/meaning/test_side_effects.py::test_a_reference_is_read_and_written_between_blocks_in_the_order_of_the_code",
        ),
    ),
    Mutant(
        "gradients of other uses of a weight are dropped where its products have a slot",
        "if i not in apart or i in self._used}",
        "if i not in apart}",
        (
            "tests/hook/test_exchanged_gradients.py::test_a_weight_has_the_sum_of_the_gradients_of_its_products_and_of_its_other_uses",
        ),
    ),
)
