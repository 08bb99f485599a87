"""Weights that are pulled over the wire are those that were published, whatever happens on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from curator.wire import Client, Keys, RemoteError, Server, WireTimeout
from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights import puller, service
from stream_grpo.weights.manifest import Probe, TensorSpec
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.puller import Puller
from stream_grpo.weights.service import WeightsService
from stream_grpo.weights.subscriber import Subscriber

PROBE = Probe(((1, 2, 3),), ((-1.0, -1.0),))
EXPECTED = {"w": TensorSpec((1000,), "float32")}


def publish(directory: Path, step: int) -> None:
    Publisher(directory, 3).publish(PolicyVersion(0, step), {}, {"w": torch.full((1000,), float(step))}, PROBE)


class Both:
    """A service in a thread, and a client of it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.server, self.stop = directory, Server(), threading.Event()
        self.service = WeightsService(directory, self.server)
        self.thread = threading.Thread(target=self.service.run, args=(self.stop,))
        self.thread.start()
        self.client = Client(self.service.address, name="sampler-1", peer="weights", resend_s=0.1)

    def close(self) -> None:
        self.stop.set()
        self.thread.join()
        self.client.close()


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    monkeypatch.setattr(service, "PIECE_BYTES", 1024)  # 4,000 bytes of tensor and a header are 5 pieces
    found = Both(tmp_path / "published")
    yield found
    found.close()


def test_what_is_published_arrives_and_reads_as_usual(both: Both, tmp_path: Path) -> None:
    pulling = Puller(both.client, tmp_path / "here")
    assert pulling.turn() is None
    for step in range(4):
        publish(both.directory, step)
        assert pulling.turn() == PolicyVersion(0, step)
    subscriber = Subscriber(tmp_path / "here")
    assert subscriber.newest() == PolicyVersion(0, 3)
    published = subscriber.read(PolicyVersion(0, 3), EXPECTED)
    assert torch.equal(published.tensors["w"], torch.full((1000,), 3.0))
    assert published.manifest.probe == PROBE
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["0.00000002", "0.00000003", "latest"]
    # One that begins anew pulls nothing that is here.
    num_bytes = both.service.status()["bytes_given"]
    assert Puller(both.client, tmp_path / "here").turn() == PolicyVersion(0, 3)
    assert both.service.status()["bytes_given"] == num_bytes > 4 * 4000


def test_a_cut_connection_costs_only_the_piece_on_its_way(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(both.directory, 1)
    pulling = Puller(both.client, tmp_path / "here")
    call, asked = both.client.call, list[int]()

    def cut(kind: str, fields: dict[str, int] | None = None, **more: float) -> object:
        if kind == "piece":
            asked.append(fields["offset"])  # type: ignore[index]
            if len(asked) == 3:
                raise WireTimeout("sampler-1: weights did not answer 'piece' within 30 s")
        return call(kind, fields, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(both.client, "call", cut)
    with pytest.raises(WireTimeout):
        pulling.turn()
    assert Subscriber(tmp_path / "here").newest() is None
    assert pulling.turn() == PolicyVersion(0, 1)
    assert asked[:5] == [0, 1024, 2048, 2048, 3072]


def test_what_is_left_of_another_run_with_higher_versions_takes_no_place(both: Both, tmp_path: Path) -> None:
    for step in (8, 9):
        publish(tmp_path / "here", step)
    (tmp_path / "here" / "latest").unlink()
    pulling = Puller(both.client, tmp_path / "here")
    for step in (1, 2):
        publish(both.directory, step)
        assert pulling.turn() == PolicyVersion(0, step)
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["0.00000001", "0.00000002", "latest"]
    assert Subscriber(tmp_path / "here").newest() == PolicyVersion(0, 2)


def test_damaged_bytes_are_refused_and_pulled_again(both: Both, tmp_path: Path) -> None:
    publish(both.directory, 1)
    tensors = both.directory / "0.00000001" / "model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + b"\x01")
    pulling = Puller(both.client, tmp_path / "here")
    with pytest.raises(WeightsError, match="sha256 of the pulled bytes"):
        pulling.turn()
    assert Subscriber(tmp_path / "here").newest() is None
    tensors.write_bytes(whole)
    assert pulling.turn() == PolicyVersion(0, 1)


def test_a_version_that_goes_meanwhile_is_passed_over(both: Both, tmp_path: Path) -> None:
    publish(both.directory, 1)
    (both.directory / "0.00000001" / "model.safetensors").unlink()
    pulling = Puller(both.client, tmp_path / "here")
    assert pulling.turn() is None
    publish(both.directory, 2)
    assert pulling.turn() == PolicyVersion(0, 2)


def test_what_is_no_request_for_weights_is_refused(both: Both) -> None:
    for kind, fields in (
        ("everything", {}),
        ("piece", {"version": [0, 1]}),
        ("piece", {"version": [0, 1], "offset": -1}),
        ("manifest", {"version": "../../keys"}),
    ):
        with pytest.raises(RemoteError):
            both.client.call(kind, fields)


def test_who_comes_without_a_key_is_counted_in_the_status(tmp_path: Path) -> None:
    server = Server("tcp://0.0.0.0:*", keys=Keys.generate())
    giving = WeightsService(tmp_path, server)
    stranger = Client(giving.address.replace("0.0.0.0", "127.0.0.1"), name="stranger")
    stranger.post("newest")
    deadline = time.monotonic() + 10
    while not giving.status()["wire_refused"]["strangers"] and time.monotonic() < deadline:
        giving.turn(0.01)
    stranger.close()
    server.close()
    assert giving.status()["wire_refused"]["strangers"] >= 1


def test_the_thread_of_a_sampler_waits_out_what_goes_wrong(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "POLL_S", 0.001)
    pulling, stop, turns = Puller(both.client, tmp_path / "here"), threading.Event(), list[int]()

    def turn() -> None:
        turns.append(1)
        if len(turns) > 2:
            stop.set()
        raise WireTimeout("weights did not answer")

    monkeypatch.setattr(pulling, "turn", turn)
    pulling.run(stop)
    assert len(turns) == 3
    assert pulling.trouble == "WireTimeout: weights did not answer"


def test_whatever_goes_wrong_is_said_once_and_shown_until_it_goes_well(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(puller, "POLL_S", 0.001)
    pulling, stop, turns = Puller(both.client, tmp_path / "here"), threading.Event(), list[int]()
    publish(both.directory, 1)
    (both.directory / "0.00000001" / "model.safetensors").unlink()
    pull = pulling._pull

    def refused_then_unsound(version: PolicyVersion) -> None:
        turns.append(1)
        if len(turns) == 6:
            stop.set()
        if len(turns) > 3:
            raise KeyError("sha256")  # a manifest of another program
        pull(version)

    monkeypatch.setattr(pulling, "_pull", refused_then_unsound)
    pulling.run(stop)
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == ["RemoteError", "KeyError"]
    assert pulling.trouble == "KeyError: 'sha256'"
    monkeypatch.undo()
    publish(both.directory, 2)
    assert pulling.turn() == PolicyVersion(0, 2)
    assert pulling.trouble == ""
