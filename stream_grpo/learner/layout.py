"""How a checkpoint is cut: DeepSpeed's files are those of as many ranks, at one ZeRO stage."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

from stream_grpo.errors import CheckpointError
from stream_grpo.files import read_object
from stream_grpo.learner.adapter_note import FILE as NOTE

FILE = "layout.json"
STATE, UNIVERSAL = "state", "universal"
"""Folders of the engine's state in a checkpoint: as its ranks wrote it, and by parameter, which any number loads."""
SHOWN_S = 120.0
"""How long a shared folder may take to show what another node has written."""
_CRITIC = "critic"
_CUT_ALIKE = ({1, 2}, {3})
"""Stages whose files can be cut anew for other ranks of the same."""


class Layout(NamedTuple):
    """Whose files they are."""

    num_ranks: int
    zero_stage: int


def write_layout(directory: Path, layout: Layout) -> None:
    """Note it beside the files."""
    (directory / FILE).write_text(json.dumps(layout._asdict()), encoding="utf-8")


def await_parts(directory: Path, timeout_s: float = SHOWN_S) -> None:
    """Return once the parts of all ranks are to be seen: a shared folder may show those of other nodes late.

    Raises CheckpointError where one is not: the folder is not one and the same on all nodes.
    """
    layout = _layout_of(directory)
    if layout is None or layout.zero_stage == 0:
        return
    kinds = ("optim", "model") if layout.zero_stage == 3 else ("optim",)
    deadline = time.monotonic() + timeout_s
    while missing := [
        rank
        for rank in range(layout.num_ranks)
        if not all(any((directory / STATE).glob(f"*zero_pp_rank_{rank}_*{kind}_states.pt")) for kind in kinds)
    ]:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{directory / STATE}: the parts of ranks {missing} are not to be seen {timeout_s:.0f} s after they "
                f"were written; run.root has to be one shared folder on all nodes with ranks of the learner"
            )
        time.sleep(0.5)


def needs_conversion(directory: Path, wanted: Layout) -> bool:
    """Whether the files are of another layout than the one that is to load them, and have to be cut anew for it.

    Those of stage 0 are whole and fit any number of ranks. Raises CheckpointError where they cannot be cut anew: the
    stages differ by more than whether gradients are cut up, or there is a critic, which is of one rank, or an adapter.
    """
    found = _layout_of(directory)
    if found is None or found == wanted or found.zero_stage == wanted.zero_stage == 0:
        return False
    if (directory / _CRITIC).exists():
        why = "with a critic, whose files are not cut anew"
    elif (directory / NOTE).exists():
        why = "with an adapter, whose files are not cut anew"
    elif any({found.zero_stage, wanted.zero_stage} <= stages for stages in _CUT_ALIKE):
        return True
    else:
        why = "and can be cut anew for other ranks only from ZeRO 1 or 2 to 1 or 2, and from 3 to 3"
    raise CheckpointError(
        f"{directory.parent.name}: its files are those of learner.num_ranks = {found.num_ranks} with "
        f"learner.zero_stage = {found.zero_stage}, {why}; num_ranks = {wanted.num_ranks} and zero_stage = "
        f"{wanted.zero_stage} are set; go on with those of the checkpoint"
    )


def _layout_of(directory: Path) -> Layout | None:
    if not (directory / FILE).exists():
        return None
    try:
        plain = read_object(directory / FILE)
        return Layout(int(plain["num_ranks"]), int(plain["zero_stage"]))
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{directory / FILE}: no layout in it: {error!r}") from error
