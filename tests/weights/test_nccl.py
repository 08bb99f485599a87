"""Weights over NCCL but for NCCL: who asks whom for what, with a group that is a queue."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from curator.wire import Client, Server
from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.manifest import Probe, TensorSpec
from stream_grpo.weights.nccl_sender import KEPT, NcclPublisher, NcclSender, Source
from stream_grpo.weights.nccl_subscriber import NcclSubscriber, RemoteWeights
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber

PROBE = Probe(((1, 2, 3),), ((-1.0, -1.0),))
EXPECTED = {"b": TensorSpec((2, 3), "float32"), "a": TensorSpec((4,), "bfloat16")}


class Groups:
    """What is sent into each group, by its port."""

    def __init__(self) -> None:
        self.sent: dict[int, Queue[tuple[str, torch.Tensor]]] = {}
        self.opened: list[dict[str, Any]] = []

    def open(self, group: dict[str, Any], source: Source) -> Groups.End:
        self.opened.append(group)
        return Groups.End(self.sent.setdefault(group["master_port"], Queue()), source)

    class End:
        def __init__(self, queue: Queue[tuple[str, torch.Tensor]], source: Source) -> None:
            self._queue, self._source = queue, source

        def send_weights(self) -> None:
            assert [meta.name for meta in self._source.metadata()] == ["a", "b"]
            for item in self._source:
                self._queue.put(item)

    def take(self, port: int, names: list[str]) -> dict[str, torch.Tensor]:
        """As a worker: in the order of the names it was told."""
        found = dict(self.sent.setdefault(port, Queue()).get(timeout=10) for _ in names)
        assert list(found) == names
        return found


class Learner:
    def __init__(self, directory: Path, groups: Groups) -> None:
        self.stop = threading.Event()
        sender = NcclSender(Server(), directory, groups.open, device="cpu")
        self.publisher = NcclPublisher(Publisher(directory, 3), sender)
        self.thread = threading.Thread(target=sender.run, args=(self.stop,))
        self.thread.start()

    def publish(self, step: int) -> str:
        tensors = {"b": torch.full((2, 3), float(step)), "a": torch.full((4,), step, dtype=torch.bfloat16)}
        return self.publisher.publish(PolicyVersion(0, step), {}, tensors, PROBE).sha256

    def end(self) -> None:
        self.stop.set()
        self.thread.join()


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def learner(tmp_path: Path, groups: Groups) -> Iterator[Learner]:
    found = Learner(tmp_path, groups)
    yield found
    found.end()


def subscriber(directory: Path, wait_s: float = 10.0) -> NcclSubscriber:
    def connect(address: str) -> Client:
        return Client(address, name="sampler-0", peer="learner", resend_s=0.1)

    return NcclSubscriber(directory, connect, wait_s)


def remote(weights: Any) -> RemoteWeights:
    assert isinstance(weights, RemoteWeights)
    return weights


def test_tensors_come_in_the_order_that_the_workers_were_told_and_the_group_is_kept(
    tmp_path: Path, learner: Learner, groups: Groups
) -> None:
    sampler, port = subscriber(tmp_path), 0
    hashes = set()
    for step in (1, 2):
        hashes.add(learner.publish(step))
        published = sampler.read(PolicyVersion(0, step), EXPECTED)
        assert published.manifest.probe == PROBE
        join = remote(published.tensors).receive(num_workers=2)
        assert join.update_info == {
            "names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[4], [2, 3]]
        }  # fmt: skip
        if step == 1:
            assert join.init_info is not None
            # The learner is rank 0 of the group, the workers are 1 and 2.
            assert (join.init_info["rank_offset"], join.init_info["world_size"]) == (1, 3)
            port = join.init_info["master_port"]
        else:
            assert join.init_info is None
        found = groups.take(port, join.update_info["names"])
        assert torch.equal(found["b"], torch.full((2, 3), float(step)))
        assert found["a"].dtype == torch.bfloat16
        remote(published.tensors).received()
    assert len(groups.opened) == 1
    # The guard tells versions of other weights apart by their hash.
    assert len(hashes) == 2
    # On the disk there are no weights.
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 500


def test_what_is_held_stays_and_what_was_missed_gives_way_to_the_newest(
    tmp_path: Path, learner: Learner, groups: Groups
) -> None:
    sampler = subscriber(tmp_path)
    learner.publish(1)
    held = sampler.read(PolicyVersion(0, 1), EXPECTED)
    learner.publish(2)
    init = remote(held.tensors).receive(1).init_info
    assert init is not None
    assert torch.equal(groups.take(init["master_port"], ["a", "b"])["b"], torch.full((2, 3), 1.0))
    # Whoever saw `latest` before it moved gets what is still there, and the newest where nothing is.
    assert subscriber(tmp_path).read(PolicyVersion(0, 1), EXPECTED).manifest.version == PolicyVersion(0, 1)
    learner.publish(3)
    assert subscriber(tmp_path).read(PolicyVersion(0, 2), EXPECTED).manifest.version == PolicyVersion(0, 3)


def test_what_a_sampler_that_left_holds_is_let_go(tmp_path: Path, learner: Learner) -> None:
    learner.publish(1)
    weights = remote(subscriber(tmp_path).read(PolicyVersion(0, 1), EXPECTED).tensors)
    for step in range(2, KEPT + 2):
        learner.publish(step)
    with pytest.raises(WeightsError, match="nothing is held, or for more than 4 versions"):
        weights.receive(1)


def test_after_a_failure_the_next_try_has_another_group(tmp_path: Path, learner: Learner, groups: Groups) -> None:
    learner.publish(1)
    weights = remote(subscriber(tmp_path).read(PolicyVersion(0, 1), EXPECTED).tensors)
    first, second = weights.receive(1).init_info, weights.receive(1).init_info  # `received` did not come
    assert first is not None
    assert second is not None
    for init in (first, second):
        assert torch.equal(groups.take(init["master_port"], ["a", "b"])["b"], torch.full((2, 3), 1.0))
    assert first["master_port"] != second["master_port"]


def test_a_learner_that_was_started_again_is_found(tmp_path: Path, learner: Learner, groups: Groups) -> None:
    sampler = subscriber(tmp_path)
    learner.publish(1)
    remote(sampler.read(PolicyVersion(0, 1), EXPECTED).tensors).receive(1)
    again = Learner(tmp_path, groups)
    try:
        # While it restores it offers nothing, and the file still names what the one before it published.
        assert sampler.newest() == PolicyVersion(0, 1)
        impatient = subscriber(tmp_path, wait_s=0.2)
        with pytest.raises(WeightsError, match=r"waited 0.2 s for the learner .* learner refused 'hold': .*nothing is"):
            impatient.read(PolicyVersion(0, 1), EXPECTED)
        soon = threading.Timer(0.3, again.publish, (2,))
        soon.start()
        published = sampler.read(PolicyVersion(0, 1), EXPECTED)
        soon.join()
        assert published.manifest.version == PolicyVersion(0, 2)
        assert remote(published.tensors).receive(1).init_info is not None
    finally:
        again.end()


def test_what_is_offered_before_its_files_are_there_is_waited_for(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.publish(1)
    offered, may_publish = threading.Event(), threading.Event()
    publish = Publisher.publish

    def late(*arguments: Any, **more: Any) -> Any:
        offered.set()
        assert may_publish.wait(10)
        return publish(*arguments, **more)

    monkeypatch.setattr(Publisher, "publish", late)
    publishing = threading.Thread(target=learner.publish, args=(2,))
    publishing.start()
    assert offered.wait(10)
    threading.Timer(0.2, may_publish.set).start()
    # Version 1 is held by nobody, and of version 2 there is no manifest yet.
    assert subscriber(tmp_path).read(PolicyVersion(0, 1), EXPECTED).manifest.version == PolicyVersion(0, 2)
    publishing.join()


def test_tensors_that_nobody_holds_leave_with_the_next_version(tmp_path: Path, learner: Learner) -> None:
    seen, sampler = [], subscriber(tmp_path)
    for step in range(1, 5):
        tensor = torch.full((2, 3), float(step))
        seen.append(weakref.ref(tensor))
        tensors = {"b": tensor, "a": torch.zeros(4, dtype=torch.bfloat16)}
        learner.publisher.publish(PolicyVersion(0, step), {}, tensors, PROBE)
        if step == 2:
            sampler.read(PolicyVersion(0, 2), EXPECTED)
        del tensor, tensors
    # The one that is held, and the newest.
    assert [ref() is not None for ref in seen] == [False, True, False, True]


def test_what_was_published_the_other_way_counts_as_nothing(tmp_path: Path, learner: Learner) -> None:
    files, sampler = Subscriber(tmp_path), subscriber(tmp_path)
    learner.publish(1)
    assert (files.newest(), sampler.newest()) == (None, PolicyVersion(0, 1))
    tensors = {"b": torch.ones(2, 3), "a": torch.ones(4, dtype=torch.bfloat16)}
    Publisher(tmp_path, 3).publish(PolicyVersion(0, 2), {}, tensors, PROBE)
    assert files.newest() == PolicyVersion(0, 2)
    assert torch.equal(files.read(PolicyVersion(0, 2), EXPECTED).tensors["b"], tensors["b"])
    again = subscriber(tmp_path)
    assert again.newest() is None
    learner.publish(3)
    assert again.newest() == PolicyVersion(0, 3)


def test_tensors_of_another_model_are_refused_by_name_before_anything_is_sent(
    tmp_path: Path, learner: Learner, groups: Groups
) -> None:
    learner.publish(1)
    wrong = EXPECTED | {"b": TensorSpec((3, 2), "float32")}
    weights = remote(subscriber(tmp_path).read(PolicyVersion(0, 1), wrong).tensors)
    with pytest.raises(WeightsError, match=r"not the tensors of the learner: \['b'\]"):
        weights.receive(1)
    assert groups.opened == []
    with pytest.raises(WeightsError, match="b is not finite"):
        learner.publisher.publish(PolicyVersion(0, 2), {}, {"b": torch.tensor([torch.nan])}, PROBE)


@pytest.mark.engine
def test_the_engine_joins_receives_and_says_which_worker_failed(
    tmp_path: Path, learner: Learner, groups: Groups
) -> None:
    from stream_grpo.config_file import parse
    from stream_grpo.sampler.async_engine import AsyncEngine

    class Llm:
        """vLLM's front end, whose workers take tensors out of the queue of their group."""

        def __init__(self) -> None:
            self.port, self.weights, self.calls = 0, dict[str, torch.Tensor](), list[str]()
            self.error: str | None = None

        async def init_weight_transfer_engine(self, request: Any) -> None:
            self.port = request.init_info["master_port"]

        async def update_weights(self, request: Any) -> None:
            self.weights = groups.take(self.port, request.update_info["names"])

        async def collective_rpc(self, name: str) -> list[str | None]:
            return [None, self.error]

        def __getattr__(self, name: str) -> Any:
            async def call(*arguments: Any, **more: Any) -> None:
                self.calls.append(name)

            return call

    learner.publish(1)
    published = subscriber(tmp_path).read(PolicyVersion(0, 1), EXPECTED)
    engine, llm = AsyncEngine.__new__(AsyncEngine), Llm()
    engine._config = parse({"model": {"path": "m"}, "sampler": {"tensor_parallel_size": 2, "engine": "async"}}, "test")
    engine._llm, engine._loop, engine._slots, engine._kept_kv = llm, asyncio.new_event_loop(), [], set()
    engine.apply_weights(published.tensors, PolicyVersion(0, 1), recompute_kv=True)
    assert torch.equal(llm.weights["b"], torch.full((2, 3), 1.0))
    order = ["pause_generation", "start_weight_update", "finish_weight_update", "update_weight_version"]
    assert llm.calls == [*order, "resume_generation"]
    assert not remote(published.tensors).is_broken
    llm.error = "out of memory"
    with pytest.raises(WeightsError, match=r"weights 0.1: worker 1 could not load them: out of memory"):
        engine.apply_weights(published.tensors, PolicyVersion(0, 1), recompute_kv=True)
    assert remote(published.tensors).is_broken
    assert llm.calls[-1] == "resume_generation"
    engine._loop.close()
