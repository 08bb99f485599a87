"""Weights on their way: complete or invisible, checked on arrival, never going back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.manifest import (
    Manifest,
    Probe,
    TensorSpec,
    folder_name,
    from_json,
    model_tensors,
    parse_folder_name,
    to_json,
)
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.weights.test_tensors_file import Watched

PROBE = Probe(((1, 2, 3),), ((-0.5, -0.25),))
EXPECTED = {"bias": TensorSpec((2,), "float32"), "weight": TensorSpec((2, 3), "float32")}


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2, 3), value), "bias": torch.zeros(2)}


def v(step: int, branch: int = 0) -> PolicyVersion:
    return PolicyVersion(branch, step)


def test_what_is_published_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    forks = {1: v(10)}
    written = Publisher(tmp_path, 3, clock=lambda: 5.0).publish(v(12, 1), forks, tensors(0.1), PROBE)
    subscriber = Subscriber(tmp_path)
    assert subscriber.newest() == v(12, 1)
    published = subscriber.read(v(12, 1), EXPECTED)
    assert published.manifest == written
    assert published.manifest.forks == forks
    assert published.manifest.probe == PROBE
    assert published.manifest.created_at_s == 5.0
    assert published.manifest.tensors == EXPECTED
    assert torch.equal(published.tensors["weight"], tensors(0.1)["weight"])


def test_bfloat16_survives(tmp_path: Path) -> None:
    weight = torch.tensor([0.1, 3.0], dtype=torch.bfloat16)
    Publisher(tmp_path, 3).publish(v(0), {}, {"w": weight}, PROBE)
    read = Subscriber(tmp_path).read(v(0), {"w": TensorSpec((2,), "bfloat16")})
    assert torch.equal(read.tensors["w"], weight)


def test_nothing_is_published_yet(tmp_path: Path) -> None:
    assert Subscriber(tmp_path / "not there").newest() is None


def test_c24_a_half_written_version_is_invisible_and_swept_away(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 3)
    publisher.publish(v(11), {}, tensors(), PROBE)
    (tmp_path / ".writing-0.00000012").mkdir()
    (tmp_path / ".writing-0.00000012" / "model.safetensors").write_bytes(b"half")
    assert Subscriber(tmp_path).newest() == v(11)
    Publisher(tmp_path, 3).publish(v(12), {}, tensors(2.0), PROBE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.00000011", "0.00000012", "latest"]


def test_c24_a_version_pruned_while_it_is_read_gives_the_newest(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 2)
    subscriber = Subscriber(tmp_path)
    publisher.publish(v(1), {}, tensors(1.0), PROBE)
    wanted = subscriber.newest()
    assert wanted is not None
    for step in (2, 3):
        publisher.publish(v(step), {}, tensors(float(step)), PROBE)
    # keep_versions = 2: of 1, 2, 3 the first is gone.
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.00000002", "0.00000003", "latest"]
    published = subscriber.read(wanted, EXPECTED)
    assert published.manifest.version == v(3)
    assert published.tensors["weight"][0, 0] == 3.0


def test_c24_a_version_pruned_between_two_files_of_it_gives_the_newest_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, read_bytes = Publisher(tmp_path, 2), Path.read_bytes
    publisher.publish(v(11), {}, tensors(11.0), PROBE)

    def slow(path: Path) -> bytes:
        if path.parent.name == folder_name(v(11)):
            for step in (12, 13, 14):
                publisher.publish(v(step), {}, tensors(float(step)), PROBE)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", slow)
    published = Subscriber(tmp_path).read(v(11), EXPECTED)
    assert published.manifest.version == v(14)
    assert published.tensors["weight"][0, 0] == 14.0


def test_c24_a_file_that_is_being_read_is_read_to_its_end_though_its_version_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(tmp_path, 2)
    publisher.publish(v(11), {}, tensors(11.0), PROBE)

    def slow(path: Path) -> bytes:
        with path.open("rb") as file:
            start = file.read(16)
            for step in (12, 13, 14):
                publisher.publish(v(step), {}, tensors(float(step)), PROBE)
            assert not path.exists()
            return start + file.read()

    monkeypatch.setattr(Path, "read_bytes", slow)
    published = Subscriber(tmp_path).read(v(11), EXPECTED)
    assert published.manifest.version == v(11)
    assert published.tensors["weight"][0, 0] == 11.0


def test_c24_bytes_that_were_damaged_on_the_way_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Publisher(tmp_path, 2).publish(v(11), {}, tensors(11.0), PROBE)
    read_bytes, reads = Path.read_bytes, [0]

    def torn(path: Path) -> bytes:
        reads[0] += 1
        return read_bytes(path)[: None if reads[0] > 1 else 100]

    monkeypatch.setattr(Path, "read_bytes", torn)
    assert Subscriber(tmp_path).read(v(11), EXPECTED).manifest.version == v(11)
    assert reads == [2]


def test_a_version_that_is_gone_with_nothing_newer_is_an_error(tmp_path: Path) -> None:
    Publisher(tmp_path, 2).publish(v(1), {}, tensors(), PROBE)
    shutil.rmtree(tmp_path / folder_name(v(1)))
    with pytest.raises(WeightsError, match="not there to read"):
        Subscriber(tmp_path).read(v(1), EXPECTED)


def test_versions_go_forward_also_over_a_new_branch_and_never_back(tmp_path: Path) -> None:
    publisher, subscriber = Publisher(tmp_path, 3), Subscriber(tmp_path)
    publisher.publish(v(13), {}, tensors(), PROBE)
    assert subscriber.newest() == v(13)
    publisher.publish(v(10, branch=1), {1: v(10)}, tensors(), PROBE)
    assert subscriber.newest() == v(10, branch=1)
    with pytest.raises(WeightsError, match=r"0\.14 are older than the published 1\.10"):
        publisher.publish(v(14), {}, tensors(), PROBE)
    (tmp_path / "latest").write_text(folder_name(v(13)))
    with pytest.raises(WeightsError, match=r"goes back from 1\.10 to 0\.13"):
        subscriber.newest()


def test_the_same_version_again_is_nothing_if_equal_and_an_error_if_not(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 3)
    publisher.publish(v(0), {}, tensors(1.0), PROBE)
    publisher.publish(v(0), {}, tensors(1.0), PROBE)
    with pytest.raises(WeightsError, match="published with other weights"):
        publisher.publish(v(0), {}, tensors(2.0), PROBE)


def test_a_flipped_bit_is_found_by_the_checksum_of_the_received_bytes(tmp_path: Path) -> None:
    Publisher(tmp_path, 3).publish(v(0), {}, tensors(), PROBE)
    path = tmp_path / folder_name(v(0)) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(WeightsError, match="sha256 of the received bytes"):
        Subscriber(tmp_path).read(v(0), EXPECTED)


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ({"weight": torch.ones(2, 3)}, r"missing tensors \['bias'\]"),
        (tensors() | {"head": torch.ones(1)}, r"unexpected tensors \['head'\]"),
        (tensors() | {"bias": torch.zeros(3)}, r"bias is .*\(3,\).*the model has .*\(2,\)"),
        (tensors() | {"bias": torch.zeros(2, dtype=torch.float64)}, "bias is .*float64"),
        (tensors() | {"bias": torch.tensor([0.0, float("nan")])}, "bias is not finite"),
        (tensors() | {"bias": torch.tensor([0.0, float("inf")])}, "bias is not finite"),
    ],
)
def test_weights_of_another_model_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: dict[str, torch.Tensor], complaint: str
) -> None:
    # A publisher of this version would not have sent some of them.
    monkeypatch.setattr("stream_grpo.weights.publisher._check_whole", lambda version, tensors: None)
    Publisher(tmp_path, 3).publish(v(0), {}, sent, PROBE)
    with pytest.raises(WeightsError, match=complaint):
        Subscriber(tmp_path).read(v(0), EXPECTED)


def test_c26_a_tensor_without_elements_is_refused_by_name_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What ZeRO-3 leaves of a [4, 3] parameter on a rank that has no part of it.
    shard = {"w": torch.zeros(0)}
    with pytest.raises(WeightsError, match=r"weights 0\.0: w has no elements"):
        Publisher(tmp_path, 3).publish(v(0), {}, shard, PROBE)
    assert Subscriber(tmp_path).newest() is None
    monkeypatch.setattr("stream_grpo.weights.publisher._check_whole", lambda version, tensors: None)
    Publisher(tmp_path, 3).publish(v(0), {}, shard, PROBE)
    with pytest.raises(WeightsError, match=r"w is .*\(0,\).*the model has .*\(4, 3\)"):
        Subscriber(tmp_path).read(v(0), {"w": TensorSpec((4, 3), "float32")})
    with pytest.raises(WeightsError, match="w has no elements"):
        Subscriber(tmp_path).read(v(0), {"w": TensorSpec((0,), "float32")})


def test_weights_that_are_not_finite_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"weights 0\.3: bias is not finite"):
        Publisher(tmp_path, 3).publish(v(3), {}, tensors() | {"bias": torch.tensor([0.0, float("nan")])}, PROBE)
    assert Subscriber(tmp_path).newest() is None


def test_names_of_folders_are_versions_and_nothing_else_is() -> None:
    assert folder_name(v(12, 3)) == "3.00000012"
    assert parse_folder_name("3.00000012") == v(12, 3)
    for name in ("", "3", "latest", "3.x", "-1.2"):
        with pytest.raises(WeightsError):
            parse_folder_name(name)


def test_a_damaged_manifest_is_an_error_of_weights() -> None:
    manifest = Manifest(version=v(1), forks={}, tensors=EXPECTED, sha256="0", probe=PROBE, created_at_s=0.0)
    assert from_json(to_json(manifest)) == manifest
    with_fingerprints = Probe(((1, 2, 3),), ((-0.5, -0.25),), ({"embedding": b"\x00\xff", "head": b""},))
    assert from_json(to_json(replace(manifest, probe=with_fingerprints))).probe == with_fingerprints
    for text in ("", "{}", "[]", to_json(manifest).replace('"format": 1', '"format": 2')):
        with pytest.raises(WeightsError):
            from_json(text)


def test_a_probe_has_one_logprob_less_than_tokens() -> None:
    for sequences, logprobs in [((), ()), (((1,),), ((),)), (((1, 2),), ((-1.0, -1.0),))]:
        with pytest.raises(ValueError, match="probe needs"):
            Probe(sequences, logprobs)


def test_the_model_folder_says_what_is_expected_and_a_tied_head_is_not(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"model.embed": torch.zeros(5, 2), "lm_head.weight": torch.zeros(5, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert model_tensors(tmp_path, "bfloat16") == {"model.embed": TensorSpec((5, 2), "bfloat16")}
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert model_tensors(tmp_path, "float32").keys() == {"model.embed", "lm_head.weight"}
    with pytest.raises(WeightsError, match="no "):
        model_tensors(tmp_path / "empty", "float32")


def test_with_specs_tensors_are_written_as_they_come_one_in_memory(tmp_path: Path) -> None:
    watched = Watched(6, 500)
    sent = Publisher(tmp_path, 3).publish(v(1), {}, watched, PROBE, specs=watched.specs)
    # 500 numbers of 4 bytes.
    assert (watched.num_made, watched.most_bytes) == (6, 2000)
    read = Subscriber(tmp_path).read(v(1), watched.specs)
    assert read.manifest == sent
    assert [float(read.tensors[f"w{i}"][0]) for i in range(6)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    # The same as from a mapping, to the last byte.
    again = Publisher(tmp_path / "other", 3).publish(v(1), {}, dict(Watched(6, 500)), PROBE)
    assert again.sha256 == sent.sha256


def test_a_publish_that_fails_takes_what_is_left_and_leaves_nothing(tmp_path: Path) -> None:
    class Broken(Watched):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in super().__iter__():
                yield name, tensor * torch.nan if name == "w2" else tensor

    publisher, broken = Publisher(tmp_path, 3), Broken(6, 10)
    with pytest.raises(WeightsError, match=r"weights 0\.1: w2 is not finite"):
        publisher.publish(v(1), {}, broken, PROBE, specs=broken.specs)
    # Other ranks give out their parts of all of them: none is left waiting.
    assert broken.num_made == 6
    assert list(tmp_path.iterdir()) == []
    watched = Watched(6, 10)
    publisher.publish(v(1), {}, watched, PROBE, specs=watched.specs)
    with pytest.raises(WeightsError, match="published with other weights"):
        publisher.publish(v(1), {}, {"w0": torch.ones(10)}, PROBE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.00000001", "latest"]
    late = Watched(6, 10)
    with pytest.raises(WeightsError, match=r"0\.0 are older"):
        publisher.publish(v(0), {}, late, PROBE, specs=late.specs)
    # No rank is asked for anything.
    assert late.num_made == 0
