"""Reward functions that misbehave as their response says; named `python:tests.rewards.fake_verifiers.<name>`."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOARD: list[bytes] = []


def obedient(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Does what the response says, and scores it 1 where that is the gold."""
    word, _, rest = solution_str.partition(" ")
    if word in DEEDS:
        DEEDS[word](rest)
    return float(solution_str == ground_truth)


def spin(_: str) -> None:
    """Holds the interpreter's lock for hours: no signal handler would run."""
    assert 10 ** (10**9) % 7


def eat(_: str) -> None:
    while True:
        HOARD.append(bytes(1 << 28))  # of pages that nobody touches


def recurse(rest: str) -> None:
    recurse(rest)


def fail(rest: str) -> None:
    raise OSError(f"the disk of {rest} is gone")


def fail_once(path: str) -> None:
    if not Path(path).exists():
        Path(path).touch()
        raise OSError("not yet")


def leave_a_child(path: str) -> None:
    Path(path).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
    time.sleep(1000)


DEEDS: dict[str, Callable[[str], Any]] = {
    "hang": lambda _: time.sleep(1000),
    "sleep": lambda seconds: time.sleep(float(seconds)),
    "spin": spin,
    "eat": eat,
    "recurse": recurse,
    "exit": lambda status: os._exit(int(status)),
    "quit": lambda _: sys.exit(3),
    "segfault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "raise": fail,
    "once": fail_once,
    "child": leave_a_child,
    "print": lambda _: sys.stdout.write('\n{}\n{"from": 1}\n'),
}


def always_hangs(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    time.sleep(1000)
    return 0.0


def trl_length(completions: list[Any], prompts: list[Any], target: list[str], **columns: list[Any]) -> list[float]:
    """TRL's shape: 1 for a completion as long as the gold; chat completions are lists of messages."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert all(len(values) == len(completions) for values in columns.values())
    return [float(len(text) == len(gold)) for text, gold in zip(texts, target, strict=True)]


def trl_columns(completions: list[str], level: list[int]) -> list[float]:
    return [float(value) for value in level]


async def trl_async(completions: list[str], **columns: list[Any]) -> list[float]:
    await asyncio.sleep(0)
    return [0.75 for _ in completions]


def trl_two(completions: list[str], **columns: list[Any]) -> list[float]:
    return [1.0, 0.0]


def trl_scalar(completions: list[str], **columns: list[Any]) -> float:
    return 1.0


def trl_none(completions: list[str], **columns: list[Any]) -> list[float | None]:
    return [None]


def trl_nan(completions: list[str], **columns: list[Any]) -> list[float]:
    return [float("nan")]


def trl_text(completions: list[str], **columns: list[Any]) -> list[str]:
    return ["1.0"]


def trl_needs_more(completions: list[str], rubric: list[str]) -> list[float]:
    return [1.0]


def verl_dict(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": 0.4, "acc": True, "format": 0.1, "pred": "41", "source": data_source, "level": extra_info["level"]}


def verl_no_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    return {"acc": 1.0}


async def verl_async(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    await asyncio.sleep(0)
    return 1.0


def neither(text: str, gold: str) -> float:
    return 1.0
