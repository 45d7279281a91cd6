"""The mutants: mistakes of all kinds, and the mistakes that this project has made without noticing.

A text is found wherever it stands, so that a move of code needs no change here.
"""

from __future__ import annotations

from . import _of_files, _of_layers, _of_operations, _of_sharded_models, _of_steps, _of_weights

MUTANTS = (
    *_of_weights.MUTANTS,
    *_of_operations.MUTANTS,
    *_of_layers.MUTANTS,
    *_of_steps.MUTANTS,
    *_of_sharded_models.MUTANTS,
    *_of_files.MUTANTS,
)
