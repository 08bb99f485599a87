"""What a run's folder says besides its metrics: settings, held-out scores before and after, whether it lives."""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

State = Literal["running", "quiet", "finished", "stopped"]
QUIET_AFTER_S = 60.0
"""While it trains, a run writes a line every few seconds."""
NUM_RESAMPLES = 1000
_SETTINGS: tuple[tuple[str, str], ...] = (
    ("run", "num_steps"),
    ("stream", "max_policy_age"),
    ("stream", "groups_per_step"),
    ("sampler", "group_size"),
    ("sampler", "num_samplers"),
    ("algo", "preset"),
)
"""What is shown of a configuration; all else is in its file."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Some settings of a run, as they stand in its file; a run of another version may lack some."""

    values: Mapping[str, Any]
    headline_domains: frozenset[str]
    """Of the evaluation; empty: all."""
    model: Path | None

    @classmethod
    def read(cls, run_dir: Path) -> Settings:
        """Of a run folder; nothing where its file cannot be read."""
        tree: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            tree = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8-sig"))
        sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
        model = sections.get("model", {}).get("path")
        return cls(
            {key: sections.get(section, {}).get(key) for section, key in _SETTINGS},
            frozenset(sections.get("evaluation", {}).get("domains", ())),
            Path(model) if isinstance(model, str) else None,
        )


class Files:
    """JSON files of a folder, read again once they change."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[str, tuple[tuple[int, int], Any]] = {}

    def read(self, name: str) -> Any:
        """The value of a file; None where there is none, or it is not whole."""
        try:
            status = (self._run_dir / name).stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if name not in self._known or self._known[name][0] != stamp:
                self._known[name] = stamp, msgspec.json.decode((self._run_dir / name).read_bytes())
        except (OSError, msgspec.MsgspecError):
            return None
        return self._known[name][1]


def state_of(run_dir: Path, summary: Any, last_step: int, last_s: float | None, now: float | None = None) -> State:
    """Whether a run goes on: by its summary, its lock and its newest line."""
    now = time.time() if now is None else now
    silent_s = now - last_s if last_s is not None else float("inf")
    if is_locked(run_dir / "lock"):
        return "running" if silent_s < QUIET_AFTER_S else "quiet"
    if isinstance(summary, dict) and summary.get("steps") == last_step:
        return "finished"
    return "running" if silent_s < QUIET_AFTER_S else "stopped"


def is_locked(path: Path) -> bool:
    """Whether a process of this machine holds a lock on a file. Asks the kernel: to try the lock could be in a start's
    way. False where the kernel does not tell."""
    with suppress(OSError, ValueError):
        status = path.stat()
        name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        return any(name in line.split() for line in Path("/proc/locks").read_text().splitlines())
    return False


def heldout(files: Files, summary: Any, domains: frozenset[str]) -> dict[str, dict[str, Any]]:
    """The headline pass@1 before and after training, each with its 95% interval, as far as they are known."""
    found = {}
    for when in ("before", "after"):
        whole = summary.get(f"heldout_{when}") if isinstance(summary, dict) else None
        score = whole.get("headline") if isinstance(whole, dict) else None
        score = score or rate_of(files.read(f"evaluation-{when}.json"), domains)
        if score:
            found[when] = score
    return found


def rate_of(problems: Any, domains: frozenset[str]) -> dict[str, Any] | None:
    """Mean pass rate of scored problems; its interval is the percentile bootstrap over problems."""
    if not isinstance(problems, list):
        return None
    rates = np.array(list(_rates(problems, domains)))
    if not len(rates):
        return None
    drawn = np.random.default_rng(0).integers(0, len(rates), (NUM_RESAMPLES, len(rates)))
    low, high = np.quantile(rates[drawn].mean(axis=1), [0.025, 0.975]).tolist()
    return {"pass_at_1": float(rates.mean()), "low": low, "high": high, "num_problems": len(rates)}


def _rates(problems: Sequence[Any], domains: frozenset[str]) -> Sequence[float]:
    found = []
    for problem in problems:
        with suppress(TypeError, KeyError, ZeroDivisionError, AttributeError):
            if not domains or problem["domain"] in domains:
                found.append(problem["num_passed"] / problem["num_scored"])
    return found
