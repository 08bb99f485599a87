"""What becomes of running requests when new weights come: `weights.on_update`."""

from __future__ import annotations

from typing import Literal

from stream_grpo.sampler.generation import Engine
from stream_grpo.sampler.rollout import GroupInProgress
from stream_grpo.types import GenerationRequest


class MidFlight:
    """The choice of one sampler, and what it costs."""

    def __init__(self, on_update: Literal["keep", "finish", "restart"], engine: Engine) -> None:
        self._on_update, self._engine = on_update, engine
        self.is_finishing = False
        """Whether weights wait for running requests: while they do, no request is added."""
        self.num_tokens_restarted = 0
        """Sampled and dropped, because their group began anew."""

    def may_apply(self) -> bool:
        """Whether weights that have come may be applied now, or wait until nothing runs."""
        self.is_finishing = self._on_update == "finish" and self._engine.num_unfinished > 0
        return not self.is_finishing

    def requests(self, groups: dict[str, GroupInProgress]) -> tuple[list[GenerationRequest], list[GenerationRequest]]:
        """Requests that go on with the new weights, and those to be added again once they are in.

        With `restart` the engine drops the latter, and groups that lack a generation are replaced by ones with nothing
        sampled, so that no group has tokens of two versions.
        """
        if self._on_update != "restart":
            return [request for group in groups.values() for request in group.unfinished], []
        again: list[GenerationRequest] = []
        for group_id in sorted(name for name, group in groups.items() if group.unfinished):
            group = groups[group_id]
            ended = self._engine.abort([request.request_id for request in group.unfinished])
            self.num_tokens_restarted += group.num_tokens + sum(len(generation.token_ids) for generation in ended)
            groups[group_id] = fresh = group.anew()
            again += fresh.unfinished
        return [], again
