"""Processes that run cells, each on a core of its own; torch and the engines are loaded there alone."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from typing import Any

from recipes.plan import Cell
from stream_grpo.config import Config
from stream_grpo.sampler.environment import environment

_BENCH: list[Any] = []
"""The bench of a worker, once it is made."""


def run_cells(
    cells: Iterable[tuple[Cell, Config]], *, num_jobs: int, start_with: Config
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """The result of every cell, as they are finished. A cell is taken from `cells` when a process is free for it.

    There are no more processes than cores.

    Raises what a cell raises, once the others under way have come to their end; their results are lost.
    """
    context = get_context("spawn")
    free = sorted(os.sched_getaffinity(0))[:num_jobs]
    num_jobs, cores = len(free), context.Queue()
    for core in free:
        cores.put(core)
    with ProcessPoolExecutor(num_jobs, context, _start, (start_with, cores)) as executor:
        waiting = iter(cells)
        running: dict[Future[dict[str, Any]], Cell] = {}
        while True:
            while len(running) < num_jobs and (item := next(waiting, None)) is not None:
                running[executor.submit(_run, *item)] = item[0]
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


def _start(config: Config, cores: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment(config))
    os.sched_setaffinity(0, {cores.get()})
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.disable(logging.WARNING)
    from recipes.training import Bench

    _BENCH.append(Bench(config))


def _end_with_parent() -> None:
    """A killed parent leaves no process behind."""
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _run(cell: Cell, config: Config) -> dict[str, Any]:
    result: dict[str, Any] = _BENCH[0].run(cell, config)
    return result
