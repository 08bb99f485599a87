"""Which form of the engine a run has; loads vLLM only when one is made."""

from __future__ import annotations

from stream_grpo.config import Config
from stream_grpo.sampler.generation import Engine


def make_engine(config: Config) -> Engine:
    """The engine that `sampler.engine` names, with the weights of the model folder."""
    if config.sampler.engine == "async":
        from stream_grpo.sampler.async_engine import AsyncEngine

        return AsyncEngine(config)
    from stream_grpo.sampler.engine import InProcessEngine

    return InProcessEngine(config)
