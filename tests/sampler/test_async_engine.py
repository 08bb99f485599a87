"""The engine in processes of its own, on the tiny random model: weights arrive through vLLM's transfer interface."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stream_grpo.errors import WeightsError
from stream_grpo.weights.adapter import Base
from stream_grpo.weights.fingerprint import relative_gaps, starts
from tests.sampler.tiny import (
    END,
    PROBE_SEQUENCES,
    Setup,
    adapter_of,
    assert_logprobs,
    fingerprints,
    probe_gap,
    request,
    run,
    tiny_engine,
    version,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = (0, 5, 9, 11)


def engine_processes(pid: int | None = None) -> list[psutil.Process]:
    """Descendants of a process that run, but for Python's own helper that outlives all it was started for."""
    children = psutil.Process(pid).children(recursive=True)
    children = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def others() -> set[psutil.Process]:
    """Those of before there was an engine."""
    return set(engine_processes())


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, others: set[psutil.Process]) -> Iterator[Setup]:
    with tiny_engine(tmp_path_factory.mktemp("model"), engine="async", max_new_tokens=120) as made:
        yield made


def finish(setup: Setup) -> dict[str, Any]:
    done: dict[str, Any] = {}
    while setup.engine.num_unfinished:
        done |= {generation.request_id: generation for generation in setup.engine.step()}
    return done


def test_logprobs_are_those_of_the_distribution_sampled_from(setup: Setup) -> None:
    setup.apply(0, version(0))
    requests = [request(f"g/{i}", seed=i, prompt=(0, 5 + i, 9)) for i in range(12)]
    done = run(setup, *requests)
    for r in requests:
        generation = done[r.request_id]
        num = len(generation.token_ids)
        assert_logprobs(setup, 0, r.prompt_ids, generation, 0, num)
        assert generation.versions == (version(0),) * num
        assert generation.mixed_context_from is None
        ended = generation.token_ids[-1] == END
        assert generation.end_reason.value == ("eos" if ended else "length")
        assert ended or num == 40
    again = run(setup, *requests)
    assert {n: g.token_ids.tolist() for n, g in again.items()} == {n: g.token_ids.tolist() for n, g in done.items()}


def changed_in_mid_flight(setup: Setup, recompute_kv: bool) -> list[Any]:
    """Long responses that began with the first weights and ended with the second; how many there are is chance."""
    for attempt in range(5):
        setup.apply(0, version(0))
        for seed in range(16):
            setup.engine.add(request(f"g/{seed}", seed=16 * attempt + seed, num_tokens=120))
        setup.engine.step()
        setup.apply(1, version(1), recompute_kv)
        changed = [generation for generation in finish(setup).values() if len(set(generation.versions)) == 2]
        if changed:
            return changed
    raise AssertionError("all responses ended before the weights came")


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_weights_that_change_in_mid_flight_label_every_token_exactly(setup: Setup, recompute_kv: bool) -> None:
    for generation in changed_in_mid_flight(setup, recompute_kv):
        num, num_before = len(generation.token_ids), generation.versions.count(version(0))
        assert generation.versions == (version(0),) * num_before + (version(1),) * (num - num_before)
        assert_logprobs(setup, 0, PROMPT, generation, 0, num_before)
        assert generation.mixed_context_from == (None if recompute_kv else num_before)
        if recompute_kv:
            assert_logprobs(setup, 1, PROMPT, generation, num_before, num)
    fresh = run(setup, request("fresh"))["fresh"]
    assert_logprobs(setup, 1, PROMPT, fresh, 0, len(fresh.token_ids))
    assert (set(fresh.versions), fresh.mixed_context_from) == ({version(1)}, None)


def test_an_aborted_request_gives_what_it_has(setup: Setup) -> None:
    setup.apply(0, version(0))
    for seed in range(16):
        setup.engine.add(request(f"g/{seed}", seed=seed, num_tokens=120))
    names = [f"g/{seed}" for seed in range(16)]
    done = setup.engine.step()
    # The core may take longer than a step's wait to give its first tokens.
    while len(done) < len(names) and not setup.engine.num_sampled(names):
        done += setup.engine.step()
    ended = setup.engine.abort([*names, "unknown"])
    assert sorted(g.request_id for g in [*done, *ended]) == sorted(names)
    partials = [generation for generation in ended if generation.end_reason.value == "abort"]
    assert any(len(partial.token_ids) > 0 for partial in partials)
    for partial in partials:
        assert partial.versions == (version(0),) * len(partial.token_ids)
        assert_logprobs(setup, 0, PROMPT, partial, 0, len(partial.token_ids))
    assert (setup.engine.num_unfinished, setup.engine.step()) == (0, [])


