"""The words that settings consist of: names of mesh axes, and the values that an option may have.

They are apart from what they name, so that a command refuses wrong arguments without importing JAX, which takes a
second.
"""

from __future__ import annotations

from typing import Literal, get_args

DP, GTP, CP, EP, TP = "dp", "gtp", "cp", "ep", "tp"

# The values that the forward pass of a layer keeps for its backward pass.
Remat = Literal[
    "nothing", "attention", "matmuls", "activations", "everything", "offload", "offload-attention", "offload-matmuls"
]
REMAT: tuple[Remat, ...] = get_args(Remat)

# The part of a training state that stays in the memory of the host: the optimizer's moments, or these and the weights.
Offloaded = Literal["optimizer", "masters"]
OFFLOADED: tuple[Offloaded, ...] = get_args(Offloaded)

# The value of `--offload` for a state that stays on the devices.
ON_DEVICES = "none"

# The number format in which an optimizer's moments are stored, if it is not float32.
Moments = Literal["bfloat16", "float8"]
MOMENTS: tuple[Moments, ...] = get_args(Moments)

# The last layers that keep their gathered weights for backward.
KeepGathered = int | Literal["all", "auto"]

# The arrays that ranks of cp exchange for attention: whole sequences of a part of the heads, or keys and values.
SequenceExchange = Literal["heads", "keys"]
SEQUENCE_EXCHANGES: tuple[SequenceExchange, ...] = get_args(SequenceExchange)

# How the gradients of a weight are summed over the ranks that share it.
GradReduce = Literal["float32", "bf16-wire", "bf16"]
GRAD_REDUCE: tuple[GradReduce, ...] = get_args(GradReduce)

# When gradients are summed over dp.
ReduceOverDp = Literal["each", "last"]
REDUCE_OVER_DP: tuple[ReduceOverDp, ...] = get_args(ReduceOverDp)

# How tokens travel to the ranks of their experts.
Transport = Literal["gather", "padded", "ragged"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)

# How an expert's score follows from its logit, and over which tokens the load of experts is measured.
Score = Literal["softmax", "sigmoid"]
AuxLossOf = Literal["sequence", "microbatch"]

# The keys of `recipes.RECIPES`, `recipes.GRAD_WIRES` and `models.PRESETS`.
RECIPE_NAMES = (
    *("bf16", "fp8", "fp8-matmuls", "fp8-attention", "fp8-keep-codes", "fp8-delayed", "fp8-blocks"),
    *("mxfp8", "mxfp8-matmuls", "nvfp4", "nvfp4-matmuls"),
)
GRAD_WIRE_NAMES = ("bf16", "fp8", "mxfp8")
PRESET_NAMES = (
    "tiny",
    "100m",
    "1b",
    "tiny-moe",
    "mixtral",
    "qwen3-30b-a3b",
    "phi4",
    "gemma3-1b",
    "gpt-oss-20b",
    "reference",
    "8b",
    "8b-3.1",
    "70b",
    "70b-3.1",
    "405b",
)

# The keys of `hlo.CHIPS`, and how many of them NVLink joins.
CHIP_NAMES = ("h200", "h100")
GPUS_PER_HOST = 8

# The dtypes and formats in which `convert` exports weights.
EXPORT_DTYPES = ("bfloat16", "float32", "fp8", "mxfp8", "nvfp4")

# How rows are made: cut without gaps from the stream of all documents, or packed with whole documents that do not
# attend to each other.
STREAM, DOCUMENTS = "stream", "documents"
PACKINGS = (STREAM, DOCUMENTS)

# The dtypes of token ids that `--token-dtype` accepts.
TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")

# The largest number that operations accept as a parameter: the largest float32, because they compute in float32.
MOST = (2 - 2**-23) * 2.0**127
