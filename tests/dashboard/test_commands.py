"""The command, and the page beside a run."""

import socket
import time
import urllib.request
from pathlib import Path

import pytest

from stream_grpo import train
from stream_grpo.config_file import parse
from stream_grpo.console import Console
from stream_grpo.dashboard.commands import LOOPBACK, PageBeside, address, dashboard, listen
from stream_grpo.errors import ConfigError
from tests.dashboard.runs import WrittenRun


def quiet(text: str) -> None:
    raise AssertionError(text)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run there"):
        dashboard([tmp_path], host=LOOPBACK, port=0, say=quiet)


def test_one_run_twice_is_refused(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run").path
    with pytest.raises(ConfigError, match="the same run twice"):
        dashboard([run, run / ".." / "run"], host=LOOPBACK, port=0, say=quiet)


@pytest.mark.parametrize("host", ["", " ", "[]"])
def test_no_host_is_not_taken_for_all_of_them(tmp_path: Path, host: str) -> None:
    run = WrittenRun(tmp_path / "run").path
    with pytest.raises(ConfigError, match=r"expected an address: 127\.0\.0\.1 for this machine alone"):
        dashboard([run], host=host, port=0, say=quiet)


def test_a_port_in_use_is_named_with_what_would_be_right() -> None:
    with listen(LOOPBACK, 0) as taken, pytest.raises(ConfigError, match="use another --host or --port"):
        listen(LOOPBACK, taken.getsockname()[1])


def test_the_address_has_the_token() -> None:
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
        assert address(listener, "10.0.0.1", "secret") == f"http://10.0.0.1:{port}/?token=secret"
        assert address(listener, "::1") == f"http://[::1]:{port}/"


def test_a_run_goes_on_without_a_page_where_there_can_be_none(tmp_path: Path) -> None:
    run, said = WrittenRun(tmp_path / "run").path, list[str]()
    (run / "logs").mkdir()
    with listen(LOOPBACK, 0) as taken:
        PageBeside(run, taken.getsockname()[1], said.append).stop()
    assert len(said) == 1
    assert said[0].startswith("no live page, the run goes on without")


def answer_of(url: str, deadline_s: float = 30.0) -> bytes:
    until = time.monotonic() + deadline_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}api/runs", timeout=deadline_s) as answer:
                return bytes(answer.read())
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def test_the_page_beside_a_run_answers_and_ends_when_it_is_told(tmp_path: Path) -> None:
    run, said = WrittenRun(tmp_path / "run"), list[str]()
    (run.path / "logs").mkdir()
    run.steps(1, 2)
    page = PageBeside(run.path, 0, said.append)
    try:
        url = said[0].removeprefix("live page: ")
        # It is there before the process that serves it: the request waits.
        assert b'"step":2' in answer_of(url)
    finally:
        page.stop()
    port = int(url.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
        pass


@pytest.mark.parametrize("is_wanted", [True, False])
def test_training_serves_its_page_until_it_ends_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    calls = list[str]()

    class Page:
        def __init__(self, run_dir: Path, port: int, say: object) -> None:
            calls.append(f"{run_dir.name} at {port}")

        def stop(self) -> None:
            calls.append("stopped")

    monkeypatch.setattr(train, "PageBeside", Page)
    tree = {
        "model": {"path": "-"},
        "run": {"name": "mine", "root": str(tmp_path)},
        "tracking": {"dashboard": is_wanted, "dashboard_port": 7000},
    }
    with pytest.raises(KeyboardInterrupt), train._live_page(parse(tree, source="test"), Console()):
        raise KeyboardInterrupt
    assert calls == (["mine at 7000", "stopped"] if is_wanted else [])
