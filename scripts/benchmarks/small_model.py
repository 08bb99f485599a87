"""The small model that measurements train, made once in a folder for each task."""

from __future__ import annotations

from pathlib import Path

from stream_grpo.experiments.cells import call


def made_model(root: Path, task: str = "scratchpad") -> Path:
    """The small model of a task and its problems."""
    models = root / ("models" if task == "scratchpad" else f"models-{task}")
    if not (models / "model" / "model.safetensors").exists():
        root.mkdir(parents=True, exist_ok=True)
        call(["make-model", str(models), "--task", task], root / "make-model.log")
    return models
