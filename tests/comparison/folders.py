"""Run folders as a finished run leaves them, as far as a comparison reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stream_grpo.config_file import parse, to_toml
from stream_grpo.identity import entry

Passed = Mapping[str, int]
"""Of 4 samples of each problem."""


def scores(passed: Passed) -> list[dict[str, Any]]:
    return [
        {"problem_id": i, "domain": i[0], "num_scored": 4, "num_passed": count, "num_unscored": 0, "num_tokens": 40}
        for i, count in passed.items()
    ]


def step(number: int, num_tokens: int, branch: int = 0) -> dict[str, Any]:
    """A learner step; of the generated tokens 100 are an evaluation's."""
    return {
        "event": "step",
        "step": number,
        "branch": branch,
        "tokens": {"generated": num_tokens + 100, "evaluation": 100},
    }


def evaluation(number: int, passed: Passed, branch: int = 0) -> dict[str, Any]:
    rate = sum(passed.values()) / 4 / len(passed)
    row = {"pass_at_1": rate, "low": 0.0, "high": 1.0, "num_problems": len(passed)}
    return {
        "event": "evaluation",
        "step": number,
        "branch": branch,
        "heldout": {"headline": row},
        "problems": {i: [count, 4] for i, count in passed.items()},
    }


def make_run(
    root: Path,
    name: str,
    after: Passed,
    *,
    before: Passed | None = None,
    num_tokens: int = 1000,
    seed: int = 0,
    lines: Sequence[Mapping[str, Any]] = (),
    domains: Sequence[str] = (),
    **optimised: Any,
) -> Path:
    """A run that has ended, optimising what `optimised` says."""
    path = root / name
    path.mkdir()
    tree = {"model": {"path": "m"}, "run": {"name": name, "root": str(root)}, "evaluation": {"domains": list(domains)}}
    (path / "config.toml").write_text(to_toml(parse(tree, "test")))
    manifest = {"seed": seed, "identities": [entry({"algo": optimised}, from_step=0)]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    summary: dict[str, Any] = {"steps": 10, "tokens": {"generated": num_tokens + 100, "evaluation": 100}}
    for when, passed in (("before", before or dict.fromkeys(after, 0)), ("after", after)):
        (path / f"evaluation-{when}.json").write_text(json.dumps(scores(passed)))
        rate = sum(passed.values()) / 4 / len(passed)
        summary[f"heldout_{when}"] = {"headline": {"pass_at_1": rate, "low": rate, "high": rate}}
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
