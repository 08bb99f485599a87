"""The Ray that a run is on: a cluster that is there, or one of its own that ends with it."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from stream_grpo import parts
from stream_grpo.config import Config
from stream_grpo.errors import RunFailed
from stream_grpo.lifetime import children

RAY_PROGRAMS = ("gcs_server", "raylet")
"""Of a local Ray. Without one of them the parts go on for a while, but none can be started again."""
RAY_STARTS = 3
"""On a busy machine Ray may give up waiting for its own programs while it starts."""
_log = logging.getLogger(__name__)


@contextmanager
def ray_session(config: Config) -> Iterator[None]:
    """A Ray to run on: the cluster of `cluster.address`, or a local one that ends with the run."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if config.cluster.address:
        ray.init(address=config.cluster.address, log_to_driver=False, configure_logging=False)
    else:
        start_local_ray(max(os.cpu_count() or 1, parts.num_cpus_needed(config)))
    try:
        yield
    finally:
        ray.shutdown()


def start_local_ray(num_cpus: int) -> None:
    """Raises RunFailed with Ray's reason where it does not come up in RAY_STARTS tries."""
    for tries_left in reversed(range(RAY_STARTS)):
        try:
            ray.init(
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=128 << 20,
            )
            return
        except Exception as error:  # Ray has no class of its own for a start that failed
            ray.shutdown()
            for pid in children(RAY_PROGRAMS).values():
                os.kill(pid, signal.SIGKILL)
            if not tries_left:
                raise RunFailed(f"Ray did not start in {RAY_STARTS} tries: {error}") from error
            _log.warning("Ray did not start, and is started again: %s", error)
