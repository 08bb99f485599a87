"""Which problems leave a pool in which pass, and what the report says of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator.cleaning import Cleaning, Collision, Corpus, collisions
from curator.dedup import digest, normalised
from curator.errors import PoolError
from curator.ingest.importer import ImportPlan, clean_pool, prepare, read_heldout
from curator.ingest.reading import Source
from curator.ingest.rows import RowReader
from curator.schema import Problem, problems_to_batch
from tests.curator.test_dedup import OTHER_NUMBERS, PENS, THE_PENS, TRAINS


def corpus(texts: Sequence[str]) -> Corpus:
    plain = [normalised(text) for text in texts]
    ids = [f"p{i}" for i in range(len(texts))]
    return Corpus(ids, [digest(text) for text in plain], lambda mask: list(compress(plain, mask)))


def test_each_pass_is_over_what_is_left_and_the_heldout_ones_come_first() -> None:
    texts = [TRAINS, TRAINS.upper(), THE_PENS, PENS, OTHER_NUMBERS, "something else"]
    found = collisions(corpus(texts), ["Something  ELSE", PENS], Cleaning(near=0.8, heldout_words=None))
    # The pens with other numbers are another problem; without held-out sets only one of the pens would leave.
    assert [(c.problem, c.why, c.other) for c in found] == [
        (3, "heldout-exact", 1),
        (5, "heldout-exact", 0),
        (2, "heldout-near", 1),
        (1, "exact", 0),
    ]


def test_a_run_of_words_is_compared_whatever_the_numbers() -> None:
    found = collisions(corpus([OTHER_NUMBERS, TRAINS]), [PENS], Cleaning(heldout_words=6))
    # In common are the three runs within "a shop has 1 000 pens and buys" and the two within "more how many pens does
    # it have".
    assert found == [Collision(0, "heldout-words", 0, 5)]


def test_only_the_pool_shrinks_and_nothing_leaves_that_no_pass_looks_for() -> None:
    assert collisions(corpus([PENS, PENS]), [], Cleaning(exact=False)) == []
    off = Cleaning(exact=False, heldout_near=None, heldout_words=None)
    assert [c.why for c in collisions(corpus([PENS, THE_PENS]), [PENS, PENS], off)] == ["heldout-exact"]


def test_alike_by_vectors() -> None:
    cleaning = Cleaning(semantic=0.9, heldout_near=None, heldout_words=None)
    found = collisions(corpus([PENS, THE_PENS, TRAINS]), [TRAINS + " really"], cleaning)
    assert [(c.problem, c.why, c.other) for c in found] == [(2, "heldout-semantic", 0), (1, "semantic", 0)]


@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from([PENS, THE_PENS, OTHER_NUMBERS, TRAINS, "a", "A"]), max_size=8))
def test_a_second_cleaning_removes_nothing(texts: list[str]) -> None:
    cleaning = Cleaning(near=0.7, semantic=0.9)
    gone = {c.problem for c in collisions(corpus(texts), [TRAINS], cleaning)}
    left = [text for i, text in enumerate(texts) if i not in gone]
    # Ids are new, but in the same order.
    assert collisions(corpus(left), [TRAINS], cleaning) == []


@pytest.mark.parametrize(
    ("chosen", "message"),
    [({"near": 0.0}, "near = 0"), ({"semantic": 1.5}, "semantic = 1.5"), ({"heldout_words": 1}, "expected 2 or more")],
)
def test_thresholds_that_mean_nothing_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cleaning(**chosen)


def rows(*prompts: str, golds: Sequence[str] = ()) -> list[Source]:
    listed = [
        {"prompt": prompt, "answer": gold, "id": f"q{i}"}
        for i, (prompt, gold) in enumerate(zip(prompts, golds or ["2"] * len(prompts), strict=True))
    ]
    return [Source(Path("rows.jsonl"), iter(enumerate(listed, start=1)))]


def test_a_removed_row_is_told_with_its_place_and_what_it_collided_with(tmp_path: Path) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('\n{"problem": "three"}\n')
    plan = ImportPlan(
        sources=rows("one", "ONE ", "Three", "two", golds=["1", "2", "3", "4"]),
        reader=RowReader(default_verifier="exact"),
        heldout=[heldout],
    )
    prepared = prepare(plan, tmp_path)
    assert [str(removed) for removed in prepared.report.removed] == [
        f"rows.jsonl:3 q2 ~ {heldout}:2 (heldout-exact 1)",
        "rows.jsonl:2 q1 ~ q0 (exact 1, golds differ)",
    ]
    assert prepared.keep.tolist() == [True, False, False, True]
    kept = [problem_id for batch in prepared.batches() for problem_id in batch["problem_id"].to_pylist()]
    assert kept == ["q0", "q3"]
    report = prepared.report
    assert report.num_rows == report.num_kept + len(report.removed) == 4
    assert report.as_plain()["removed"][1] == {
        "place": "rows.jsonl:2",
        "problem_id": "q1",
        "why": "exact",
        "collides_with": "q0",
        "similarity": 1.0,
        "golds_differ": True,
    }


def test_prompts_are_measured_and_shown(tmp_path: Path) -> None:
    plan = ImportPlan(sources=rows("aaaa", "b", "cc"), reader=RowReader(default_verifier="exact"))
    report = prepare(plan, tmp_path).report
    assert report.characters == (1, 2.0, 3.8, 4)
    assert report.examples == ["b\n=> 2 (exact)", "cc\n=> 2 (exact)", "aaaa\n=> 2 (exact)"]
    assert "prompt characters: 1 to 4, median 2, 95% up to 3.8" in report.text()


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"answer": "2"}\n', "held out, but no column for the prompt"), ("[1]\n", "held out, but the row is a list")],
)
def test_a_heldout_row_without_a_prompt_stops_the_import(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "h.jsonl").write_text(content)
    with pytest.raises(PoolError, match=rf"h\.jsonl:1: {message}"):
        read_heldout([tmp_path / "h.jsonl"], RowReader())


def test_a_pool_that_exists_is_cleaned_by_its_ids(tmp_path: Path) -> None:
    problems = [
        Problem(problem_id=f"p{i}", prompt=text, answer="2", verifier="exact")
        for i, text in enumerate([PENS, PENS.upper(), TRAINS])
    ]
    report = clean_pool([problems_to_batch(problems)], Cleaning(), [], RowReader(), tmp_path)
    assert [(r.place, r.problem_id, r.collides_with) for r in report.removed] == [(None, "p1", "p0")]
    assert (report.num_rows, report.num_kept) == (3, 2)
