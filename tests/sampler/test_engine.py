"""The real engine: vLLM on a tiny random model, held against transformers token by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stream_grpo.errors import ProbeError, WeightsError
from stream_grpo.sampler.update import Updater
from stream_grpo.weights.adapter import Base
from stream_grpo.weights.fingerprint import relative_gaps, starts
from stream_grpo.weights.manifest import Adapter
from stream_grpo.weights.publisher import Publisher
from stream_grpo.weights.subscriber import Subscriber
from tests.sampler.tiny import (
    END,
    PROBE_SEQUENCES,
    Setup,
    adapter_of,
    assert_logprobs,
    engine_on,
    fingerprints,
    probe_gap,
    published,
    request,
    run,
    seeds_that_run_long,
    tiny_models,
    version,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("model")
    config, models = tiny_models(folder)
    import stream_grpo.sampler.engine as module

    arguments = module.engine_args
    with pytest.MonkeyPatch.context() as patch:
        # So little room for prompts in one step that the tests go beyond it, and blocks of the KV cache that a prompt
        # fills: whole ones are what a prefix cache would keep.
        small = {"max_num_batched_tokens": 128, "block_size": 32}
        patch.setattr(module, "engine_args", lambda c: arguments(c) | small)
        with engine_on(config, models, folder) as made:
            yield made


def test_logprobs_are_those_of_the_distribution_sampled_from(setup: Setup) -> None:
    setup.apply(0, version(0))
    requests = [request(f"g/{i}", seed=i, prompt=(0, 5 + i, 9)) for i in range(12)]
    done = run(setup, *requests)
    assert len(done) == 12
    reasons = set()
    for r in requests:
        generation = done[r.request_id]
        num = len(generation.token_ids)
        assert_logprobs(setup, 0, r.prompt_ids, generation, 0, num)
        assert generation.versions == (version(0),) * num
        assert generation.mixed_context_from is None
        reasons.add(generation.end_reason.value)
        # The end token is part of the response; a response without one has its full length.
        ended = generation.token_ids[-1] == END
        assert generation.end_reason.value == ("eos" if ended else "length")
        assert ended or num == 40
    assert reasons == {"length", "eos"}


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(setup: Setup) -> None:
    setup.apply(0, version(0))
    first = run(setup, request("a", seed=2**63 - 1), request("b", seed=5), request("c", seed=6))
    again = run(setup, request("x", seed=6), request("y", seed=2**63 - 1))
    assert first["a"].token_ids.tolist() == again["y"].token_ids.tolist()
    assert first["c"].token_ids.tolist() == again["x"].token_ids.tolist()
    assert len({tuple(g.token_ids.tolist()) for g in first.values()}) == 3


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_weights_that_change_in_mid_flight_label_every_token_exactly(setup: Setup, recompute_kv: bool) -> None:
    (seed,) = seeds_that_run_long(setup, 1)
    engine = setup.engine
    engine.add(request("g/0", seed=seed))
    others = [request(f"o/{i}", seed=seed) for i in range(12)]
    for other in others:
        engine.add(other)
    for _ in range(10):
        assert engine.step() == []
    # To compute 13 sequences of 14 tokens again takes more than the 128 tokens of one step.
    setup.apply(1, version(1), recompute_kv)
    engine.add(request("g/1", seed=seed))
    done = {}
    while engine.num_unfinished:
        done |= {g.request_id: g for g in engine.step()}
    changed, fresh = done["g/0"], done["g/1"]
    # The others have the same seed, and wait a step or two for their room: the same text nevertheless.
    assert {tuple(done[other.request_id].token_ids.tolist()) for other in others} == {tuple(changed.token_ids.tolist())}
    assert changed.versions[:10] == (version(0),) * 10
    assert set(changed.versions[10:]) == {version(1)}
    prompt = (0, 5, 9, 11)
    assert_logprobs(setup, 0, prompt, changed, 0, 10)
    assert changed.mixed_context_from == (None if recompute_kv else 10)
    if recompute_kv:
        assert_logprobs(setup, 1, prompt, changed, 10, len(changed.token_ids))
    # C20: what is asked after the update is of the new weights alone.
    assert_logprobs(setup, 1, prompt, fresh, 0, len(fresh.token_ids))
    assert fresh.mixed_context_from is None


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_c20_the_same_prompt_after_an_update_is_computed_with_the_new_weights(setup: Setup, recompute_kv: bool) -> None:
    setup.apply(0, version(0))
    # Two whole blocks; and a request runs on through the update, so that a cache could not be reset.
    prompt = (0, *(2 + i % 50 for i in range(70)))
    setup.engine.add(request("running", prompt=prompt))
    before = run_beside(setup, request("before", prompt=prompt, seed=3))
    assert_logprobs(setup, 0, prompt, before, 0, len(before.token_ids))
    setup.apply(1, version(1), recompute_kv)
    after = run_beside(setup, request("after", prompt=prompt, seed=3))
    assert set(after.versions) == {version(1)}
    assert_logprobs(setup, 1, prompt, after, 0, len(after.token_ids))
    setup.engine.abort(["running"])


def run_beside(setup: Setup, wanted: Any) -> Any:
    """One request to its end, next to those that run."""
    setup.engine.add(replace(wanted, max_new_tokens=5))
    while True:
        for generation in setup.engine.step():
            if generation.request_id == wanted.request_id:
                return generation


def test_an_aborted_request_gives_what_it_has(setup: Setup) -> None:
    (seed,) = seeds_that_run_long(setup, 1)
    setup.engine.add(request("g/0", seed=seed))
    setup.engine.add(request("g/1", seed=seed))
    for _ in range(7):
        setup.engine.step()
    (partial,) = setup.engine.abort(["g/0", "unknown"])
    assert partial.end_reason.value == "abort"
    assert len(partial.token_ids) == 7
    assert partial.versions == (version(0),) * 7
    assert_logprobs(setup, 0, (0, 5, 9, 11), partial, 0, 7)
    (untouched,) = [g for _ in range(33) for g in setup.engine.step()]
    assert untouched.token_ids[:7].tolist() == partial.token_ids.tolist()
    assert setup.engine.num_unfinished == 0
    setup.engine.add(request("g/2"))
    (nothing,) = setup.engine.abort(["g/2"])
    assert (len(nothing.token_ids), nothing.end_reason.value) == (0, "abort")


def test_a_rollout_goes_on_from_what_it_had_in_another_engine(setup: Setup) -> None:
    """What a sampler handed over, another continues with newer weights: the tokens before stay as they were."""
    from stream_grpo.sampler.rollout import joined, rest_of

    (seed,) = seeds_that_run_long(setup, 1)
    engine, whole = setup.engine, request("g/0", seed=seed)
    engine.add(whole)
    engine.add(request("g/1", seed=seed, num_tokens=5))
    ended = [generation for _ in range(12) for generation in engine.step()]
    assert engine.num_sampled(["g/0", "g/1", "unknown"]) == 12
    (begun,) = engine.progress(["g/0", "g/1", "unknown"])
    assert (begun.end_reason.value, len(begun.token_ids)) == ("partial", 12)
    assert begun.versions == (version(0),) * 12
    assert_logprobs(setup, 0, whole.prompt_ids, begun, 0, 12)
    # Asking changed nothing: it goes on, and is what it would have been.
    (aborted,) = engine.abort(["g/0"])
    assert aborted.token_ids.tolist() == begun.token_ids.tolist()
    assert ended[0].token_ids.tolist() == begun.token_ids[:5].tolist()

    setup.apply(1, version(1))
    rest = run(setup, rest_of(whole, begun))["g/0"]
    done = joined(begun, rest)
    assert done.token_ids[:12].tolist() == begun.token_ids.tolist()
    assert done.versions == (version(0),) * 12 + (version(1),) * len(rest.token_ids)
    assert len(done.token_ids) == 40 or done.token_ids[-1] == END
    # Each part under the weights that sampled it, of which the second has computed the whole context.
    assert_logprobs(setup, 0, whole.prompt_ids, done, 0, 12)
    assert_logprobs(setup, 1, whole.prompt_ids, done, 12, len(done.token_ids))
    assert done.mixed_context_from is None


def test_what_a_probe_finished_is_told_as_it_ended(setup: Setup) -> None:
    (seed,) = seeds_that_run_long(setup, 1)
    setup.engine.add(request("g/0", seed=seed, num_tokens=1))
    probe_gap(setup, 0)
    (held,) = setup.engine.progress(["g/0"])
    assert (held.end_reason.value, setup.engine.num_sampled(["g/0"])) == ("length", 1)
    assert [g.request_id for g in setup.engine.step()] == ["g/0"]
    setup.engine.add(request("g/1"))
    (nothing,) = setup.engine.progress(["g/1"])
    assert (len(nothing.token_ids), nothing.end_reason.value) == (0, "partial")
    setup.engine.abort(["g/1"])


def test_the_probe_is_at_temperature_1_also_while_others_run_and_holds_what_they_finish(setup: Setup) -> None:
    (seed,) = seeds_that_run_long(setup, 1)
    engine = setup.engine
    engine.add(request("g/0", seed=seed, num_tokens=1))
    engine.add(request("g/1", seed=seed, num_tokens=30))
    assert probe_gap(setup, 0) < 1e-4
    assert engine.num_unfinished == 2
    (held,) = engine.abort(["g/0"])
    assert held.end_reason.value in ("length", "eos")
    (running,) = engine.abort(["g/1"])
    assert len(running.token_ids) >= 1


def test_c25_a_tied_head_that_is_not_repacked_is_caught_by_the_probe(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stream_grpo.sampler.engine as module

    setup.apply(0, version(0))
    assert probe_gap(setup, 0) < 1e-4
    assert probe_gap(setup, 1) > 1.0
    setup.apply(1, version(1))
    assert probe_gap(setup, 1) < 1e-4
    monkeypatch.setattr(module, "_repack_tied_head", lambda model: None)
    setup.apply(0, version(2))
    assert probe_gap(setup, 0) > 1.0
    monkeypatch.undo()
    setup.apply(0, version(2))
    assert probe_gap(setup, 0) < 1e-4


def test_the_proof_names_the_head_where_it_is_not_repacked(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = proved(setup)
    monkeypatch.setattr("stream_grpo.sampler.engine._repack_tied_head", lambda model: None)
    with pytest.raises(ProbeError, match=r"weights 0\.1: .* the first module that departs is the head, by \d"):
        updater.update(published(setup, 1, 1), [])
    assert updater.version == version(0)
    monkeypatch.undo()
    updater.update(published(setup, 1, 1), [])
    assert updater.version == version(1)


def test_the_proof_names_the_head_after_vllms_own_reload(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater = proved(setup)
    setup.models[1].save_pretrained(tmp_path)

    def official(named_tensors: Any, version: Any, *, recompute_kv: bool) -> float:
        setup.engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
        return 0.0

    monkeypatch.setattr(setup.engine, "apply_weights", official)
    with pytest.raises(ProbeError, match="the first module that departs is the head"):
        updater.update(published(setup, 1, 1), [])


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.o_proj.weight", "layer 0"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.norm.weight", "final norm"),
    ],
)
def test_the_proof_names_the_module_whose_weights_are_wrong(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, tensor: str, name: str
) -> None:
    updater, apply = proved(setup), setup.engine.apply_weights

    def corrupted(named_tensors: Any, version: Any, *, recompute_kv: bool) -> float:
        wrong = dict(named_tensors) | {tensor: named_tensors[tensor] * 1.02}
        seconds: float = apply(wrong, version, recompute_kv=recompute_kv)
        return seconds

    monkeypatch.setattr(setup.engine, "apply_weights", corrupted)
    with pytest.raises(ProbeError, match=f"the first module that departs is the {name}, by 0"):
        updater.update(published(setup, 1, 1), [])


def proved(setup: Setup) -> Updater:
    """An updater whose first weights passed their proof."""
    updater = Updater(setup.config, setup.engine)
    updater.update(published(setup, 0, 0), [])
    return updater


def test_c26_the_tied_head_is_the_new_embedding_after_every_update(setup: Setup) -> None:
    updater = proved(setup)
    for step in range(1, 5):
        updater.update(published(setup, step % 2, step), [])
        gaps = relative_gaps(setup.engine.fingerprints(starts(PROBE_SEQUENCES)), fingerprints(setup.models[step % 2]))
        assert list(gaps) == ["embedding", "layer 0", "layer 1", "final norm", "head"]
        assert gaps["embedding"] == 0
        assert max(gaps.values()) < 1e-4
    assert updater.num_failed_proofs == 0
    assert updater.gap is not None
    assert updater.gap.max < 1e-4


def test_c25_weights_that_differ_in_one_number_change_the_answer_and_the_checksum(setup: Setup, tmp_path: Path) -> None:
    updater, publisher, subscriber = proved(setup), Publisher(tmp_path, 2), Subscriber(tmp_path)
    model, answers = setup.models[0], []
    for step in (1, 2):
        probe = published(setup, 0, step).manifest.probe
        sent = publisher.publish(version(step), {}, setup.tensors(0), probe)
        newest = subscriber.newest()
        assert newest == version(step)
        updater.update(subscriber.read(newest, setup.engine.expected_tensors()), [])
        assert (updater.version, updater.sha256) == (version(step), sent.sha256)
        (answer,) = run(setup, request("fixed", seed=1)).values()
        assert_logprobs(setup, 0, (0, 5, 9, 11), answer, 0, len(answer.token_ids))
        answers.append(answer.logprobs.tolist())
        with torch.no_grad():
            model.model.norm.weight[0] += 1.0 if step == 1 else -1.0  # the second time it is as it was
    assert answers[0] != answers[1]


def test_an_adapter_is_read_merged_and_proved(setup: Setup, tmp_path: Path) -> None:
    setup.apply(1, version(0))
    adapter, adapted = adapter_of(setup)
    updater, base = proved(setup), Base(setup.folder, "float32")
    of = Adapter(base_sha256=base.sha256, rank=2, alpha=3.0)
    Publisher(tmp_path, 2).publish(version(4), {}, adapter, published(adapted, 0, 4).manifest.probe, adapter=of)
    updater.update(Subscriber(tmp_path, base).read(version(4), setup.engine.expected_tensors()), [])
    assert (updater.version, updater.num_failed_proofs) == (version(4), 0)
    assert probe_gap(adapted, 0) < 1e-4
    assert probe_gap(setup, 0) > 0.1
    (answer,) = run(setup, request("adapted", seed=1)).values()
    assert_logprobs(adapted, 0, (0, 5, 9, 11), answer, 0, len(answer.token_ids))


def test_weights_that_cannot_be_loaded_leave_the_engine_alive(setup: Setup) -> None:
    setup.apply(0, version(0))
    wrong = dict(setup.tensors(0)) | {"model.layers.0.mlp.down_proj.weight": torch.zeros(3, 3)}
    with pytest.raises(WeightsError, match=r"weights 0\.9"):
        setup.engine.apply_weights(wrong, version(9), recompute_kv=False)
    setup.apply(1, version(1))
    assert probe_gap(setup, 1) < 1e-4


def test_expected_tensors_are_those_of_the_learner(setup: Setup) -> None:
    expected = setup.engine.expected_tensors()
    mine = {name: (tuple(t.shape), str(t.dtype)) for name, t in setup.tensors(0).items()}
    assert {name: (spec.shape, f"torch.{spec.dtype}") for name, spec in expected.items()} == mine


def test_an_id_in_use_is_refused(setup: Setup) -> None:
    setup.engine.add(request("g/0"))
    with pytest.raises(ValueError, match="g/0 is still unfinished"):
        setup.engine.add(request("g/0"))
    setup.engine.abort(["g/0"])
