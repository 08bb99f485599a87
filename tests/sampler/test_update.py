"""New weights are proved before use; what was sampled with unproved ones never leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.errors import ProbeError, WeightsError
from stream_grpo.sampler.update import Updater
from stream_grpo.types import GenerationRequest, PolicyVersion
from stream_grpo.weights.manifest import Manifest, Probe
from stream_grpo.weights.probe import ProbeGap
from stream_grpo.weights.subscriber import Published
from tests.fakes import FakeEngine


def config(dtype: str = "float32") -> Config:
    return parse({"model": {"path": "m", "dtype": dtype, "max_length_tokens": 100}}, source="test")


def published(step: int, num_tokens: int = 3) -> Published:
    # FakeEngine gives -1 for every token, so that the probe's own logprobs make the gap.
    probe = Probe((tuple(range(num_tokens)),), ((-1.0,) * (num_tokens - 1),))
    version = PolicyVersion(0, step)
    manifest = Manifest(version=version, forks={}, tensors={}, sha256="", probe=probe, created_at_s=0.0)
    return Published(manifest, {"w": torch.zeros(2)})


def request(name: str) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_ids=(1,), seed=0, max_new_tokens=4)


def test_proved_weights_are_in_use_and_accounted() -> None:
    engine = FakeEngine()
    updater = Updater(config(), engine)
    updater.update(published(1), [])
    engine.probe_error = 4e-5
    updater.update(published(2), [])
    assert updater.version == PolicyVersion(0, 2)
    # Two proofs of 2 tokens each, with gaps of 0 and 4e-5.
    assert updater.gap == pytest.approx(ProbeGap(2e-5, 4e-5, 4), abs=1e-9)
    assert (updater.num_updates, updater.num_failed_proofs) == (2, 0)
    assert updater.apply_s == pytest.approx(0.002)


def test_c25_weights_that_do_not_give_the_learners_logprobs_take_no_traffic() -> None:
    engine = FakeEngine()
    updater = Updater(config(), engine)
    updater.update(published(1), [])
    engine.add(request("g/0"))
    engine.probe_error = 0.5
    with pytest.raises(ProbeError, match=r"weights 0\.2"):
        updater.update(published(2), [request("g/0")])
    assert updater.version == PolicyVersion(0, 1)
    assert engine.num_unfinished == 0
    # Loaded, aborted, KV cleared, loaded once more, asked what its modules give out; nothing was added again.
    events = [event[0] for event in engine.events[-5:]]
    assert events == ["weights", "abort", "clear_kv", "weights", "fingerprints"]


def fingerprint_of(**outputs: float) -> dict[str, bytes]:
    """Of one token: norm 1, and one number as every projection."""
    return {
        name.replace("_", " "): np.array([1.0, value, value, value], np.float32).tobytes()
        for name, value in outputs.items()
    }


def test_a_proof_that_fails_twice_names_the_first_module_that_departs() -> None:
    engine = FakeEngine()
    updater = Updater(config(), engine)
    updater.update(published(1), [])
    learners = (fingerprint_of(embedding=0.5, layer_0=0.5, layer_1=0.5, head=0.5),)
    engine.fingerprint = (fingerprint_of(embedding=0.5, layer_0=0.50005, layer_1=0.75, head=2.0),)
    engine.probe_error = 0.5
    wanted = published(2)
    probe = replace(wanted.manifest.probe, fingerprints=learners)
    with pytest.raises(ProbeError) as caught:
        updater.update(replace(wanted, manifest=replace(wanted.manifest, probe=probe)), [])
    # |0.75 - 0.5| / 1; the layer before it departs by 5e-5, which rounding may come to.
    assert str(caught.value).endswith(
        "the first module that departs is the layer 1, by 0.25 of its output (tolerance 0.0001)"
    )
    # Asked after the second load, when nothing runs.
    assert [event[0] for event in engine.events[-3:]] == ["clear_kv", "weights", "fingerprints"]


def test_where_no_module_is_known_that_is_said() -> None:
    engine = FakeEngine()
    engine.probe_error = 0.5
    with pytest.raises(ProbeError, match="which module departs cannot be told"):
        Updater(config(), engine).update(published(1), [])


class LoadsAtSecondTry(FakeEngine):
    """Refuses the first set of weights it is given."""

    loads = 0

    def apply_weights(self, named_tensors: Mapping[str, Any], version: PolicyVersion, *, recompute_kv: bool) -> float:
        self.loads += 1
        if self.loads == 1:
            raise WeightsError("cannot")
        return super().apply_weights(named_tensors, version, recompute_kv=recompute_kv)


def test_c24_a_failed_load_is_tried_again_and_until_then_the_version_is_the_old_one() -> None:
    engine = LoadsAtSecondTry()
    updater = Updater(config(), engine)
    assert (updater.version, updater.sha256) == (None, None)
    updater.update(published(1), [])
    assert (updater.version, updater.num_failed_proofs, engine.loads) == (PolicyVersion(0, 1), 1, 2)


def test_the_account_has_how_long_weights_are_on_their_way() -> None:
    updater = Updater(config(), FakeEngine(), clock=lambda: 107.5)
    for step, created_at_s in ((1, 100.0), (2, 107.0)):
        wanted = published(step)
        manifest = replace(wanted.manifest, created_at_s=created_at_s, sha256=f"of {step}")
        updater.update(replace(wanted, manifest=manifest), [])
    assert updater.lag_s == 7.5 + 0.5
    assert updater.sha256 == "of 2"


class FailsOnce(FakeEngine):
    """Its first probe is wrong, as of weights that were loaded badly."""

    probes = 0

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.probes += 1
        self.step()
        self.probe_error = 1.0 if self.probes == 1 else 0.0
        return super().prompt_logprobs(sequences)


def test_a_second_load_that_passes_starts_the_running_sequences_over() -> None:
    engine = FailsOnce()
    engine.add(request("g/0"))
    for _ in range(2):
        engine.step()
    updater = Updater(config(), engine)
    updater.update(published(3), [request("g/0")])
    assert updater.num_failed_proofs == 1
    # All 4 tokens are of the proved weights; none of the 3 sampled before is left.
    generation = [engine.step() for _ in range(4)][-1][0]
    assert set(generation.versions) == {PolicyVersion(0, 3)}
    assert len(generation.token_ids) == 4


def test_bfloat16_is_held_to_its_own_first_gap() -> None:
    engine = FakeEngine()
    updater = Updater(config("bfloat16"), engine)
    for step, error in ((0, 0.02), (1, 0.05)):
        engine.probe_error = error
        updater.update(published(step), [])
    # Tolerated in the mean is max(3e-2, 3 * 0.02) = 0.06.
    engine.probe_error = 0.07
    with pytest.raises(ProbeError):
        updater.update(published(2), [])


def test_a_probe_as_long_as_the_model_is_scored_but_for_its_last_token() -> None:
    updater = Updater(config(), FakeEngine())
    updater.update(published(1, num_tokens=100), [])
    # 99 tokens leave room for the one that vLLM samples; 98 of them follow another.
    assert updater.gap is not None
    assert updater.gap.num_tokens == 98
