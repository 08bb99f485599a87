"""The sinks that `[tracking]` asks for."""

from __future__ import annotations

import time
from collections.abc import Callable

from stream_grpo.config import Config
from stream_grpo.sinks.sink import Sink, Sinks


def open_trackers(sinks: Sinks, config: Config, say: Callable[[str], None]) -> None:
    """Open them; `say` is told where one can be reached. A library is loaded only where its sink is asked for."""
    tracking = config.tracking
    if tracking.wandb != "disabled":
        sinks.open("W&B", lambda: _wandb(config))
    if tracking.tensorboard:
        sinks.open("TensorBoard", lambda: _tensorboard(config))
    if tracking.prometheus_port is not None:
        sinks.open("Prometheus", lambda: _prometheus(config, say))


def _wandb(config: Config) -> Sink:
    from stream_grpo.sinks.wandb_sink import WandbSink

    tracking, settings = config.tracking, config.model_dump(mode="json")
    return WandbSink(config.run_dir, config.run.name, tracking.wandb_project, tracking.wandb, settings)


def _tensorboard(config: Config) -> Sink:
    from stream_grpo.sinks.tensorboard import TensorBoardSink

    return TensorBoardSink(config.run_dir, time.time())


def _prometheus(config: Config, say: Callable[[str], None]) -> Sink:
    from stream_grpo.sinks.prometheus import PrometheusSink

    assert config.tracking.prometheus_port is not None
    sink = PrometheusSink(config.run.name, config.tracking.prometheus_port)
    say(f"figures for Prometheus: {sink.address}")
    return sink
