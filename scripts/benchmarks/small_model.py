"""The small model that measurements train, made once in a folder."""

from __future__ import annotations

from pathlib import Path

from stream_grpo.experiments.cells import call


def made_model(root: Path) -> Path:
    """The small model and its problems."""
    models = root / "models"
    if not (models / "model" / "model.safetensors").exists():
        root.mkdir(parents=True, exist_ok=True)
        call(["make-model", str(models)], root / "make-model.log")
    return models
