"""The names that `gtp_jax` had at its top level before 0.2.0, by the packages that have them now.

They still work, with a warning. Version 0.3.0 will not have them: then delete this module.
"""

OLD_NAMES = {
    "gtp_jax.formats": ("PackPlan", "QuantizedArray"),
    "gtp_jax.generation": ("Generated", "generate", "generate_stream"),
    "gtp_jax.hook": ("without_hook",),
    "gtp_jax.layout": ("even_shares",),
    "gtp_jax.mesh": ("Roles", "use_roles"),
    "gtp_jax.nn": (
        *("AuxLoss", "Conv", "CrossAttention", "Einsum", "Frozen", "GroupedDense", "LayerNormDense", "Metric", "MoE"),
        *("RopeScaling", "Routing", "Schedule", "TiedHead", "attention_fn", "freeze", "linear_cross_entropy", "lora"),
        "run_chain",
    ),
    "gtp_jax.nonuniform": ("FaultPlan", "Replicas", "plan_faults"),
    "gtp_jax.ops": (
        *("check_ids", "dequantize", "hadamard", "hadamard_amax", "multi_amax", "pack", "positions_of", "quantize"),
        "unpack",
    ),
    "gtp_jax.recipes": ("BF16", "FP8Blocks", "FP8Delayed"),
    "gtp_jax.train": ("as_count", "check", "check_finite", "diagnose", "loss_and_gradients", "per_layer"),
}
