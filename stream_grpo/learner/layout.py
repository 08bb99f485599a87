"""How a checkpoint is cut: DeepSpeed's files are those of as many ranks, at one ZeRO stage, and fit no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from stream_grpo.errors import CheckpointError
from stream_grpo.files import read_object

FILE = "layout.json"


class Layout(NamedTuple):
    """Whose files they are."""

    num_ranks: int
    zero_stage: int


def write_layout(directory: Path, layout: Layout) -> None:
    """Note it beside the files."""
    (directory / FILE).write_text(json.dumps(layout._asdict()), encoding="utf-8")


def check_layout(directory: Path, wanted: Layout) -> None:
    """Raise CheckpointError where the files are known to be of another layout than the one that is to load them."""
    if not (directory / FILE).exists():
        return
    try:
        plain = read_object(directory / FILE)
        found = Layout(int(plain["num_ranks"]), int(plain["zero_stage"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / FILE}: no layout in it: {error!r}") from error
    if found != wanted:
        raise CheckpointError(
            f"{directory.parent.name}: its files are those of learner.num_ranks = {found.num_ranks} with "
            f"learner.zero_stage = {found.zero_stage}, and fit no other; num_ranks = {wanted.num_ranks} and "
            f"zero_stage = {wanted.zero_stage} are set; go on with those of the checkpoint"
        )
