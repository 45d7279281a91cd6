"""`gtp-jax convert`: imports and exports Hugging Face's files, and merges adapters into models."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from ..._words import EXPORT_DTYPES
from ._later import later
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax convert import Meta-Llama-3-8B/ llama     then: gtp-jax train --from llama ...
  gtp-jax convert export gtp-run exported           the latest step, in bfloat16
  gtp-jax convert export gtp-run exported-fp4 --step 100 --dtype nvfp4
  gtp-jax convert export --peft lora-run adapter    the adapters of `gtp-jax train --lora`
  gtp-jax convert merge lora-run merged             then: gtp-jax convert export merged exported

One tensor is in memory at a time. An output directory appears only once it is complete.
"""

_IMPORT = """\
Makes a checkpoint at step 0 of a Hugging Face model: float32 parameters, without optimizer state.

HF_DIR holds config.json and safetensors, in one file or in several with an index. Imports Llama 2 to 3.1, Mistral,
Mixtral, Qwen2, Qwen2.5, and Qwen3 with or without experts; rotary frequencies may be scaled linearly, as in Llama 3.1
or by YaRN. Dequantizes FP8, MXFP8, NVFP4 and MXFP4 weights in the layouts of docs/conversion.md. Refuses other
quantized weights, scalings and models. The checkpoint also keeps the rest of config.json, generation_config.json and
the tokenizer's files, which an export writes again.
"""

_EXPORT = """\
Writes the parameters of a checkpoint as a Hugging Face model: safetensors, their index, config.json, and the other
files that the model was imported with.

fp8, mxfp8 and nvfp4 quantize the linear layers of attention and MLP and leave embedding, norms and head in bfloat16:
fp8 in blocks of 128 x 128, as Qwen3-FP8 is published, the others in the layout of NVIDIA ModelOpt. A model that was
trained on bytes gets a tokenizer.json of bytes. If a model was imported without a tokenizer and not trained with one,
copy its tokenizer to OUT yourself.

--peft writes only the adapters of a run of `gtp-jax train --lora`, in float32: adapter_model.safetensors and
adapter_config.json, which PEFT loads onto the model that the run started from.
"""

_MERGE = """\
Makes a checkpoint at step 0 from a run of `gtp-jax train --lora`: float32 parameters, with the adapters added to their
kernels. The checkpoint is like that of an import, to generate, train and export.

If the run froze its model as codes (--recipe), adapters are added to the dequantized values with which they were
trained.
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand, with the verbs `import`, `export` and `merge`."""
    shared: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": _EXAMPLES}
    parser = add(
        description="Converts models between checkpoints and Hugging Face's safetensors. Needs no GPU.",
        **shared,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    importer = verbs.add_parser(
        "import", help="from Hugging Face's files to a checkpoint", description=_IMPORT, **shared
    )
    importer.add_argument("source", type=Path, metavar="HF_DIR", help="the directory of the model")
    importer.add_argument("out", type=Path, metavar="OUT", help="a new or an empty directory")
    importer.set_defaults(run=later("_convert_files", "import_"))
    exporter = verbs.add_parser(
        "export", help="from a checkpoint to Hugging Face's files", description=_EXPORT, **shared
    )
    exporter.add_argument(
        "source", type=Path, metavar="CHECKPOINT_DIR", help="the directory of a run, or its checkpoints"
    )
    exporter.add_argument("out", type=Path, metavar="OUT", help="a new or an empty directory")
    exporter.add_argument("--step", type=int, metavar="N", help="the step (default: the latest)")
    exporter.add_argument("--dtype", choices=EXPORT_DTYPES, help="dtype or format of the weights (default: bfloat16)")
    exporter.add_argument("--shard-gb", type=_size, metavar="X", help="maximum size of a file in GB (default: 5)")
    exporter.add_argument("--peft", action="store_true", help="write only the adapters of the run, for PEFT")
    exporter.set_defaults(run=later("_convert_files", "export"))
    merger = verbs.add_parser("merge", help="adapters into their model", description=_MERGE, **shared)
    merger.add_argument(
        "source", type=Path, metavar="RUN", help="the directory of a run of `gtp-jax train --lora`, or its checkpoints"
    )
    merger.add_argument("out", type=Path, metavar="OUT", help="a new or an empty directory")
    merger.add_argument("--step", type=int, metavar="N", help="the step (default: the latest)")
    merger.set_defaults(run=later("_convert_files", "merge"))
    return parser


def _size(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value
