"""Rollouts as the page is sent them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from stream_grpo.buffer import layout
from stream_grpo.dashboard.browsing import Decode, find_decoder, group_page, groups_page, rollout_page
from stream_grpo.dashboard.server import make_app
from stream_grpo.errors import ConfigError, JournalError
from stream_grpo.rollouts.views import Filters
from stream_grpo.types import PolicyVersion, RolloutGroup
from tests.buffer.fakes import as_branching
from tests.rollouts.test_rollouts import LATER, V0, V1, Run

HOSTILE = "</script><img src=x onerror=alert(1)> \u202e & ' \""


def letters(ids: object) -> str:
    return "".join(chr(97 + token_id % 26) for token_id in ids)  # type: ignore[attr-defined]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "run")
    run.leases.start(V0, {}, LATER)
    run.insert(V0)
    run.insert(V0)
    run.train(V0)
    run.insert(V1, rewards=(1.0, 0.5))
    return run


def test_groups_come_newest_first_and_by_step_and_reward(run: Run) -> None:
    found = groups_page(run.path, Filters())["groups"]
    assert [group["state"] for group in found] == ["accepted", "trained", "trained"]
    assert len(groups_page(run.path, Filters(step=1))["groups"]) == 2
    assert groups_page(run.path, Filters(step=2))["groups"] == []
    # Rewards 1 and 0.5: a mean of 0.75. Those of the other two groups are 1 and 0: a mean of 0.5.
    assert [group["group_id"] for group in groups_page(run.path, Filters(min_reward=0.6))["groups"]] == [
        found[0]["group_id"]
    ]
    assert len(groups_page(run.path, Filters(max_reward=0.6))["groups"]) == 2


def test_a_list_that_takes_too_long_is_cut_and_says_so(run: Run) -> None:
    found = groups_page(run.path, Filters(min_reward=0.6), timer=iter([0.0, 0.0, 1e9, 1e9, 1e9]).__next__)
    assert (len(found["groups"]), found["is_cut"]) == (1, True)


def test_a_group_is_found_in_the_newest_logs_that_have_it_and_no_other_is_read(run: Run) -> None:
    old = groups_page(run.path, Filters())["groups"][-1]["group_id"]
    before = group_page(run.path, old, letters)
    run.begin_log()
    run.begin_log()
    new = run.insert(V1)
    assert group_page(run.path, old, letters) == before
    # A damaged first log is in the way of the groups that it names alone.
    first, *_ = layout.logs(run.path / "journal").values()
    first.write_bytes(b"damaged" * 99)
    assert group_page(run.path, new, letters)["group_id"] == new
    with pytest.raises(JournalError):
        group_page(run.path, old, letters)


def test_a_tokenizer_is_loaded_once_for_each_content_of_its_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()

    def decoder_of(*words: str) -> Decode | None:
        vocabulary = {word: number for number, word in enumerate(words)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0])).save(str(path))
        return find_decoder(tmp_path)

    first = decoder_of("a", "b")
    assert first is not None
    assert find_decoder(tmp_path) is first
    other = decoder_of("a", "longer")
    assert other is not None
    assert (first([0, 1]), other([0, 1])) == ("a b", "a longer")


def test_a_group_that_is_not_there_is_named(run: Run) -> None:
    with pytest.raises(ConfigError, match="group g9: no such group"):
        group_page(run.path, "g9", None)


def test_a_response_is_shown_in_stretches_of_one_version_with_its_age(run: Run) -> None:
    group_id = groups_page(run.path, Filters())["groups"][0]["group_id"]
    page = group_page(run.path, group_id, letters)
    for rollout in page["rollouts"]:
        assert {(span["version"], span["age"]) for span in rollout["spans"]} == {("0.1", 0)}
        assert sum(span["num_tokens"] for span in rollout["spans"]) == rollout["num_tokens"]


def changed(group: RolloutGroup) -> RolloutGroup:
    """The first rollout: its last token of a later version, on a cache of older weights."""
    first = group.rollouts[0]
    steps = first.version_step.copy()
    steps[-1] = 1
    result = replace(first.reward, evidence=HOSTILE)
    size = len(steps)
    return replace(
        group,
        rollouts=(replace(first, version_step=steps, mixed_context_from=size - 1, reward=result), *group.rollouts[1:]),
    )


def test_stretches_part_where_version_or_cache_changes_and_say_all_that_was_sampled(run: Run) -> None:
    group_id = run.insert(V1, change=changed)
    first = group_page(run.path, group_id, letters)["rollouts"][0]
    assert [(span["version"], span["age"], span["mixed"]) for span in first["spans"][-1:]] == [("0.1", 0, True)]
    assert [span["num_tokens"] for span in first["spans"]][-1] == 1


def test_a_trunk_has_its_version_where_it_was_sampled_and_is_marked_as_not_trained(run: Run) -> None:
    first, second = group_page(run.path, run.insert(V1, change=as_branching), letters)["rollouts"]
    told = [
        [(span["num_tokens"], span["version"], span["age"], span["is_trained"]) for span in rollout["spans"]]
        for rollout in (first, second)
    ]
    # 4 tokens, of which the first two are the trunk: sampled by the first, context to the second.
    assert told[0] == [(2, "0.1", 0, False), (2, "0.1", 0, True)]
    assert told[1] == [(2, None, None, False), (2, "0.1", 0, True)]
    assert (first["num_tokens"], second["num_tokens"]) == (4, 2)


def test_text_of_a_model_comes_as_a_json_string_and_nothing_else(run: Run) -> None:
    group_id = run.insert(V1, change=changed)
    with TestClient(make_app([run.path], None), base_url="http://127.0.0.1") as client:
        answer = client.get(f"/api/runs/run/groups/{group_id}")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["rollouts"][0]["evidence"] == HOSTILE


def test_a_first_token_keeps_the_space_that_a_decoder_takes_from_the_start(run: Run) -> None:
    def decode(ids: object) -> str:
        return "".join(f" w{token_id}" for token_id in ids).removeprefix(" ")  # type: ignore[attr-defined]

    from stream_grpo.rollouts.views import find, journal_of
    from stream_grpo.transport.codec import decode_group

    _, data = find(journal_of(run.path), run.insert(V1, change=changed))
    rollout = decode_group(data).rollouts[0]
    spans = rollout_page(rollout, decode, lambda version: 0)["spans"]
    whole = decode(rollout.token_ids.tolist())
    assert whole.endswith("".join(span["text"] for span in spans))
    assert spans[-1]["text"].startswith(" w")
    assert np.isfinite(rollout.behavior_logprobs).all()
    assert PolicyVersion(0, 1) in rollout.versions()
