"""The chat template of a run."""

from __future__ import annotations

from pathlib import Path

from ...models import Origin
from ..data import Chat, Tokenizer, named_template, stored_template
from ._tokenizer import origin_of_start, own_origin
from ._train_flags import ANSWERS, TrainConfig


def chat_of(config: TrainConfig, tokenizer: Tokenizer, *, resume: bool) -> Chat:
    """Returns the `Chat` that turns the conversations of a run into tokens.

    It uses the template of `--chat-template` or, if that is not given, the one of the run's model.

    Args:
        config: the configuration of the run.
        tokenizer: the tokenizer of the run's text.
        resume: whether the run is resumed. If so, the model's template is read from the run's own checkpoints, if it
            has any.

    Raises:
        ModuleNotFoundError: if Jinja2 is not installed.
        ValueError: if there is no template, or it is not a chat template.
    """
    origin = own_origin(config) if resume else None
    if origin is None and config.from_ is not None:
        origin = origin_of_start(config.from_)
    if origin is None or (config.tokenizer is not None and origin.has_tokenizer):  # is another tokenizer's
        origin = Origin()
    if config.chat_template is not None:
        template = named_template(Path(config.chat_template), origin.files)
    else:
        template = stored_template(origin.files, f"the chat template of {config.out if resume else config.from_}")
    if template is None:
        raise ValueError(
            "`data` contains conversations, but there is no chat template to write them as "
            f"text{'' if config.from_ is None else f': the model of {config.from_} has none for this tokenizer'}. "
            "Give a chat_template.jinja or tokenizer_config.json as --chat-template."
        )
    return Chat(template, tokenizer, config.loss_on == ANSWERS)
