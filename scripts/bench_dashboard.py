"""What it costs to open a long run on the live page.

The run is made of the lines of a real one, repeated with times and steps that go on. Reading is measured in processor
seconds of this process, so that what else runs does not count; a browser, where asked for, in seconds on the clock.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from stream_grpo.dashboard.views import RunView
from stream_grpo.metrics import FILE_NAME

GOAL_S = 3.0
TIME, STEP = re.compile(rb'"time_s": ([0-9.]+)'), re.compile(rb'"step": (\d+)')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder with some steps")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--browser", action="store_true", help="open it in Chromium, too")
    parser.add_argument("--json", action="store_true", help="a last line with all figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        long = Path(folder) / "long"
        long.mkdir()
        shutil.copy(options.run / "config.toml", long)
        num_bytes = lengthen(options.run / FILE_NAME, long / FILE_NAME, options.steps)
        figures = {"steps": options.steps, "bytes": num_bytes} | reading(long)
        if options.browser:
            figures |= in_browser(long)
    for name, value in figures.items():
        print(f"{name:>16}  {value:,}")
    print(f"goal: under {GOAL_S:g} s")
    if options.json:
        print(json.dumps(figures))


def lengthen(source: Path, target: Path, num_steps: int) -> int:
    """Repeat the lines of a run until there are so many steps; returns the bytes."""
    lines = source.read_bytes().splitlines(keepends=True)
    times = [float(found[1]) for line in lines if (found := TIME.search(line))]
    span_s, step, turn = times[-1] - times[0] + 2, 0, 0
    with target.open("wb") as file:
        while step < num_steps:
            for line in lines:
                found = TIME.search(line)
                moved = (
                    TIME.sub(b'"time_s": %.6f' % (float(found[1]) + turn * span_s), line, count=1) if found else line
                )
                if b'"event": "step"' in line[:120]:
                    step += 1
                    moved = STEP.sub(b'"step": %d' % step, moved, count=1)
                elif b'"event": "evaluation"' in line[:120]:
                    moved = STEP.sub(b'"step": %d' % step, moved, count=1)
                file.write(moved)
            turn += 1
        return file.tell()


def reading(run: Path) -> dict[str, float]:
    """The run read, and sent as a whole and as what has come since."""
    with (run / FILE_NAME).open("rb") as file:
        while file.read(1 << 20):  # from the disk, which is not what is measured
            pass
    begun, view = time.process_time(), RunView("long", run)
    msgspec.json.encode(view.update("", 0.0))
    first_s = time.process_time() - begun
    while not (sent := view.update("", 1.0))["complete"]:
        pass
    whole = msgspec.json.encode(sent)
    read_s, begun = time.process_time() - begun, time.process_time()
    delta = msgspec.json.encode(view.update(sent["cursor"], 1.0))
    return {
        "first_s": round(first_s, 2),
        "read_s": round(read_s, 2),
        "delta_s": round(time.process_time() - begun, 4),
        "whole_bytes": len(whole),
        "delta_bytes": len(delta),
        "buckets": len(sent["steps"]["x"]),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
    }


def in_browser(run: Path) -> dict[str, float]:
    """Seconds from the call of an address until all pictures are drawn, and until they are of all lines, of a server
    that has read nothing before."""
    from playwright.sync_api import sync_playwright

    code = "import sys; from stream_grpo.dashboard.commands import *; s = listen(LOOPBACK, 0); "
    code += "print(address(s, LOOPBACK), flush=True); serve([Path(sys.argv[1])], s)"
    server = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with sync_playwright() as playwright:
            program = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page()
            page.goto(url + "static/icon.svg")  # browser and server have started
            begun = time.monotonic()
            page.goto(url)
            page.wait_for_selector("body[data-ready]", timeout=120_000)
            drawn_s = time.monotonic() - begun
            page.wait_for_selector("body[data-ready=true]", timeout=120_000)
            return {"browser_s": round(drawn_s, 2), "browser_all_s": round(time.monotonic() - begun, 2)}
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
