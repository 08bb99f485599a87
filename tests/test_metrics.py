"""Metrics are whole lines, and readable by any JSON reader."""

import json
import math
from pathlib import Path

import pytest

from stream_grpo.metrics import FILE_NAME, MetricsLog, MetricsReader


def test_a_line_is_one_json_object_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, "learner", clock=lambda: 5.0)
    log.write("step", {"step": 1, "loss": math.nan, "age": {"max": math.inf, "mean": 0.5}})
    expected = {"time_s": 5.0, "source": "learner", "event": "step", "step": 1, "loss": None}
    assert json.loads((tmp_path / FILE_NAME).read_text()) == {**expected, "age": {"max": None, "mean": 0.5}}


def test_a_reader_takes_each_whole_line_once_and_no_half_line(tmp_path: Path) -> None:
    reader = MetricsReader(tmp_path)
    assert list(reader.new_lines()) == []
    MetricsLog(tmp_path, "a").write("x", {"n": 1})
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"event": "x", "half": ')
    assert [line["n"] for line in reader.new_lines()] == [1]
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("2}\n")
    assert list(reader.new_lines()) == [{"event": "x", "half": 2}]
    assert list(reader.new_lines()) == []


def test_a_line_that_a_crash_cut_is_passed_over_and_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"event": "x", "n": 1}\n{"n": 2, "ha')
    MetricsLog(tmp_path, "a").write("x", {"n": 3})
    assert [line["n"] for line in MetricsReader(tmp_path).new_lines()] == [1, 3]


def test_two_writers_share_a_file(tmp_path: Path) -> None:
    logs = [MetricsLog(tmp_path, source) for source in ("a", "b")]
    for n in range(100):
        logs[n % 2].write("x", {"n": n})
    lines = list(MetricsReader(tmp_path).new_lines())
    assert [line["n"] for line in lines] == list(range(100))
    assert {line["source"] for line in lines} == {"a", "b"}


@pytest.mark.parametrize(
    "line", [b"\0" * 64, b'{"event": "\xe9"}', b"null", b'{"a": 1}', b'{"event": 3}', b"1" * 5000, b"[" * 100_000]
)
def test_what_is_no_line_of_metrics_is_passed_over(tmp_path: Path, line: bytes) -> None:
    MetricsLog(tmp_path, "a").write("x", {"n": 1})
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(line + b"\n")
    MetricsLog(tmp_path, "a").write("x", {"n": 2})
    assert [line["n"] for line in MetricsReader(tmp_path).new_lines()] == [1, 2]
