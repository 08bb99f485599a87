"""The branches of a run: which were opened, and from where each forks. Kept in one small file, replaced atomically."""

from __future__ import annotations

from pathlib import Path

from stream_grpo.errors import CheckpointError
from stream_grpo.files import read_object, write_json
from stream_grpo.types import PolicyVersion, forks_from_plain, forks_to_plain


class Branches:
    """Every restore opens a branch above all earlier ones, so that a version is never given out twice."""

    def __init__(self, path: Path, forks: dict[int, PolicyVersion], num_branches: int) -> None:
        self._path, self._num_branches = path, num_branches
        self.forks = forks
        """For every branch above 0 the version it forks from."""

    @staticmethod
    def load(path: Path) -> Branches:
        """Read the file; a run without one has no branch yet. Raises CheckpointError where it is damaged."""
        if not path.exists():
            return Branches(path, {}, 0)
        try:
            plain = read_object(path)
            return Branches(path, forks_from_plain(plain["forks"]), int(plain["num_branches"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) if str(path) in str(error) else f"{path}: no branches in it: {error!r}"
            raise CheckpointError(
                f"{reason}; put back a copy of the file, or write it anew with `forks` of the newest "
                f"weights/*/manifest.json and `num_branches` 2 above the branch of those weights"
            ) from error

    def open(self, fork: PolicyVersion) -> PolicyVersion:
        """Open the next branch at `fork` and return its first version. Durable before it returns."""
        branch = self._num_branches
        if branch > 0:
            self.forks[branch] = fork
        self._num_branches += 1
        write_json(self._path, {"num_branches": self._num_branches, "forks": forks_to_plain(self.forks)})
        return PolicyVersion(branch, fork.step)
