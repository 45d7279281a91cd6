"""Records what transformers computes of tiny models, for tests that run without it.

In the environment of tests/interop/environment.sh:

    PYTHONPATH=. python -m tests.convert.record
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from .hugging_face import random_tensors, write_model
from .recorded import COUNT, EVERY, MODELS, PROMPT, file_of, tokens_of


def record(name: str) -> None:
    """Writes the logits and the greedy tokens of a model."""
    config = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), random_tensors(config), config)
        model, said = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
    assert not any(said.values()), said
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens_of(config).astype(np.int64))).logits.numpy()
        prompt = torch.tensor([PROMPT])
        options = {"do_sample": False, "max_new_tokens": COUNT, "pad_token_id": 0, "eos_token_id": None}
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(PROMPT) :].numpy()
    np.savez(file_of(name), logits=logits[:, ::EVERY], greedy=greedy.astype(np.int32))


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        record(name)
        print(f"{file_of(name).name}: transformers {transformers.__version__}, torch {torch.__version__}")
