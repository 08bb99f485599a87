"""The clock of a training by TRL: weights with the time they were reached at, over all pieces. Knows no TRL."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import TrainerCallback

CLOCK = "clock.json"
"""In a checkpoint: what the clock stood at."""


class Clock(TrainerCallback):
    """Saves weights as training goes, and keeps the time, over all pieces of it."""

    def __init__(
        self,
        folder: Path,
        every: int | None = None,
        every_s: float | None = None,
        stop_after_s: float | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Weights are saved each `every` steps or `every_s` seconds, and at the end; `timer`: seconds for durations."""
        self.folder, self._timer = folder, timer
        self._every, self._every_s, self._stop_after_s = every, every_s, stop_after_s
        self._before_s = self._off_s = self._begun = self._step_ended = 0.0
        self.num_tokens, self.generate_s = 0, 0.0
        """Generated so far, and the seconds of that."""
        self.began_s = 0.0
        """Unix time at which this piece of the training began."""
        self.found: list[dict[str, Any]] = []

    @property
    def seconds(self) -> float:
        """Of training, without what saving took."""
        return self._before_s + self._timer() - self._begun - self._off_s

    def read(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        kept = json.loads((checkpoint / CLOCK).read_text())
        self._before_s, self.num_tokens, self.generate_s = kept["seconds"], kept["tokens"], kept["generate_s"]
        self.found = kept["found"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save what training begins with; the clock runs from here."""
        if not self.found:
            self._save(given["model"], 0, 0.0)
        self.began_s, self._begun, self._off_s = time.time(), self._timer(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save where it is time, and end where it is."""
        seconds, begun = self.seconds, self._timer()
        is_up = self._stop_after_s is not None and seconds - self._before_s >= self._stop_after_s
        if is_up:
            control.should_save = control.should_training_stop = True
        if is_up or state.global_step == state.max_steps or self._is_due(state.global_step, seconds):
            self._save(given["model"], state.global_step, seconds)
        self._step_ended = self._timer()
        self._off_s += self._step_ended - begun

    def _is_due(self, step: int, seconds: float) -> bool:
        if self._every is not None:
            return step % self._every == 0
        return self._every_s is not None and seconds >= self._every_s * (
            1 + int(self.found[-1]["seconds"] / self._every_s)
        )

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Leave the time in the checkpoint; what it took to write is off the clock."""
        self._off_s += self._timer() - self._step_ended
        kept = {
            "seconds": self.seconds,
            "tokens": self.num_tokens,
            "generate_s": self.generate_s,
            "found": self.found,
        }
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / CLOCK).write_text(json.dumps(kept))

    def _save(self, model: Any, step: int, seconds: float) -> None:
        # Of tied weights one: it is what `named_parameters` gives.
        tensors = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        save_file(tensors, self.folder / f"{step:06}.safetensors")
        self.found.append({"step": step, "seconds": seconds, "tokens": self.num_tokens})
