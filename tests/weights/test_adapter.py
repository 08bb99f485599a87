"""A published adapter: its tensors alone are on the way, and whoever reads it has the whole model, or refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stream_grpo.errors import WeightsError
from stream_grpo.types import PolicyVersion
from stream_grpo.weights import adapter as module
from stream_grpo.weights.adapter import Base, merged
from stream_grpo.weights.manifest import Adapter, Manifest, Probe, TensorSpec, from_json, to_json
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.puller import Puller
from stream_grpo.weights.subscriber import Subscriber
from tests.weights.test_pull import Both, both  # noqa: F401 (a fixture)

PROBE = Probe(((1, 2, 3),), ((-0.5, -0.25),))
VERSION = PolicyVersion(0, 1)
W0 = {
    "embed.weight": torch.arange(10.0).reshape(5, 2),
    "proj.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    "norm.weight": torch.ones(2),
}
A, B = "base_model.model.proj.lora_A.weight", "base_model.model.proj.lora_B.weight"
SENT = {A: torch.tensor([[1.0, 1.0]]), B: torch.tensor([[1.0], [2.0], [0.0]])}
EXPECTED = {name: TensorSpec(tuple(weight.shape), "float32") for name, weight in W0.items()}


@pytest.fixture
def base(tmp_path: Path) -> Base:
    folder = tmp_path / "base"
    folder.mkdir()
    save_file(W0, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return Base(folder, "float32")


def publish(directory: Path, base: Base, tensors: dict[str, Tensor]) -> Manifest:
    of = Adapter(base_sha256=base.sha256, rank=1, alpha=0.5)
    return Publisher(directory, 2).publish(VERSION, {}, tensors, PROBE, adapter=of)


def test_a_merge_is_w0_and_scaled_b_a() -> None:
    # B A = [[1, 1], [2, 2], [0, 0]], half of it.
    got = merged(W0["proj.weight"], SENT[A], SENT[B], 0.5)
    assert got.tolist() == [[1.5, 2.5], [4.0, 5.0], [5.0, 6.0]]


def test_a_merge_in_bfloat16_is_rounded_once() -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    a, b = torch.tensor([[2.0**-5]], dtype=torch.bfloat16), torch.tensor([[3.0]], dtype=torch.bfloat16)
    # 1 + 3 x 2^-5 / 8 = 1 + 1.5 x 2^-7: half way between two numbers of bfloat16, of which the even one is 1 + 2^-6.
    got = merged(one, a, b, 0.125)
    assert (got.dtype, got.item()) == (torch.bfloat16, 1 + 2.0**-6)


def test_the_adapters_bytes_alone_are_published_and_the_whole_model_is_read(tmp_path: Path, base: Base) -> None:
    manifest = publish(tmp_path / "weights", base, SENT)
    data = (tmp_path / "weights" / "0.00000001" / "model.safetensors").read_bytes()
    # 2 + 3 numbers of 4 bytes behind a header of so many bytes as its first eight say.
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == 20
    assert set(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) == {A, B, "__metadata__"}
    published = Subscriber(tmp_path / "weights", base).read(VERSION, EXPECTED)
    assert published.manifest == manifest
    assert published.manifest.adapter == Adapter(base_sha256=base.sha256, rank=1, alpha=0.5)
    assert published.tensors.keys() == W0.keys()
    assert published.tensors["proj.weight"].tolist() == [[1.5, 2.5], [4.0, 5.0], [5.0, 6.0]]
    for name in ("embed.weight", "norm.weight"):
        assert torch.equal(published.tensors[name], W0[name])


def test_a_weight_is_merged_when_it_is_asked_for(tmp_path: Path, base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path / "weights", base, SENT)
    made: list[int] = []

    def counted(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        made.append(1)
        return merged(weight, lora_a, lora_b, scaling)

    monkeypatch.setattr(module, "merged", counted)
    published = Subscriber(tmp_path / "weights", base).read(VERSION, EXPECTED)
    assert made == []
    assert [name for name, _ in published.tensors.items()] == list(base.specs)
    assert made == [1]


def test_a_base_with_other_weights_is_refused(tmp_path: Path, base: Base) -> None:
    publish(tmp_path / "weights", base, SENT)
    other = tmp_path / "other"
    other.mkdir()
    save_file(W0 | {"norm.weight": torch.tensor([1.0, 1.5])}, other / "model.safetensors")
    (other / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match=rf"an adapter of the base {base.sha256}, but model.path = {other} holds"):
        Subscriber(tmp_path / "weights", Base(other, "float32")).read(VERSION, EXPECTED)
    with pytest.raises(WeightsError, match=f"an adapter of the base {base.sha256}; no model folder is given"):
        Subscriber(tmp_path / "weights").read(VERSION, EXPECTED)


def test_the_hash_of_a_base_is_of_what_is_in_it_however_its_files_are_cut(tmp_path: Path, base: Base) -> None:
    cut = tmp_path / "cut"
    cut.mkdir()
    names = list(W0)
    save_file({n: W0[n] for n in names[2:]}, cut / "model-00001-of-00002.safetensors")
    save_file({n: W0[n] for n in names[:2]}, cut / "model-00002-of-00002.safetensors")
    (cut / "config.json").write_text("{}")
    assert Base(cut, "float32").sha256 == base.sha256
    # What is in the files counts, and not the dtype of the run.
    assert Base(cut, "bfloat16").sha256 == base.sha256
    assert Base(cut, "bfloat16").tensor("norm.weight").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ({A: SENT[A]}, rf"missing tensors \['{B}'\]"),
        (SENT | {A: torch.ones(2, 2)}, r"lora_A.weight is .*\(2, 2\).*the model has .*\(1, 2\)"),
        (SENT | {A: SENT[A].double()}, "lora_A.weight is .*float64"),
        ({"proj.weight": W0["proj.weight"]}, "proj.weight is no adapter of a linear layer that the base has"),
        ({A.replace("proj", "gone"): SENT[A]}, "gone.lora_A.weight is no adapter of a linear layer"),
        ({A.replace("proj", "norm"): SENT[A]}, "norm.lora_A.weight is no adapter of a linear layer"),
    ],
)
def test_tensors_that_are_no_adapter_of_the_base_are_refused_by_name(
    tmp_path: Path, base: Base, sent: dict[str, Tensor], complaint: str
) -> None:
    publish(tmp_path / "weights", base, sent)
    with pytest.raises(WeightsError, match=complaint):
        Subscriber(tmp_path / "weights", base).read(VERSION, EXPECTED)


def test_a_manifest_says_whether_it_is_of_an_adapter(base: Base) -> None:
    plain = Manifest(version=VERSION, forks={}, tensors={}, sha256="0", probe=PROBE, created_at_s=0.0)
    assert "adapter" not in json.loads(to_json(plain))
    assert from_json(to_json(plain)).adapter is None
    of_adapter = replace(plain, adapter=Adapter(base_sha256="b", rank=8, alpha=32.0))
    assert from_json(to_json(of_adapter)) == of_adapter
    assert of_adapter.adapter is not None
    assert of_adapter.adapter.scaling == 4.0
    with pytest.raises(WeightsError, match="not a manifest"):
        from_json(to_json(of_adapter).replace('"rank"', '"size"'))


def test_an_adapter_of_which_a_part_stands_still_is_pulled_and_merged(both: Both, tmp_path: Path, base: Base) -> None:  # noqa: F811
    publisher, here = Publisher(both.directory, 2, changed_alone=True), tmp_path / "here"
    of = Adapter(base_sha256=base.sha256, rank=1, alpha=0.5)
    pulling, given = Puller(both.client, here), []
    for step in (1, 2):
        sent = {A: SENT[A], B: step * SENT[B]}
        publisher.publish(PolicyVersion(0, step), {}, sent, PROBE, adapter=of)
        before = both.service.status()["bytes_given"]
        assert pulling.turn() == PolicyVersion(0, step)
        given.append(both.service.status()["bytes_given"] - before)
        # B A = [[1, 1], [2, 2], [0, 0]] at step 1 and twice that at step 2; half of it is added.
        published = Subscriber(here, base).read(PolicyVersion(0, step), EXPECTED)
        added = published.tensors["proj.weight"] - W0["proj.weight"]
        assert added.tolist() == [[0.5 * step] * 2, [1.0 * step] * 2, [0.0] * 2]
        assert torch.equal(published.tensors["norm.weight"], W0["norm.weight"])
    # A, 2 numbers of 4 bytes, stays where it was written; headers are as long.
    assert given[0] - given[1] == 8
    assert published.manifest.held_in == {A: PolicyVersion(0, 1)}
