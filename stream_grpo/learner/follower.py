"""A rank of the learner other than the first: it makes the calls that rank 0 makes, with its own share of the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from stream_grpo.learner.crew import DISMISS, Crew
from stream_grpo.learner.shares import from_bytes

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.train_step import TrainStep


class Follower:
    """Owns a rank's engine and step. Knows nothing of Ray."""

    def __init__(self, engine: LearnerEngine, step: TrainStep, crew: Crew) -> None:
        self._engine, self._step, self._crew = engine, step, crew
        self._calls: Mapping[str, Callable[[dict[str, Any]], object]] = {
            "train": self._train,
            "kl_terms": self._kl_terms,
            "probe": lambda fields: engine.probe_logprobs(fields["sequences"]),
            "fingerprints": lambda fields: engine.fingerprints(fields["sequences"]),
            "weights": lambda fields: list(engine.named_weights()),  # empty here, but for taking part
            "save": self._save,
            "load": self._load,
        }

    def run(self, stop: Event) -> None:
        """Follow until dismissed: rank 0 says when, and a stop comes through it. Raises RankError where it is gone."""
        while (command := self._crew.hear()).name != DISMISS:
            with self._crew.call(command.name):
                self._calls[command.name](command.fields)
        self._crew.meet()

    def _train(self, fields: dict[str, Any]) -> None:
        self._step.rate_scale = fields["rate_scale"]
        self._step.run(from_bytes(self._crew.take()))

    def _kl_terms(self, fields: dict[str, Any]) -> None:
        self._step.kl_terms(from_bytes(self._crew.take()), fields["num_rollouts"])

    def _save(self, fields: dict[str, Any]) -> None:
        self._engine.save(Path(fields["directory"]), fields["state"])
        self._crew.meet()

    def _load(self, fields: dict[str, Any]) -> None:
        self._step.restore(self._engine.load(Path(fields["directory"])))
        self._crew.meet()

    def status(self) -> dict[str, Any]:
        """What the launcher shows; safe from another thread."""
        return {"rank": self._crew.rank, "doing": self._crew.doing}
