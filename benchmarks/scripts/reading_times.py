"""How long a process takes to read what it trains on, which every process does at every start: text, and token ids.

python benchmarks/scripts/reading_times.py --help
"""

from __future__ import annotations

import argparse
import itertools
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gtp_jax.runner.data import Tokenizer, load_corpus, load_tokenizer, read_text

VOCAB = 32_000
SEPARATOR = 0
LENGTH = 1_000  # tokens of a document


def timed[T](what: str, nbytes: int, call: Callable[[], T]) -> T:
    """Calls a function, and prints its rate by the clock and by the CPU time of all threads."""
    began, used = time.perf_counter(), time.process_time()
    result = call()
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - used
    print(
        f"{what:34} {nbytes / 1e6:7.0f} MB {took_s:7.1f} s {cpu_s:7.1f} s of CPU {nbytes / 1e6 / cpu_s:8.1f} MB per s"
    )
    return result


def trained(documents: Sequence[bytes], file: Path) -> Tokenizer:
    """Returns a byte-level BPE tokenizer that is trained on documents, and saved to a file."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator((one.decode() for one in documents), trainer)
    made.save(str(file))
    return load_tokenizer(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=500_000_000, help="how many token ids to read from a file")
    options = parser.parse_args()
    text = read_text()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = trained(list(itertools.islice(text.documents, 2000)), Path(folder, "tokenizer.json"))
        timed("text to tokens of bytes", text.bytes, lambda: load_corpus(text).fingerprint)
        timed(f"text to tokens, BPE of {VOCAB} ids", text.bytes, lambda: load_corpus(text, tokenizer).fingerprint)
        ids = np.random.default_rng(0).integers(1, tokenizer.vocab_size, options.tokens, np.uint16)
        ids[::LENGTH] = SEPARATOR
        np.save(file := Path(folder, "ids.npy"), ids)
        timed("a file of token ids", ids.nbytes, lambda: load_corpus(read_text([file]), tokenizer).fingerprint)
    print(f"largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB")


if __name__ == "__main__":
    main()
