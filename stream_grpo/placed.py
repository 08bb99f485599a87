"""A part of a running run as its launcher knows it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Placed:
    """A part, where it runs, and how often it may be started again."""

    name: str
    kind: str
    arguments: dict[str, Any]
    restarts_left: int
    team: str = ""
    """What it lives and dies with: the parts of one team are started again together. Empty: it stands alone."""
    handle: Any = None
    building: Any = None
    """Ray reference of its builder, until that is done."""
    running: Any = None
    """Ray reference of its loop, while it runs."""
    is_wanted: bool = False
    """Whether its loop is to run as soon as it is built."""
    is_given_up: bool = False
    """Whether the run goes on without it."""
    by_order: bool = False
    """Whether it was added to the running run: a local Ray was not told to expect it."""
    gone_by: float | None = None
    """Monotonic time by which one that leaves is gone; None: it stays."""
    address: str = ""
    pid: int = 0
    node: str = ""
    """IP of the node it runs on."""
    last_status: dict[str, Any] = field(default_factory=dict)
    asking: Any = None
    """Ray reference of the status that was asked for and has not come."""
    asked_at: float = 0.0
    """Monotonic time of that."""
    is_named: bool = False
    """Whether it was said that this part does not answer."""
    is_cut_off: bool = False
    """Whether it was said that its node is out of reach."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Last status of every incarnation that died."""

    @property
    def silent_s(self) -> float:
        """For how long it has owed an answer."""
        return time.monotonic() - self.asked_at if self.asking else 0.0

    @property
    def state(self) -> str:
        """What it is at, in a word or two."""
        if self.is_given_up:
            return "given up"
        if self.gone_by is not None:
            return "leaving"
        return "starting" if self.building else "running" if self.running else "waiting"

    def silence(self) -> str:
        """That it does not answer, in words."""
        return f"{self.name} (process {self.pid}) has not answered for {self.silent_s:.0f} s: it is stopped or hangs"
