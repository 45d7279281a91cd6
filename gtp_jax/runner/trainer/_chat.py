"""The chat template of a run."""

from __future__ import annotations

from pathlib import Path

from ...models import Origin
from ..data import Chat, Tokenizer, named_template, stored_template
from ._tokenizer import origin_of_start, own_origin
from ._train_flags import ANSWERS, TrainConfig


def chat_of(config: TrainConfig, tokenizer: Tokenizer, *, resume: bool) -> Chat:
    """Returns how the conversations of a run become tokens: by the template that is named, or that of its model.

    Args:
        config: of the run.
        tokenizer: of its text.
        resume: it goes on; then its own checkpoints, if there are any, have the model's template.

    Raises:
        ModuleNotFoundError: if Jinja2 is not installed.
        ValueError: if there is no template, or it is none.
    """
    origin = own_origin(config) if resume else None
    if origin is None and config.from_ is not None:
        origin = origin_of_start(config.from_)
    if origin is None or (config.tokenizer is not None and origin.has_tokenizer):  # which is another one's
        origin = Origin()
    if config.chat_template is not None:
        template = named_template(Path(config.chat_template), origin.files)
    else:
        template = stored_template(origin.files, f"the chat template of {config.out if resume else config.from_}")
    if template is None:
        raise ValueError(
            "`data` holds conversations, and there is no chat template that writes them as text"
            f"{'' if config.from_ is None else f': the model of {config.from_} has none for this tokenizer'}. Give a "
            "chat_template.jinja or tokenizer_config.json as --chat-template."
        )
    return Chat(template, tokenizer, config.loss_on == ANSWERS)
