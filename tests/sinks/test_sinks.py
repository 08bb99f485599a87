"""Where lines go: each sink by what comes out of it, and none of them ends a run."""

from __future__ import annotations

import os
import socket
import struct
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.sinks.prometheus import PrometheusSink
from stream_grpo.sinks.sink import Rows, Sinks, numbers
from stream_grpo.sinks.tensorboard import TensorBoardSink, crc32c, event, masked, record
from stream_grpo.sinks.trackers import open_trackers

STEP = {"time_s": 7.0, "source": "learner", "event": "step", "step": 3, "loss": 0.5, "by_age": {"0": {"ess": 1.0}}}
SAMPLER = {"time_s": 6.0, "source": "launcher", "event": "status", "part": "sampler-0", "num_running": 12}
EVALUATION = {
    "time_s": 8.0, "source": "sampler-0", "event": "evaluation", "branch": 0, "step": 2,
    "heldout": {"headline": {"pass_at_1": 0.25, "low": None, "high": 0.5, "num_problems": 8}},
}  # fmt: skip
ALARM = {"time_s": 8.0, "source": "launcher", "event": "alarm", "name": "entropy", "sentence": "s", "cause": "c"}


class Kept:
    """Keeps lines; raises from a given one on."""

    def __init__(self, fails_at: int = -1) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.fails_at, self.finished = fails_at, False

    def write(self, line: Mapping[str, Any]) -> None:
        if len(self.lines) == self.fails_at:
            raise OSError("disk full")
        self.lines.append(line)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.finished = True


def test_a_sink_that_fails_is_dropped_with_one_warning_and_the_others_go_on() -> None:
    said: list[str] = []
    sinks, sound, broken = Sinks(said.append), Kept(), Kept(fails_at=1)
    sinks.open("broken", lambda: broken)
    sinks.open("sound", lambda: sound)
    for _ in range(5):
        sinks.write(STEP)
    sinks.finish({})
    assert (len(sound.lines), len(broken.lines)) == (5, 1)
    assert (sound.finished, broken.finished) == (True, False)
    assert said == ["broken is dropped, the run goes on: OSError: disk full"]


def test_one_that_cannot_be_made_is_gone_without() -> None:
    said: list[str] = []
    sinks = Sinks(said.append)

    def make() -> Kept:
        raise ImportError("No module named 'wandb'")

    sinks.open("W&B", make)
    sinks.write(STEP)
    assert said == ["W&B is dropped, the run goes on: ImportError: No module named 'wandb'"]


def test_numbers_of_a_line_are_named_by_their_path() -> None:
    line = {"a": 1, "b": {"c": 2.5, "d": {"e": None, "f": True}}, "g": "text", "h": [1, 2]}
    assert dict(numbers(line)) == {"a": 1, "b/c": 2.5}
    # A name for every problem would be too many; a count of problems is one name.
    assert dict(numbers({"problems": 9, "losses": {"by_problem": {"p1": {"num_lost": 3}}}})) == {"problems": 9}


def test_a_row_is_a_step_with_the_newest_status_of_every_part() -> None:
    rows = Rows()
    assert rows.take(SAMPLER) == {}
    assert rows.take({**SAMPLER, "num_running": 13}) == {}
    row = rows.take(STEP)
    assert (row["loss"], row["by_age/0/ess"], row["sampler-0/num_running"], rows.step) == (0.5, 1.0, 13, 3)
    assert "sampler-0/num_running" not in rows.take({**STEP, "step": 4})  # nothing newer came
    assert rows.take(EVALUATION) == {
        "heldout/branch": 0, "heldout/step": 2, "heldout/pass_at_1": 0.25, "heldout/high": 0.5,
        "heldout/num_problems": 8,
    }  # fmt: skip
    assert rows.take(ALARM) == {"alarm/entropy": 1.0}
    assert rows.take({"event": "warning", "source": "x", "message": "y"}) == {}


def test_the_crc_is_that_of_the_rfc() -> None:
    # RFC 3720, B.4: 32 bytes of zeros, of ones, rising; and the usual check word.
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"123456789") == 0xE3069283


