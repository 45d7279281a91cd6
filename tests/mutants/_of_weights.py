"""Mutants of weights, their gradients, codes and keys, and of the sums over ranks."""

from __future__ import annotations

from .mutant import Mutant

_PLAIN = "tests/meaning/test_transformations.py::test_loss_and_gradients_are_those_of_plain_jax"
_LAYOUTS = "tests/layout/test_layouts.py::test_gathered_weights_and_scattered_gradients_are_those_of_numpy"
_PLACEMENTS = "tests/layout/test_placements.py::"
_OVER_DP = "tests/meaning/test_weights_in_a_loss.py::test_over_dp_it_means_what_it_means_without_a_mesh"
_VIEWS = "tests/nn/test_dense_views.py::test_module_in_global_view_equals_itself_without_a_mesh"
_PARITY = "tests/parity/test_llama_parity.py::test_meshes_agree_with_the_plain_model"
_EXCHANGE = "tests/recipes/test_gradient_exchange.py::test_each_element_errs_by_no_more_than_each_ranks_rounding"
_KEYS = "tests/train/test_rounding_keys.py::test_what_computes_the_same_is_rounded_by_bits_of_its_own"

MUTANTS = (
    # a fused weight and its gradient
    Mutant(
        "ranks' columns are joined as rows",
        "ahead = -3 if layout.by_rows else -2",
        "ahead = -2 if layout.by_rows else -3",
        (_LAYOUTS,),
    ),
    Mutant(
        "outputs of fused kernels are not taken apart rank by rank",
        "    ranks, sizes = fused_parts(layouts), use_rows(layouts)",
        "    ranks, sizes = 1, use_rows(layouts)",
        (f"{_VIEWS}[several kernels in blocks-gtp 4 x tp 2, sequence parallel]",),
    ),
    Mutant(
        "fused kernels' gradients are in the reverse order",
        "pieces = jnp.split(part, ends[:-1], axis=-2)\n    return tuple(\n        _as_shard",
        "pieces = jnp.split(part, ends[:-1], axis=-2)[::-1]\n    return tuple(\n        _as_shard",
        (_VIEWS,),
    ),
    Mutant(
        "the gradient in a slot is lost",
        "gradient.slot if isinstance(gradient, SlottedWeight) else gradient",
        "gradient.values if isinstance(gradient, SlottedWeight) else gradient",
        (f"{_PLAIN}[plain-list-bfloat16]",),
    ),
    Mutant(
        "a weight has no slot, so that its gradient is rounded ahead of the sum",
        "if self.frozen or weight.dtype == self.summed.slot:",
        "if True:",
        (
            "tests/nn/test_grad_reduce.py::test_no_weight_gradient_is_bfloat16_between_its_matmul_and_its_reduce_scatter",
        ),
    ),
    Mutant(
        "gradients are averaged over gtp",
        "return part if alone else reduce_scatter(part, layouts[0].axes, dim=0)",
        "return part if alone else reduce_scatter(part, layouts[0].axes, dim=0) / layouts[0].ranks",
        (f"{_PLAIN}[jax.jit-list-fp8]",),
    ),
    Mutant(
        "gradients are rounded to bfloat16 ahead of a float32 sum",
        "parts = unfuse(gradient if alone else gradient.astype(dtype), layouts)",
        "parts = unfuse(gradient if alone else gradient.astype(jnp.bfloat16).astype(dtype), layouts)",
        ("tests/nn/test_grad_reduce.py::test_a_gradient_over_the_ranks_is_the_float32_sum",),
    ),
    # what ranks of dp store
    Mutant(
        "stored parts are joined in the reverse order of ranks",
        "jnp.reshape(jnp.moveaxis(parts, 0, dim), (*x.shape[:dim], -1, *x.shape[dim + 1 :]))",
        "jnp.reshape(jnp.moveaxis(parts[::-1], 0, dim), (*x.shape[:dim], -1, *x.shape[dim + 1 :]))",
        (_OVER_DP,),
    ),
    Mutant(
        "gradients of stored parts are averaged over dp",
        "own = reduce_scatter(jnp.moveaxis(parts, dim, 0), layout.optimizer.axes, dim=0)",
        "own = reduce_scatter(jnp.moveaxis(parts, dim, 0), layout.optimizer.axes, dim=0) / layout.copies",
        (_OVER_DP,),
    ),
    Mutant(
        "gradients of whole parameters are averaged over replicas",
        "lax.psum([leaves[i] for i in members], axes)",
        "lax.pmean([leaves[i] for i in members], axes)",
        (_PARITY,),
    ),
    Mutant(
        "a placeholder has the values of a weight of zeros",
        "layout.shard_shape), jnp.nan, x.dtype)",
        "layout.shard_shape), 0, x.dtype)",
        ("tests/meaning/test_weights_in_a_loss.py::test_summed_last_a_loss_that_reads_a_weight_gets_no_number",),
    ),
    Mutant(
        "a weight that replaces a placeholder is taken",
        "        if stored.holds is Holds.PLACEHOLDER:\n            raise ValueError(",
        "        if False:\n            raise ValueError(",
        ("tests/meaning/test_weights_in_a_loss.py::test_summed_last_a_loss_that_replaces_a_weight_is_refused",),
    ),
    # codes
    Mutant(
        "an amax is that of a rank's shard",
        "whole = lax.pmax(jnp.concatenate(parts) if len(parts) > 1 else parts[0], names)",
        "whole = jnp.concatenate(parts) if len(parts) > 1 else parts[0]",
        (f"{_PLAIN}[noise-stack-fp8]",),
    ),
    Mutant(
        "an amax is that of all ranks' experts",
        "mine = jnp.reshape(part, (degrees(own), -1))[lax.axis_index(own)] if own else part",
        "mine = jnp.max(jnp.reshape(part, (degrees(own), -1)), axis=0) if own else part",
        ("tests/experts/test_expert_ranks.py::test_an_amax_is_of_one_expert_alone",),
    ),
    Mutant(
        "kernels that are multiplied as codes have scales of their own",
        "            if bundle.one_scale:",
        "            if False:",
        ("tests/recipes/test_codes_multiplied.py",),
    ),
    Mutant(
        "codes of what ranks of dp store are joined along the other dimension",
        "for rank in range(len(parts))], axis=-2 if rows else -1)",
        "for rank in range(len(parts))], axis=-1 if rows else -2)",
        ("tests/meaning/test_second_derivatives.py::test_the_gradient_of_a_penalty_is_that_of_plain_jax",),
    ),
    Mutant(
        "codes of another array are taken",
        "        if stored.shard is shard:\n",
        "        if stored.shard is not None:\n",
        (f"{_PLAIN}[noise-stack-fp8]",),
    ),
    Mutant(
        "an exchanged gradient has no scale",
        "jnp.reshape(x, part.shape).astype(jnp.float32) * scale[..., None, None]",
        "jnp.reshape(x, part.shape).astype(jnp.float32)",
        (_EXCHANGE,),
    ),
    Mutant(
        "an exchanged gradient is averaged",
        "return [jnp.sum(part, axis=0) for part in exchange(parts)]",
        "return [jnp.mean(part, axis=0) for part in exchange(parts)]",
        (_EXCHANGE,),
    ),
    Mutant(
        "a NaN becomes a number",
        "return jnp.where(_non_finite(bits), NAN_CODE, code), None",
        "return code, None",
        ("tests/ops/test_quantize_numerics.py",),
    ),
    # second derivatives
    Mutant(
        "a gathered weight does not move with its shards",
        "{name: moving.get(name, jax.tree.map(_still, own)) for name, own in weights.items()}",
        "{name: jax.tree.map(_still, own) for name, own in weights.items()}",
        (f"{_PLAIN}[Hessian-stack-bfloat16]",),
    ),
    Mutant(
        "the values of a weight do not move with its slot",
        "return primals[1], tangents[0].astype(primals[1].dtype)",
        "return primals[1], jnp.zeros_like(primals[1])",
        ("tests/ops/test_slot.py", "tests/meaning/test_second_derivatives.py"),
    ),
    # keys of stochastic rounding
    Mutant(
        "all modules round by the same key",
        'return _folded(key, np.uint32(zlib.crc32(".".join(map(str, path)).encode())))',
        "return key",
        ("tests/train/test_rounding_keys.py::test_modules_that_compute_the_same_round_by_bits_of_their_own",),
    ),
    Mutant(
        "all calls round by the same key",
        "words = _folded(self._words, number) if number else self._words\n        return _folded(words, _LINK)",
        "words = self._words\n        return _folded(words, _LINK)",
        ("tests/nn/test_rounding_keys.py",),
    ),
    Mutant(
        "all microbatches round by the same key", "key = jax.random.fold_in(key, microbatch)", "key = key", (_KEYS,)
    ),
    Mutant("all ranks round by the same key", "        key = jax.random.fold_in(key, rank)", "        pass", (_KEYS,)),
    # microbatches
    Mutant(
        "microbatches are runs of rows",
        "return jnp.swapaxes(jnp.reshape(batch, (-1, count, *batch.shape[1:])), 0, 1)",
        "return jnp.reshape(batch, (count, -1, *batch.shape[1:]))",
        (
            "tests/train/test_sums_over_microbatches.py::test_microbatch_m_has_every_row_that_follows_m_at_their_distance",
        ),
    ),
    Mutant(
        "means of microbatches are added up",
        "total, found = jax.tree.map(lambda a: a / count, (total, found))",
        "pass",
        ("tests/train/test_sums_over_microbatches.py",),
    ),
    Mutant(
        "the gradient is that of the last microbatch",
        "lambda g, new: g + new.astype(g.dtype), gradients, found",
        "lambda g, new: new.astype(g.dtype), gradients, found",
        (f"{_PARITY}[dp 2 x gtp 2, four microbatches]",),
    ),
    # order and layers
    Mutant(
        "the next layer's gather is not tied to this layer",
        "return [*([Gather(*following)] if following else []), compute, *offload, Barrier()]",
        "return [*([Gather(*following)] if following else []), compute, *offload]",
        ("tests/chain/test_plan_events.py",),
    ),
    Mutant(
        "gradients of shared inputs are those of the last layer",
        "shared = [total + one for total, one in zip(shared, to_shared, strict=True)]",
        "shared = list(to_shared)",
        ("tests/chain/test_inputs_and_outputs.py", "tests/chain/test_stack_on_a_mesh.py"),
    ),
    # tensor parallelism, experts, unequal replicas
    Mutant(
        "parts of a sequence start where another rank's do",
        "return [(own - s) % ranks * length for s in range(ranks)]",
        "return [(own + s) % ranks * length for s in range(ranks)]",
        ("tests/nn/test_sequence_in_parts.py",),
    ),
    Mutant(
        "partial products are averaged over tp",
        "        return lax.psum(y, axis)\n",
        "        return lax.pmean(y, axis)\n",
        (_VIEWS,),
    ),
    Mutant(
        "ranks with different parts of a kernel share the scales of tiles",
        "return tuple(axis for axis in (*layout.experts.axes, *layout.tensor.axes) if axis in names)",
        "return ()",
        ("tests/weights/test_expert_tiles.py::test_ranks_with_different_parts_of_a_kernel_keep_their_own_scales",),
    ),
    Mutant(
        "scales of frozen kernels in tiles are not in the order of ranks",
        "if in_order(layouts) and (group.has_experts or len(kernels) > 1):",
        "if False:",
        (
            "tests/recipes/test_frozen_tiles.py::test_codes_and_products_are_those_of_one_device_by_the_oracle"
            "[kernels of whole tiles]",
        ),
    ),
    Mutant(
        "published scales are taken for powers of two",
        "round_to_float32(significand * scale, exponent + scale_exponent)",
        "round_to_float32(significand << 23, exponent + scale_exponent)",
        ("tests/convert/test_stored_codes.py::test_a_loaded_base_has_the_published_codes_and_scales_bit_for_bit",),
    ),
    Mutant(
        "blocks of an expert's gradient begin where shards do",
        "taken=taken, order=self.group.order)",
        "taken=taken)",
        ("tests/experts/test_experts_in_blocks.py::test_steps_are_those_of_one_device[gtp 2 x tp 2 x ep 2]",),
    ),
    Mutant(
        "partial sums of tokens are added in bfloat16",
        "wide = jnp.promote_types(dtype, jnp.float32)\n    own = [",
        "wide = dtype\n    own = [",
        ("tests/experts/test_sums_of_tokens.py",),
    ),
    Mutant(
        "gradients of shares are those of one rank's experts",
        "return (functools.reduce(lax.add, list(back)),)",
        "return (back[0],)",
        ("tests/experts/test_expert_ranks.py::test_every_routing_agrees_with_every_token_through_every_expert",),
    ),
    Mutant(
        "ranks of tp count a replica's gradient again",
        "found = self._cast(jax.tree.map(lambda g: g / copies, found), self._sent_back)",
        "found = self._cast(found, self._sent_back)",
        ("tests/nonuniform/test_nonuniform_step.py::test_the_gradient_of_every_kind_of_leaf_is_that_of_one_device",),
    ),
    # where weights of any shape live
    Mutant(
        "a matrix is padded by as many rows as the array, whose rows are shorter",
        "Padding(starts[dim], placement.padding.size * (sizes[starts[dim]] // shape[dim]))",
        "Padding(starts[dim], placement.padding.size)",
        (f"{_PLACEMENTS}test_the_matrix_of_a_placement_is_stored_as_the_array_is",),
    ),
    Mutant(
        "a slice of a stacked weight is padded along another dimension",
        "Padding(self.padding.dim - 1, self.padding.size)",
        "self.padding",
        (f"{_PLACEMENTS}test_a_slice_is_stored_as_the_whole_is_without_its_first_dimension",),
    ),
    Mutant(
        "a first dimension that ranks divide is left to a loop",
        "return self if self.axes(0) else self.without_first",
        "return self.without_first",
        (f"{_PLACEMENTS}test_a_slice_is_stored_as_the_whole_is_without_its_first_dimension",),
    ),
    Mutant(
        "gathered codes count as whole over tp",
        "layout.gathered.matrix_spec, tuple(layout.degrees.items()), {}",
        "type(layout.matrix_spec)(), tuple(layout.degrees.items()), {}",
        (f"{_PLACEMENTS}test_codes_are_stored_in_equal_shards_of_whole_blocks_and_used_without_padding",),
    ),
)
