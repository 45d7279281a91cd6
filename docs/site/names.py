"""The names in the reference, by package, and their pages.

Those of `gtp_jax` itself are with the packages that define them.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = {
    "checkpoint": ("Checkpoints", "DamagedCheckpoint"),
    "collectives": ("all_gather", "reduce_scatter"),
    "convert": ("import_llama", "export_llama", "merge_adapters", "export_peft"),
    "flight_recorder": ("recorder", "Recorder"),
    "formats": ("QuantizedArray", "PackPlan", "Format"),
    "generation": ("generate", "generate_stream", "Generated"),
    "hook": ("shard", "without_hook", "largest_unit"),
    "inspect": ("explain", "Explanation", "inspect", "InspectOptions", "plan", "PlanOptions", "Plan"),
    "layout": ("even_shares", "Layout"),
    "mesh": ("make_mesh", "Roles", "use_roles", "current_view"),
    "models": ("Llama", "LlamaConfig", "LlamaBlock", "next_token_loss", "load"),
    "nn": (
        *("Dense", "LayerNormDense", "MLP", "Attention", "CrossAttention", "Embed", "TiedHead", "Conv", "Einsum"),
        *("GroupedDense", "MoE", "Routing", "Stack", "run_chain", "Schedule", "RopeScaling", "attention_fn"),
        *("Param", "Layer", "AuxLoss", "Metric", "init", "abstract_model", "cross_entropy", "linear_cross_entropy"),
        *("lora", "freeze", "Frozen"),
    ),
    "nonuniform": ("plan_faults", "FaultPlan", "Replicas"),
    "ops": (
        *("quantize", "dequantize", "pack", "unpack", "multi_amax", "hadamard", "hadamard_amax", "check_ids"),
        "positions_of",
    ),
    "optimizers": ("muon", "low_precision", "stochastic_rounding"),
    "recipes": ("FP8", "FP8Delayed", "FP8Blocks", "MXFP8", "NVFP4", "BF16", "Recipe", "Phases", "use_recipe"),
    "runner.launch": ("distributed",),
    "runner.trainer": ("Trainer", "Report"),
    "train": (
        *("TrainState", "train_step", "eval_step", "loss_and_gradients", "check", "check_finite", "diagnose"),
        *("per_layer", "as_count", "compile_options"),
    ),
    "weights": ("OwnFormat", "Wire", "WireSpec"),
}


def page_of_all(above: Mapping[str, tuple[str, ...]]) -> str:
    """Returns the page of `gtp_jax`, whose names `above` lists by the packages that define them."""
    purpose = "`gtp_jax` itself has these names; their packages describe them."
    rows = ["| name | package |", "|---|---|"]
    for package, ours in above.items():
        page = package.removeprefix("gtp_jax.")
        rows += [f"| [`gtp_jax.{name}`]({page}.md#{package}.{name}) | `{package}` |" for name in ours]
    return "\n\n".join(["# gtp_jax", purpose, "\n".join(rows)]) + "\n"


def page_of(package: str, purpose: str) -> str:
    """Returns the page of a package. The site's builder replaces each `:::` with the docstring of a name."""
    names = [f"::: gtp_jax.{package}.{name}" for name in NAMES[package]]
    return "\n\n".join([f"# gtp_jax.{package}", purpose, *names]) + "\n"
