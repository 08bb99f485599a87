"""What counts as the same problem, against exact similarities and whatever the order of rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curator import embedding
from curator.contamination import ngram_overlaps
from curator.dedup import Match, digest, exact_matches, near_matches, normalised, semantic_matches
from curator.embedding import hashed_ngrams, load_embedding, plane_agreement, plane_sides
from curator.errors import PoolError
from curator.minhash import NUM_HASHES, Bands, banding, blocks, jaccard, shingles, signatures, text_jaccard

PENS = "a shop has 1,000 pens and buys 300 more. how many pens does it have?"
THE_PENS = "a shop has 1,000 pens and it buys 300 more. how many pens does it have?"
OTHER_NUMBERS = "a shop has 1,000 pens and buys 400 more. how many pens does it have?"
TRAINS = "two trains leave 300 km apart and meet after 1,000 minutes. how fast are they?"

TEXTS = st.text(alphabet="ab c1", min_size=1, max_size=40)


def slow_shingles(text: str, width: int = 5) -> set[str]:
    padded = text + "\0" * (width - 1)
    return {padded[i : i + width] for i in range(len(text))}


def slow_jaccard(left: str, right: str) -> float:
    a, b = slow_shingles(left), slow_shingles(right)
    return len(a & b) / len(a | b)


def test_normalising_takes_out_character_forms_space_and_case() -> None:
    assert normalised(" What's\u00a0the  \uff11\uff12th\nWORD\u2075? ") == "what's the 12th word5?"
    assert normalised("Stra\u00dfe \ufb01n") == "strasse fin"
    assert normalised("x - y") != normalised("x + y")


@settings(deadline=None)
@given(TEXTS, TEXTS)
def test_jaccard_by_hashes_is_that_of_the_sets_of_ngrams(left: str, right: str) -> None:
    assert text_jaccard(left, right) == slow_jaccard(left, right)


@settings(deadline=None)
@given(st.lists(st.text(max_size=30), min_size=1, max_size=8), st.integers(1, 6))
def test_ngrams_of_several_texts_are_those_of_each(texts: list[str], width: int) -> None:
    hashes, starts = shingles(texts, width)
    assert starts.tolist() == np.cumsum([0, *(len(t) or 1 for t in texts)])[:-1].tolist()
    for text, found in zip(texts, np.split(hashes, starts[1:]), strict=True):
        assert found.tolist() == shingles([text], width).hashes_T.tolist()


def random_pair(rng: random.Random) -> tuple[str, str]:
    left = [rng.choice("abcdefgh ") for _ in range(rng.randint(20, 120))]
    right = [letter if rng.random() > 0.05 else rng.choice("abcdefgh ") for letter in left]
    return "".join(left), "".join(right)


@settings(deadline=None)
@given(st.integers(0, 1 << 32))
def test_minhash_is_within_hoeffdings_bound_of_the_exact_jaccard(seed: int) -> None:
    left, right = random_pair(random.Random(seed))
    a, b = signatures([left, right])
    # The estimate is a mean of K = 128 indicators of probability J. Hoeffding: P(|estimate - J| >= e) is at most
    # 2 exp(-2 K e^2), for e = 0.25 so 2.3e-7 a pair.
    assert abs(float((a == b).mean()) - slow_jaccard(left, right)) < 0.25


def test_minhash_has_no_bias() -> None:
    pairs = [random_pair(random.Random(seed)) for seed in range(200)]
    a, b = signatures([left for left, _ in pairs]), signatures([right for _, right in pairs])
    errors = (a == b).mean(axis=1) - [slow_jaccard(*pair) for pair in pairs]
    # The variance of one estimate is J (1 - J) / 128, at most 1 / 512; of the mean of 200 at most 1 / 102,400, so the
    # deviation at most 1 / 320. Five deviations are 0.0157.
    assert abs(errors.mean()) < 5 / 320


def test_blocks_do_not_change_signatures() -> None:
    texts = [f"{i} " * (i % 7 + 1) for i in range(50)]
    assert list(blocks(["ab", "c", "def", "g" * 9, "h"], 4)) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert (signatures(texts)[13] == signatures([texts[13]])[0]).all()


def test_bands_are_the_longest_that_find_what_they_should() -> None:
    # 1 - (1 - 0.8^6)^21 = 1 - 0.737856^21 = 0.99831; seven rows make 18 bands: 1 - (1 - 0.8^7)^18 = 0.98554.
    assert banding(0.8, NUM_HASHES) == Bands(21, 6)
    assert Bands(21, 6).recall(0.8) == pytest.approx(0.99831, abs=1e-5)
    assert Bands(18, 7).recall(0.8) == pytest.approx(0.98554, abs=1e-5)
    assert banding(1.0, 128) == Bands(1, 128)
    assert banding(0.001, 128) == Bands(128, 1)


def test_planes_agree_as_often_as_the_angle_says() -> None:
    # At 60 degrees a random plane separates two vectors with probability 1/3; 4,096 planes: deviation 0.0074.
    vectors = np.array([[1, 0, 0], [0.5, np.sqrt(0.75), 0]], np.float32)
    a, b = plane_sides(vectors, num_planes=4096)
    assert plane_agreement(0.5) == pytest.approx(2 / 3)
    assert abs((a == b).mean() - 2 / 3) < 5 * 0.0074


def test_vectors_have_length_one_and_know_what_is_alike() -> None:
    vectors = hashed_ngrams([PENS, THE_PENS, TRAINS])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    assert vectors[0] @ vectors[1] > 0.9 > 0.5 > vectors[0] @ vectors[2]


def test_near_duplicates_are_found_and_those_with_other_numbers_are_problems_of_their_own() -> None:
    texts, ids = [PENS, THE_PENS, OTHER_NUMBERS, TRAINS], ["b", "c", "d", "a"]
    assert near_matches(texts, ids, threshold=0.8) == [Match(1, 0, slow_jaccard(PENS, THE_PENS))]
    any_numbers = near_matches(texts, ids, threshold=0.8, same_numbers=False)
    assert [(m.problem, m.kept) for m in any_numbers] == [(1, 0), (2, 0)]


def test_numbers_in_another_order_are_other_numbers() -> None:
    texts = [
        "what is the difference of 17 and 5, please tell me now",
        "what is the difference of 5 and 17, please tell me now",
    ]
    assert near_matches(texts, ["a", "b"], threshold=0.5) == []
    assert len(near_matches(texts, ["a", "b"], threshold=0.5, same_numbers=False)) == 1


def test_fixed_problems_stay_and_may_be_all_that_is_compared_with() -> None:
    texts, ids = [PENS, PENS, THE_PENS, TRAINS, TRAINS + "?"], ["", "", "a", "b", "c"]
    found = near_matches(texts, ids, threshold=0.8, num_fixed=2)
    assert [(m.problem, m.kept) for m in found] == [(2, 0), (4, 3)]
    alone = near_matches(texts, ids, threshold=0.8, num_fixed=2, among_pool=False)
    assert [(m.problem, m.kept) for m in alone] == [(2, 0)]


def by_exact(texts: Sequence[str], ids: Sequence[str]) -> list[Match]:
    return exact_matches([digest(text) for text in texts], ids)


def by_near(texts: Sequence[str], ids: Sequence[str]) -> list[Match]:
    return near_matches(texts, ids, threshold=0.5, same_numbers=False)


def by_vectors(texts: Sequence[str], ids: Sequence[str]) -> list[Match]:
    return semantic_matches(texts, ids, embed=hashed_ngrams, threshold=0.7, same_numbers=False)


@pytest.mark.parametrize("matches", [by_exact, by_near, by_vectors])
@settings(deadline=None, max_examples=30)
@given(texts=st.lists(TEXTS, max_size=12), seed=st.integers(0, 1 << 32))
def test_what_stays_does_not_depend_on_the_order_and_has_no_two_of_a_kind(
    matches: Callable[[Sequence[str], Sequence[str]], list[Match]], texts: list[str], seed: int
) -> None:
    problems = [(f"p{i:02d}", text) for i, text in enumerate(texts)]

    def left(rows: Sequence[tuple[str, str]]) -> set[str]:
        ids = [problem_id for problem_id, _ in rows]
        found = matches([text for _, text in rows], ids)
        gone = {ids[match.problem] for match in found}
        # Whoever leaves, leaves for one that stays and comes before it.
        assert not gone & {ids[match.kept] for match in found}
        assert all(ids[match.kept] < ids[match.problem] for match in found)
        return set(ids) - gone

    stays = left(problems)
    assert left(random.Random(seed).sample(problems, len(problems))) == stays
    assert left([problem for problem in problems if problem[0] in stays]) == stays


def test_every_pair_above_the_threshold_is_found() -> None:
    rng = random.Random(5)
    texts = [text for _ in range(150) for text in random_pair(rng)]
    ids = [f"{i:03d}" for i in range(len(texts))]
    alike = {i for i in range(0, 300, 2) if slow_jaccard(texts[i], texts[i + 1]) >= 0.6}
    found = {m.kept for m in near_matches(texts, ids, threshold=0.6)}
    assert len(alike) > 50
    # One in 200 may be missed at the threshold, fewer above it.
    assert found <= alike
    assert len(alike - found) <= 2


def slow_overlaps(texts: Sequence[str], heldout: Sequence[str], n: int, max_uses: int) -> dict[int, int]:
    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    known = set().union(*map(runs, heldout))
    common = {run for run in known if sum(run in runs(text) for text in texts) > max_uses}
    counts = {i: len(runs(text) & (known - common)) for i, text in enumerate(texts)}
    return {i: count for i, count in counts.items() if count}


WORDS = st.lists(st.sampled_from("abc"), max_size=12).map(" ".join)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=6), st.lists(WORDS, max_size=4), st.integers(2, 4), st.integers(1, 3))
def test_shared_runs_of_words_are_those_of_a_slow_search(
    texts: list[str], heldout: list[str], n: int, max_uses: int
) -> None:
    found = ngram_overlaps(texts, heldout, num_words=n, max_uses=max_uses)
    assert {overlap.problem: overlap.num_shared for overlap in found} == slow_overlaps(texts, heldout, n, max_uses)


def test_a_shared_run_names_the_heldout_problem_that_has_it() -> None:
    found = ngram_overlaps(["x y a b c z"], ["k l m n", "a b c d"], num_words=3)
    assert found == [(0, 1, 1)]


def test_hashes_of_a_set_are_counted_once() -> None:
    assert jaccard(np.array([1, 1, 2], np.uint64), np.array([2, 3], np.uint64)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("minilm", "unknown; known: hashed, model2vec:FOLDER, sentence-transformers:FOLDER"),
        ("model2vec:/somewhere", "the package model2vec is not installed"),
    ],
)
def test_an_embedding_that_cannot_be_had_is_named(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str) -> None:
        raise ImportError(module)

    monkeypatch.setattr(embedding.importlib, "import_module", missing)
    with pytest.raises(PoolError, match=message):
        load_embedding(name)
