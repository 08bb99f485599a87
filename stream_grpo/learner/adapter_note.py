"""What a checkpoint says of the adapter in it: it fits no other, and no model without one. Loads no torch."""

from __future__ import annotations

import json
from pathlib import Path

from stream_grpo.config_lora import Lora
from stream_grpo.errors import CheckpointError
from stream_grpo.files import read_object

FILE = "lora.json"


def write_note(directory: Path, lora: Lora) -> None:
    """Note it beside the files; nothing where all weights are trained."""
    if lora.rank:
        (directory / FILE).write_text(json.dumps(lora.model_dump(mode="json")), encoding="utf-8")


def check_note(directory: Path, lora: Lora) -> None:
    """Raise CheckpointError where the files hold another adapter than the one that is to be trained on."""
    try:
        found = Lora.model_validate(read_object(directory / FILE)) if (directory / FILE).exists() else Lora()
    except ValueError as error:
        raise CheckpointError(f"{directory / FILE}: not what a checkpoint says of its adapter: {error}") from error
    if found != lora and (found.rank or lora.rank):
        raise CheckpointError(
            f"{directory.parent.name}: holds {_in_words(found)}, and {_in_words(lora)} is set; learner.lora can only "
            f"be set when a run begins: leave it as it was, or begin a run from the exported model"
        )


def _in_words(lora: Lora) -> str:
    if not lora.rank:
        return "all weights (learner.lora.rank = 0)"
    targets = list(lora.target_modules) or "all linear layers"
    return f"an adapter of learner.lora.rank = {lora.rank}, alpha = {lora.alpha:g} of {targets}"
