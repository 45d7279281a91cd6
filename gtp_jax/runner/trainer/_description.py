"""Describes a run of `gtp-jax train`, so that its processes can compare what they were started with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoint import Checkpoints, checkpoints_in
from ..data import Corpus
from ..flags import flag_of, knobs, settings_of
from ._agreement import Description, digest, software
from ._train_flags import TrainConfig, names_file


def describe(
    config: TrainConfig, corpus: Corpus | None, *, resume: bool, force: bool, at: int | None, order: Mapping[str, Any]
) -> Description:
    """Returns everything that must be the same in all processes of a run, by name, as JSON values.

    Args:
        config: the configuration of the run.
        corpus: the text of the run; `None` if it has none.
        resume: whether to continue the run in its directory.
        force: whether to replace the run in its directory.
        at: the step to resume from; `None` for the latest.
        order: the decisions of a supervisor that determine what is computed (`Supervision.order`).
    """
    values = settings_of(config)
    flags = {flag_of(field): values[field.name] for field in knobs(config) if not field.metadata["per_process"]}
    return {
        **flags,
        "--resume": resume,
        "--force": force,
        "--step": at,
        **order,
        "what is in the text": corpus and corpus.fingerprint,
        "what is in --eval-data": corpus and [text.fingerprint for text in corpus.evaluated],
        "what is in the tokenizer": digest(Path(config.tokenizer)) if names_file(config.tokenizer) else None,
        "what is in the chat template": digest(Path(config.chat_template)) if config.chat_template else None,
        "what is in --from": _start(config.from_) if config.from_ and not resume else None,
        **software(),
    }


def _start(source: str) -> str:
    """Returns a digest of the manifest, which holds the digests of all arrays, of the checkpoint to start from."""
    opened = Checkpoints(checkpoints_in(Path(source).expanduser()), read_only=True)
    return hashlib.sha256(json.dumps(opened.manifest(), sort_keys=True).encode()).hexdigest()
