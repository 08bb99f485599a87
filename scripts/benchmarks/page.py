"""docs/benchmarks.md: a section a script, which that script alone writes, with the machine and the date."""

from __future__ import annotations

import datetime
import os
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
QUICK = "*Of `--quick`: a look, not a measurement.*"
_HEAD = """# Benchmarks

Every section is written by the script that it names, from one run on one machine. Ratios are within that run.
"""


def write_section(path: Path, script: str, title: str, text: str, *, is_quick: bool) -> bool:
    """Put a section in the place of the one that the script has written before; False where it is left as it is.

    What `--quick` finds never takes the place of a measurement.
    """
    page = path.read_text(encoding="utf-8") if path.exists() else _HEAD
    begin, end = f"<!-- {script} -->", f"<!-- end of {script} -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}\n", page, flags=re.DOTALL)
    if is_quick and found and QUICK not in found.group():
        return False
    made_by = f"`scripts/{script}`, {datetime.date.today():%Y-%m-%d}, {machine()}."
    parts = [begin, f"## {title}", "", made_by, *(["", QUICK] if is_quick else []), "", text.strip(), "", end, ""]
    section = "\n".join(parts)
    page = page.replace(found.group(), section) if found else f"{page.rstrip()}\n\n{section}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return True


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


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
