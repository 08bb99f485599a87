"""`weights.publish = "changed"`: a version leaves out what stayed as it was, and what it leaves out stays on disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights.manifest import MANIFEST_FILE, Probe, TensorSpec, folder_name, from_json
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.puller import Puller
from stream_grpo.weights.subscriber import Subscriber
from tests.weights.test_pull import Both, both  # noqa: F401 (a fixture)
from tests.weights.test_tensors_file import Watched

PROBE = Probe(((1, 2, 3),), ((-0.5, -0.25),))
EXPECTED = {name: TensorSpec((1000,), "float32") for name in ("frozen", "moving", "rare")}


def v(step: int) -> PolicyVersion:
    return PolicyVersion(0, step)


def weights(step: int) -> dict[str, Tensor]:
    """One that never changes, one that always does, one that does at step 3."""
    values = {"frozen": 7.0, "moving": float(step), "rare": float(step >= 3)}
    return {name: torch.full((1000,), value) for name, value in values.items()}


def names(directory: Path, step: int) -> set[str]:
    return set(load_file(directory / folder_name(v(step)) / "model.safetensors"))


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name.split(".")[1]) for path in directory.iterdir() if path.is_dir())


def assert_reads(directory: Path, step: int) -> None:
    read = Subscriber(directory).read(v(step), EXPECTED).tensors
    assert all(torch.equal(read[name], tensor) for name, tensor in weights(step).items())


def test_a_version_holds_what_differs_and_names_where_the_rest_is(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 2, changed_alone=True)
    for step in range(6):
        publisher.publish(v(step), {}, weights(step), PROBE)
        assert_reads(tmp_path, step)
    assert names(tmp_path, 5) == {"moving"}
    manifest = from_json((tmp_path / folder_name(v(5)) / MANIFEST_FILE).read_text())
    # Always where it was written: no version stands between.
    assert manifest.held_in == {"frozen": v(0), "rare": v(3)}
    assert manifest.tensors == EXPECTED
    # The newest two, and 0 and 3, which they need; 1 and 2 are gone.
    assert steps(tmp_path) == [0, 3, 4, 5]
    assert names(tmp_path, 3) == {"moving", "rare"}
    assert_reads(tmp_path, 4)


def test_what_is_written_falls_with_what_differs_and_one_tensor_is_in_memory(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 3, changed_alone=True)
    sizes = []
    for step in (1, 2):
        watched = Watched(6, 5000)
        publisher.publish(v(step), {}, watched, PROBE, specs=watched.specs)
        assert watched.most_bytes == 20_000
        sizes.append((tmp_path / folder_name(v(step)) / "model.safetensors").stat().st_size)
    # Six tensors of 20,000 bytes, then none; the room of the header is left.
    assert sizes[0] - sizes[1] == 120_000
    assert 0 < sizes[1] < 1000
    # Of the same weights it says the same, though the files differ; where all is written the file is the usual one.
    first, second = (from_json((tmp_path / folder_name(v(s)) / MANIFEST_FILE).read_text()) for s in (1, 2))
    assert first.sha256 != second.sha256
    assert first.weights_sha256 == second.weights_sha256
    usual = Publisher(tmp_path / "usual", 3).publish(v(1), {}, dict(Watched(6, 5000)), PROBE)
    assert usual.sha256 == usual.weights_sha256 == first.sha256


def test_a_publisher_that_begins_anew_goes_on_from_what_is_there(tmp_path: Path) -> None:
    Publisher(tmp_path, 2, changed_alone=True).publish(v(0), {}, weights(0), PROBE)
    for step in (1, 2, 3):
        Publisher(tmp_path, 2, changed_alone=True).publish(v(step), {}, weights(step), PROBE)
    assert names(tmp_path, 2) == {"moving"}
    assert steps(tmp_path) == [0, 2, 3]
    # One that publishes whole needs nothing from before, and lets it go with the versions that did.
    for step in (4, 5):
        Publisher(tmp_path, 2).publish(v(step), {}, weights(step), PROBE)
    assert names(tmp_path, 4) == set(EXPECTED)
    assert steps(tmp_path) == [4, 5]
    # What has no hashes cannot be referred to.
    Publisher(tmp_path, 2, changed_alone=True).publish(v(6), {}, weights(6), PROBE)
    assert names(tmp_path, 6) == set(EXPECTED)


@pytest.mark.parametrize("then", [True, False])
def test_the_same_version_again_is_nothing_if_equal_and_an_error_if_not(tmp_path: Path, then: bool) -> None:
    publisher = Publisher(tmp_path, 2, changed_alone=True)
    for step in (0, 1):
        publisher.publish(v(step), {}, weights(step), PROBE)
    again = Publisher(tmp_path, 2, changed_alone=then)
    again.publish(v(1), {}, weights(1), PROBE)
    assert names(tmp_path, 1) == {"moving"}
    with pytest.raises(WeightsError, match="published with other weights"):
        again.publish(v(1), {}, weights(2), PROBE)
    assert_reads(tmp_path, 1)


def test_a_tensor_that_is_not_what_was_named_is_refused(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 2, changed_alone=True)
    for step in (0, 1):
        publisher.publish(v(step), {}, weights(step), PROBE)
    held = tmp_path / folder_name(v(0)) / "model.safetensors"
    data = bytearray(held.read_bytes())
    data[-1] ^= 1  # within `rare`, the last of the file
    held.write_bytes(bytes(data))
    with pytest.raises(WeightsError, match=r"0.00000000: rare is not what version 0\.1 says that it holds"):
        Subscriber(tmp_path).read(v(1), EXPECTED)


def test_what_is_read_needs_no_file_any_more(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 2, changed_alone=True)
    for step in (0, 1):
        publisher.publish(v(step), {}, weights(step), PROBE)
    read = Subscriber(tmp_path).read(v(1), EXPECTED).tensors
    held = tmp_path / folder_name(v(0)) / "model.safetensors"
    held.write_bytes(bytes(held.stat().st_size))  # over what a map of it would show
    assert torch.equal(read["frozen"], weights(0)["frozen"])


@pytest.mark.parametrize("changed_alone", [True, False])
def test_a_manifest_of_before_that_cannot_be_read_stops_nobody_who_needs_nothing_of_it(
    tmp_path: Path, changed_alone: bool
) -> None:
    for step in (0, 1):
        Publisher(tmp_path, 3).publish(v(step), {}, weights(step), PROBE)
    (tmp_path / folder_name(v(0)) / MANIFEST_FILE).write_bytes(b"\xff")
    if not changed_alone:
        (tmp_path / folder_name(v(1)) / MANIFEST_FILE).unlink()
    Publisher(tmp_path, 3, changed_alone=changed_alone).publish(v(2), {}, weights(2), PROBE)
    assert_reads(tmp_path, 2)


def test_a_version_whose_holder_is_pruned_meanwhile_gives_the_newest(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, 2, changed_alone=True)
    for step in (0, 1):
        publisher.publish(v(step), {}, weights(step), PROBE)
    subscriber = Subscriber(tmp_path)
    assert subscriber.newest() == v(1)
    whole = Publisher(tmp_path, 2)
    for step in (4, 5):
        whole.publish(v(step), {}, weights(step), PROBE)
    assert not (tmp_path / folder_name(v(0))).exists()
    assert subscriber.read(v(1), EXPECTED).manifest.version == v(5)
    shutil.rmtree(tmp_path / folder_name(v(5)))
    with pytest.raises(WeightsError, match="not there to read"):
        subscriber.read(v(5), EXPECTED)


def test_a_node_that_pulls_has_what_a_version_leaves_out(both: Both, tmp_path: Path) -> None:  # noqa: F811
    here, publisher = tmp_path / "here", Publisher(both.directory, 2, changed_alone=True)
    # What another run left under the same name is not taken for it.
    Publisher(here, 2).publish(v(0), {}, {"w": torch.zeros(3)}, PROBE)
    (here / "latest").unlink()
    for step in (0, 1):
        publisher.publish(v(step), {}, weights(step), PROBE)
    pulling = Puller(both.client, here)
    assert pulling.turn() == v(1)
    assert_reads(here, 1)
    given = both.service.status()["bytes_given"]
    for step in (2, 3, 4):
        publisher.publish(v(step), {}, weights(step), PROBE)
        assert pulling.turn() == v(step)
        assert_reads(here, step)
    # Four tensors of 4,000 bytes, and headers: what stayed as it was is not pulled again.
    assert 16_000 < both.service.status()["bytes_given"] - given < 18_000
    assert steps(here) == [0, 3, 4]
    # Nor by one that begins anew, which knows what it needs from what is there.
    again = Puller(both.client, here)
    publisher.publish(v(5), {}, weights(5), PROBE)
    assert again.turn() == v(5)
    assert_reads(here, 5)
    assert both.service.status()["bytes_given"] - given < 23_000
