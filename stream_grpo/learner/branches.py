"""The branches of a run: which were opened, and from where each forks. Kept in one small file, replaced atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

from stream_grpo.types import PolicyVersion


class Branches:
    """Every restore opens a branch above all earlier ones, so that a version is never given out twice."""

    def __init__(self, path: Path, forks: dict[int, PolicyVersion], num_branches: int) -> None:
        self._path, self._num_branches = path, num_branches
        self.forks = forks
        """For every branch above 0 the version it forks from."""

    @staticmethod
    def load(path: Path) -> Branches:
        """Read the file; a run without one has no branch yet."""
        if not path.exists():
            return Branches(path, {}, 0)
        plain = json.loads(path.read_text(encoding="utf-8"))
        forks = {int(branch): PolicyVersion(*fork) for branch, fork in plain["forks"].items()}
        return Branches(path, forks, int(plain["num_branches"]))

    def open(self, fork: PolicyVersion) -> PolicyVersion:
        """Open the next branch at `fork` and return its first version. Durable before it returns."""
        branch = self._num_branches
        if branch > 0:
            self.forks[branch] = fork
        self._num_branches += 1
        plain = {"num_branches": self._num_branches, "forks": {str(b): list(f) for b, f in self.forks.items()}}
        beside = self._path.with_suffix(".tmp")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(plain, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        return PolicyVersion(branch, fork.step)
