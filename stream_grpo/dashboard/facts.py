"""What a run's folder says besides its metrics: settings, held-out scores before and after, whether it lives."""

from __future__ import annotations

import hashlib
import os
import time
import tomllib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

State = Literal["running", "quiet", "finished", "stopped"]
QUIET_AFTER_S = 60.0
"""While it trains, a run writes a line every few seconds."""
NUM_RESAMPLES, PERCENTILES = 2000, (2.5, 97.5)
HEADLINE = "headline"
Stamp = tuple[int, int]
"""Of a file: when it was written, in ns, and its bytes. Another content has another one."""
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
    seed: int
    model: Path | None

    @classmethod
    def read(cls, run_dir: Path) -> Settings:
        """Of a run folder; nothing where its file cannot be read."""
        tree: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError):
            tree = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8-sig"))
        sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
        domains = sections.get("evaluation", {}).get("domains")
        named = [domain for domain in domains if isinstance(domain, str)] if isinstance(domains, list) else []
        model, seed = sections.get("model", {}).get("path"), sections.get("run", {}).get("seed")
        return cls(
            {key: sections.get(section, {}).get(key) for section, key in _SETTINGS},
            frozenset(named),
            seed if isinstance(seed, int) else 0,
            Path(model) if isinstance(model, str) else None,
        )


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file. Raises OSError where there is none."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


class Files:
    """JSON files of a folder, read again once they change."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._known: dict[str, tuple[Stamp, Hashable, Any]] = {}

    def read(self, name: str, of: Callable[..., Any] = lambda value: value, *given: Hashable) -> Any:
        """What `of` makes of the value of a file and what is `given`, made once for each of its contents.

        None where there is no file, or it is not whole.
        """
        path = self._run_dir / name
        try:
            stamp = stamp_of(path)
            if name not in self._known or self._known[name][:2] != (stamp, given):
                self._known[name] = stamp, given, of(msgspec.json.decode(path.read_bytes()), *given)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return None
        return self._known[name][2]


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


def heldout(files: Files, summary: Any, settings: Settings) -> dict[str, dict[str, Any]]:
    """The headline pass@1 before and after training, each with its 95% interval, as far as they are known."""
    found = {}
    for when in ("before", "after"):
        whole = summary.get(f"heldout_{when}") if isinstance(summary, dict) else None
        score = whole.get(HEADLINE) if isinstance(whole, dict) else None
        score = (
            score
            if isinstance(score, dict) and score
            else files.read(f"evaluation-{when}.json", rate_of, settings.headline_domains, settings.seed)
        )
        if score:
            found[when] = score
    return found


def rate_of(problems: Any, domains: frozenset[str], seed: int) -> dict[str, Any] | None:
    """Mean pass rate of scored problems with its interval, as the summary of a run with this seed will have them.

    The interval is the 95% percentile bootstrap over problems (Efron 1979), by multinomial counts, as `evaluation` has
    it; the page knows no stage.
    """
    rates_P = np.array(_rates(problems, domains) if isinstance(problems, list) else [])
    if not (size := len(rates_P)):
        return None
    digest = hashlib.sha256(repr((seed, HEADLINE)).encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "big") >> 1)
    counts = generator.multinomial(size, np.full(size, 1 / size), NUM_RESAMPLES)
    low, high = np.percentile(counts @ rates_P / size, PERCENTILES).tolist()
    return {"pass_at_1": float(rates_P.mean()), "low": low, "high": high, "num_problems": size}


def _rates(problems: Sequence[Any], domains: frozenset[str]) -> list[float]:
    """In the order of the problems' ids, so that a seed draws the same ones whatever the order of the file."""
    found = []
    for problem in problems:
        with suppress(TypeError, KeyError, ArithmeticError, AttributeError):
            if not domains or problem["domain"] in domains:
                found.append((str(problem["problem_id"]), problem["num_passed"] / problem["num_scored"]))
    return [rate for _, rate in sorted(found)]
