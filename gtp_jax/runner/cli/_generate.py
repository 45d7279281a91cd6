"""`gtp-jax generate`: generates text with the model of a run, or an imported one."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..trainer import BYTE_TOKENS
from ._arguments import positive, utf8, whole
from ._later import later
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax generate gtp-run --prompt "def "                the latest step of a run
  gtp-jax generate gtp-run --prompt "def " --step 100     an earlier step
  gtp-jax generate llama --prompt "The sky is" "Once"     an import, two prompts in one batch
  gtp-jax generate gtp-run --prompt "import " --temperature 0     the most likely tokens, the same text every time
  gtp-jax generate gtp-run --prompt "class A" --stop "\\n\\n"      up to the first empty line
  gtp-jax generate gtp-run --chat "Why is the sky blue?"     an answer, with the chat template of the run or import
"""

_DESCRIPTION = """\
Continues prompts with the model of a run of `gtp-jax train`, or of a directory that `gtp-jax convert import` made.

Prints text to standard output while it is generated, and everything else to standard error. The weights are restored
directly onto a new mesh, in bfloat16 on GPUs, without an optimizer and without sharding over gtp: tp is the largest
divisor of the number of GPUs that does not exceed the number of key-value heads, and dp is the rest. Sampled text
depends on --seed, the prompt and its number, not on the mesh or on other prompts. The first text takes longer, because
two programs are compiled; on GPUs, they are kept for later runs.
"""

_CODES = ("fp8", "fp8-blocks", "mxfp8", "nvfp4")


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("source", "prompt", "chat", "max-new-tokens", "stop", "temperature", "seed", "recipe"),
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_IMPORT", help="the directory of a run, or of an import")
    begin = parser.add_mutually_exclusive_group(required=True)
    begin.add_argument("--prompt", nargs="+", type=utf8, metavar="TEXT", help="one text or several; '' for none")
    begin.add_argument(
        "--chat", nargs="+", type=utf8, metavar="TEXT", help="one question or several, each of which is answered"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the latest)")
    length = parser.add_argument_group("length")
    length.add_argument(
        "--max-new-tokens", type=whole, default=256, metavar="N", help="maximum number of new tokens (default: 256)"
    )
    length.add_argument(
        "--stop",
        nargs="+",
        default=[],
        type=_stop,
        metavar="TEXT",
        help="end before one of these texts; \\n is a new line",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the most likely token (default: 0.8)"
    )
    sampling.add_argument("--top-k", type=whole, metavar="N", help="sample from the N most likely tokens")
    sampling.add_argument(
        "--top-p", type=positive, metavar="P", help="sample from the most likely tokens with this total probability"
    )
    sampling.add_argument("--seed", type=int, default=0, metavar="N", help="seed of sampling (default: 0)")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--tokenizer",
        metavar="FILE",
        help=f"a tokenizer.json, or {BYTE_TOKENS!r} (default: the tokenizer of the run or the import)",
    )
    model.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of weights and compute (default: bfloat16 on GPUs, otherwise float32)",
    )
    model.add_argument(
        "--recipe", choices=_CODES, help="store weights as codes of this format, which are decoded for every token"
    )
    model.add_argument("--tp", type=whole, metavar="N", help="tensor-parallel degree")
    parser.set_defaults(run=later("_generate_text", "run"))
    return parser


def _stop(text: str) -> str:
    """Returns a text to stop at, for `type=`."""
    if not text:
        raise argparse.ArgumentTypeError("is '', which would end every text; give a text, or leave it out")
    return utf8(text).replace(r"\n", "\n").replace(r"\t", "\t")
