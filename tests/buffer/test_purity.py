"""What decides in the buffer loads neither torch nor zmq, and the process no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("modules", "absent"),
    [("book, intake, leases, journal, recovery, selectors, outcomes", ("torch", "zmq")), ("process", ("torch", "ray"))],
)
def test_imports_are_light(modules: str, absent: tuple[str, ...]) -> None:
    code = f"import sys; from stream_grpo.buffer import {modules}; print(*(n for n in {absent} if n in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.split() == []