def test_what_is_running_is_looked_at_and_goes_on(setup: Setup) -> None:
    setup.apply(0, version(0))
    names = [f"g/{seed}" for seed in range(16)]
    for seed, name in enumerate(names):
        setup.engine.add(request(name, seed=seed, num_tokens=120))
    done: dict[str, Any] = {}
    # The core may take longer than a step's wait to give its first tokens.
    while len(done) < len(names) and not setup.engine.num_sampled(names):
        done |= {g.request_id: g for g in setup.engine.step()}
    seen = {g.request_id: g for g in setup.engine.progress([*names, "unknown"])}
    assert sorted([*done, *seen]) == sorted(names)
    assert setup.engine.num_sampled(names) >= sum(len(g.token_ids) for g in seen.values()) > 0
    done |= finish(setup)
    for name, begun in seen.items():
        num = len(begun.token_ids)
        assert begun.versions == (version(0),) * num
        assert done[name].token_ids[:num].tolist() == begun.token_ids.tolist()
        assert_logprobs(setup, 0, PROMPT, begun, 0, num)
        assert begun.end_reason.value == "partial" or num == len(done[name].token_ids)


def test_the_probe_sees_new_weights_also_while_others_run(setup: Setup) -> None:
    setup.apply(0, version(0))
    setup.engine.add(request("g/0", num_tokens=120))
    assert probe_gap(setup, 0) < 1e-4
    assert probe_gap(setup, 1) > 1.0
    # The head is tied to the embedding: one that is not packed again would be far off.
    setup.apply(1, version(1))
    assert probe_gap(setup, 1) < 1e-4
    assert list(finish(setup)) == ["g/0"]
    setup.engine.clear_kv()
    assert probe_gap(setup, 1) < 1e-4


def test_fingerprints_are_those_of_the_weights_and_leave_no_hook(setup: Setup) -> None:
    setup.apply(0, version(0))
    for index in (1, 0):
        setup.apply(index, version(2 - index))
        mine = setup.engine.fingerprints(starts(PROBE_SEQUENCES))
        right, wrong = (relative_gaps(mine, fingerprints(setup.models[other])) for other in (index, 1 - index))
        assert list(right) == ["embedding", "layer 0", "layer 1", "final norm", "head"]
        assert max(right.values()) < 1e-4
        assert min(wrong.values()) > 0.1
    assert setup.engine.fingerprints([]) == ()
    assert probe_gap(setup, 0) < 1e-4


def test_weights_of_another_shape_are_refused_and_the_old_ones_stay(setup: Setup) -> None:
    import torch

    setup.apply(0, version(0))
    setup.engine.add(request("g/0", num_tokens=120))
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = dict(setup.tensors(1)) | {name: torch.zeros(3, 3)}
    with pytest.raises(WeightsError, match=rf"weights 0\.9: .*{name}"):
        setup.engine.apply_weights(wrong, version(9), recompute_kv=False)
    assert probe_gap(setup, 0) < 1e-4
    assert set(finish(setup)["g/0"].versions) == {version(0)}


def test_an_adapter_is_merged_into_the_model_folder(setup: Setup) -> None:
    setup.apply(1, version(0))
    adapter, adapted = adapter_of(setup)
    whole = Base(setup.folder, "float32").merged(adapter, 1.5)
    setup.engine.apply_weights(whole, version(4), recompute_kv=False)
    assert probe_gap(adapted, 0) < 1e-4
    assert probe_gap(setup, 0) > 0.1


def test_a_failure_inside_a_worker_leaves_the_engine_alive_and_sampling(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.apply(0, version(0))
    slots = setup.engine._slots
    broken = [slot._replace(shape=(3, 3)) if slot.name.endswith("0.mlp.down_proj.weight") else slot for slot in slots]
    with monkeypatch.context() as patch:
        patch.setattr(setup.engine, "_slots", broken)
        patch.setattr("stream_grpo.sampler.async_engine.views", lambda memory, slots: {})
        with pytest.raises(WeightsError, match=r"weights 0\.9: worker 0 could not load them"):
            setup.apply(1, version(9))
    assert len(run(setup, request("g/0"))["g/0"].token_ids) > 0
    setup.apply(1, version(1))
    assert probe_gap(setup, 1) < 1e-4
    assert set(run(setup, request("g/1"))["g/1"].versions) == {version(1)}


def test_expected_tensors_are_those_of_the_learner(setup: Setup) -> None:
    mine = {name: (tuple(t.shape), str(t.dtype)) for name, t in setup.tensors(0).items()}
    assert {n: (s.shape, f"torch.{s.dtype}") for n, s in setup.engine.expected_tensors().items()} == mine


def test_an_id_in_use_is_refused(setup: Setup) -> None:
    setup.engine.add(request("g/0"))
    with pytest.raises(ValueError, match="g/0 is still unfinished"):
        setup.engine.add(request("g/0"))
    setup.engine.abort(["g/0"])


def test_a_closed_engine_leaves_no_process(setup: Setup, others: set[psutil.Process]) -> None:
    assert set(engine_processes()) - others
    setup.engine.close()
    assert set(engine_processes()) <= others


FRONT_END = """
import sys
import time
from pathlib import Path
from tests.sampler.tiny import tiny_models
if __name__ == "__main__":
    config, _ = tiny_models(Path(sys.argv[1]), engine="async")
    from stream_grpo.sampler.engines import make_engine
    engine = make_engine(config)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_no_process_outlives_a_front_end_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "front_end.py"
    script.write_text(FRONT_END)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as front_end:
        assert front_end.stdout is not None
        assert any(line.strip() == "ready" for line in front_end.stdout)
        processes = engine_processes(front_end.pid)
        assert processes
        front_end.kill()
        _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []
