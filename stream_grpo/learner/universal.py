"""A checkpoint of other ranks, cut anew by DeepSpeed's own converter: one file a parameter, which any ranks load."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

from stream_grpo.errors import CheckpointError
from stream_grpo.learner.checkpoint import write_converted
from stream_grpo.learner.layout import STATE, UNIVERSAL, Layout, needs_conversion

ENGINE = "engine"
"""Of a checkpoint: what the learner's engine wrote."""


def fitting(checkpoint: Path, layout: Layout) -> Path:
    """The engine's folder to load on ranks of `layout`: the checkpoint's own, or one made of it beside it.

    Only for a checkpoint that was verified: its files are pickles. What is made is hashed and noted as a checkpoint is,
    and verified before it is taken up again. Raises CheckpointError where the checkpoint cannot be cut anew.
    """
    if not needs_conversion(checkpoint / ENGINE, layout):
        return checkpoint / ENGINE
    return write_converted(checkpoint, lambda folder: _convert(checkpoint / ENGINE, folder / ENGINE)) / ENGINE


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    target.mkdir()
    options = Namespace(
        input_folder=str(source / STATE),
        output_folder=str(target / UNIVERSAL),
        num_extract_workers=1,  # in this process, which has threads and must not be forked
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        ds_to_universal.main(options)
    except Exception as error:
        raise CheckpointError(
            f"{source.parent.name}: DeepSpeed could not cut it anew for other ranks: {error!r}; go on with "
            f"learner.num_ranks and learner.zero_stage of the checkpoint"
        ) from error
    for path in source.iterdir():  # what every rank reads whole, as a reference that moves
        if path.is_file():
            shutil.copyfile(path, target / path.name)
