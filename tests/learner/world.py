"""Worlds of real processes for tests of several ranks: one function on every rank, what it returned from each."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stream_grpo.errors import RankError
from stream_grpo.learner.crew import Crew


def run_world(
    num_ranks: int,
    function: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    timeout_s: float = 60.0,
    limit_s: float = 120.0,
    address: str | None = None,
) -> list[Any]:
    """What `function(crew, *arguments)` returned, rank by rank; an error in its place, None of one that died.

    They meet at a file in `folder`, or at rank 0's address.
    """
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(num_ranks)]
    world = (num_ranks, folder, address or folder / f"world-{num_ranks}", timeout_s)
    ranks = [
        spawn.Process(target=_rank, args=(rank, *world, sent, function, arguments))
        for rank, (_, sent) in enumerate(pipes)
    ]
    for rank, (_, sent) in zip(ranks, pipes, strict=True):
        rank.start()
        sent.close()
    try:
        found = [_received(received, limit_s) for received, _ in pipes[:-1]]
        # By now the others have given up on one that hangs.
        return [*found, _received(pipes[-1][0], 1.0 if any(isinstance(f, RankError) for f in found) else limit_s)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _received(pipe: Any, limit_s: float) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes()) if pipe.poll(limit_s) else None
    except EOFError:
        return None


def _rank(
    rank: int,
    num_ranks: int,
    folder: Path,
    rendezvous: Path | str,
    timeout_s: float,
    pipe: Any,
    function: Any,
    arguments: Any,
) -> None:
    # Processes start at different times, which is not to be mistaken for one that is missing.
    (folder / f"here-{num_ranks}-{rank}").touch()
    while len(list(folder.glob(f"here-{num_ranks}-*"))) < num_ranks:
        time.sleep(0.02)
    try:
        crew = Crew(rank, num_ranks, rendezvous, timeout_s=timeout_s, idle_timeout_s=timeout_s)
        _send(pipe, function(crew, *arguments))
        crew.meet()
    except Exception as error:
        _send(pipe, error)


def _send(pipe: Any, value: Any) -> None:
    # As bytes: a tensor that is sent as it is lives no longer than its process.
    pipe.send_bytes(pickle.dumps(value))