def test_an_event_by_hand() -> None:
    # 1: wall time as a double; 2: step 300 as two bytes of 7 bits; 5: one value of {1: tag, 2: float}.
    value = b"\x0a\x01a" + b"\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(value)]) + value
    expected = b"\x09" + struct.pack("<d", 2.0) + b"\x10\xac\x02" + b"\x2a" + bytes([len(summary)]) + summary
    assert event(2.0, 300, {"a": 0.5}) == expected
    data = record(expected)
    assert struct.unpack("<Q", data[:8]) == (len(expected),)
    assert struct.unpack("<I", data[8:12]) == (masked(crc32c(data[:8])),)
    assert data[12:-4] == expected


def records(data: bytes) -> Iterator[bytes]:
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked(crc32c(body)),)
        yield body
        data = data[16 + length :]


def test_tensorboard_gets_a_file_of_scalars_that_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, now_s=1000.0)
    for line in (SAMPLER, STEP, EVALUATION):
        sink.write(line)
    (path,) = (tmp_path / "tensorboard").iterdir()
    assert path.name == f"events.out.tfevents.1000.{socket.gethostname()}.{os.getpid()}"
    first, step, heldout = records(path.read_bytes())
    assert b"brain.Event:2" in first
    assert b"sampler-0/num_running" in step
    assert b"\x10\x03" in step[:12]  # step 3
    assert b"\x10\x02" in heldout[:12]  # that of the weights that were evaluated
    sink.finish({"steps": 3, "tokens": {"trained": 10}})
    summary = list(records(path.read_bytes()))[-1]
    assert b"summary/tokens/trained" in summary
    assert summary[:9] == b"\x09" + struct.pack("<d", 8.0)  # at the time of the newest line


def test_prometheus_finds_the_newest_figures_with_run_part_and_key() -> None:
    sink = PrometheusSink("my run", 0)
    for line in (SAMPLER, STEP, {**SAMPLER, "num_running": 14}, EVALUATION, ALARM, ALARM):
        sink.write(line)
    assert sink.address.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(sink.address) as answer:
        text = answer.read().decode()
    assert 'stream_grpo_step_by_age_ess{key="0",part="",run="my run"} 1.0' in text
    assert 'stream_grpo_sampler_num_running{key="",part="sampler-0",run="my run"} 14.0' in text
    assert 'stream_grpo_evaluation_heldout_pass_at_1{key="headline",part="",run="my run"} 0.25' in text
    assert 'stream_grpo_alarms_total{name="entropy",run="my run"} 2.0' in text
    assert "# HELP stream_grpo_sampler_num_running running and queued in the engine [requests]" in text
    sink.finish({})
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(sink.address)


def test_prometheus_leaves_out_figures_of_single_problems() -> None:
    # A name for every problem of a pool would be too many; how many problems there are is one.
    losses = {"requeued": 2, "never_fresh": {"p1": 1}, "by_problem": {"p1": {"num_lost": 3, "num_trained": 0}}}
    sink = PrometheusSink("r", 0)
    try:
        sink.write({"time_s": 1.0, "event": "status", "part": "buffer", "ledger": {"losses": losses}})
        sink.write({"time_s": 1.0, "event": "status", "part": "curator", "problems": 9})
        gauges = {gauge.name: len(gauge.samples) for gauge in sink.collect()}
    finally:
        sink.finish({})
    assert gauges.keys() >= {"stream_grpo_buffer_ledger_losses_requeued", "stream_grpo_curator_problems"}
    assert not [name for name in gauges if "by_problem" in name or "never_fresh" in name]


def configuration(tmp_path: Path, **tracking: Any) -> Config:
    tree = {"model": {"path": "m"}, "run": {"root": str(tmp_path), "name": "r"}, "tracking": tracking}
    (tmp_path / "r").mkdir()
    return parse(tree, "test")


def test_what_tracking_asks_for_is_opened_and_a_taken_port_is_gone_without(tmp_path: Path) -> None:
    said, warned = list[str](), list[str]()
    sinks = Sinks(warned.append)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = configuration(tmp_path, wandb="disabled", tensorboard=True, prometheus_port=port)
        open_trackers(sinks, config, said.append)
    sinks.finish({})
    assert list((config.run_dir / "tensorboard").iterdir())
    assert (len(warned), said) == (1, [])
    assert warned[0].startswith("Prometheus is dropped, the run goes on: OSError")


def test_by_default_there_is_neither_a_server_nor_an_event_file(tmp_path: Path) -> None:
    tracking = parse({"model": {"path": "m"}}, "test").tracking
    assert (tracking.wandb, tracking.tensorboard, tracking.prometheus_port) == ("offline", False, None)
