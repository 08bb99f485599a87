"""Rank 0 of several: the learner's process as it is, with an engine and a step that have the other ranks do the same.

What only rank 0 needs, it does alone; a forward pass does that only where no stage of ZeRO has cut up the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from torch import Tensor

from stream_grpo.algo.statistics import Statistics
from stream_grpo.learner.batching import TrainBatch
from stream_grpo.learner.crew import Crew
from stream_grpo.learner.layout import await_parts
from stream_grpo.learner.shares import shares, to_bytes
from stream_grpo.types import RolloutGroup
from stream_grpo.weights.manifest import Adapter, Fingerprint, TensorSpec

if TYPE_CHECKING:
    from stream_grpo.learner.engine import LearnerEngine
    from stream_grpo.learner.process import LearnerProcess
    from stream_grpo.learner.train_step import TrainStep


class LeadEngine:
    """The engine of rank 0, as the learner's process sees it."""

    def __init__(self, engine: LearnerEngine, crew: Crew) -> None:
        self._engine, self._crew = engine, crew
        self.vocab_size, self.attention_cost = engine.vocab_size, engine.attention_cost

    def probe_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As the engine's."""
        with self._with_whole_weights("probe", sequences=_plain(sequences)):
            return self._engine.probe_logprobs(sequences)

    def fingerprints(self, sequences: Sequence[Sequence[int]]) -> tuple[Fingerprint, ...]:
        """As the engine's."""
        with self._with_whole_weights("fingerprints", sequences=_plain(sequences)):
            return self._engine.fingerprints(sequences)

    @property
    def adapter(self) -> Adapter | None:
        """As the engine's."""
        return self._engine.adapter

    def weight_specs(self) -> dict[str, TensorSpec]:
        """As the engine's."""
        return self._engine.weight_specs()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As the engine's. The other ranks give out their parts as this one asks for them."""
        with self._with_whole_weights("weights"):
            yield from self._engine.named_weights()

    def save(self, directory: Path, state: Mapping[str, Any]) -> None:
        """As the engine's; returns once all ranks have written."""
        with self._together("save", directory=str(directory), state=dict(state)):
            self._engine.save(directory, state)
            self._crew.meet()
            await_parts(directory)

    def load(self, directory: Path) -> Mapping[str, Any]:
        """As the engine's. The other ranks restore their steps too."""
        with self._together("load", directory=str(directory)):
            state = self._engine.load(directory)
            self._crew.meet()
            return state

    def export(self, directory: Path) -> None:
        """As the engine's."""
        with self._with_whole_weights("weights"):
            self._engine.export(directory)

    def _with_whole_weights(self, name: str, **fields: Any) -> AbstractContextManager[None]:
        return self._together(name, **fields) if self._engine.is_partitioned else nullcontext()

    @contextmanager
    def _together(self, name: str, **fields: Any) -> Iterator[None]:
        with self._crew.call(name):
            self._crew.order(name, **fields)
            yield


def _plain(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(map(int, sequence)) for sequence in sequences]


class LeadStep:
    """The step of rank 0: it makes the advantages, and hands the shares of every batch out."""

    def __init__(self, step: TrainStep, crew: Crew) -> None:
        self._step, self._crew = step, crew
        self.advantages = step.advantages
        self.state, self.restore = step.state, step.restore

    @property
    def rate_scale(self) -> float:
        """As the step's; the other ranks take it with their shares."""
        return self._step.rate_scale

    @rate_scale.setter
    def rate_scale(self, scale: float) -> None:
        self._step.rate_scale = scale

    def rewarded(
        self, groups: Sequence[RolloutGroup], *, vocab_size: int, microbatch_tokens: int
    ) -> Sequence[RolloutGroup]:
        """As the step's."""
        num_rollouts = sum(len(group.rollouts) for group in groups)
        with self._crew.call("kl_terms"):
            return self._step.rewarded(
                groups,
                vocab_size=vocab_size,
                microbatch_tokens=microbatch_tokens,
                share_of=lambda batch: self._hand_out(batch, "kl_terms", num_rollouts=num_rollouts),
            )

    def run(self, batch: TrainBatch, watch: Callable[[Statistics], None] = lambda first: None) -> dict[str, Any]:
        """As the step's."""
        with self._crew.call("train"):
            return self._step.run(self._hand_out(batch, "train", rate_scale=self.rate_scale), watch)

    def _hand_out(self, batch: TrainBatch, name: str, **fields: Any) -> TrainBatch:
        own, *others = shares(batch, self._crew.num_ranks)
        self._crew.order(name, **fields)
        self._crew.hand_out([to_bytes(share) for share in others])
        return own


class Lead:
    """The learner's process, which lets the other ranks go when it ends."""

    def __init__(self, process: LearnerProcess, crew: Crew) -> None:
        self._process, self._crew = process, crew

    def run(self, stop: Event) -> None:
        """As the process's. An error of its own, between two calls, lets the others go in order too."""
        try:
            self._process.run(stop)
        finally:
            self._crew.dismiss()

    def status(self) -> dict[str, Any]:
        """As the process's, and what all ranks are at."""
        return {**self._process.status(), "doing": self._crew.doing}
