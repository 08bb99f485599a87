"""Which problems of a pool say the same: equal after normalising, nearly equal by letters, alike by their vectors.

The rule is the same for all three, and knows nothing of the order of rows: problems are looked at in the order of their
ids, and one leaves where one that stays is its like. So what stays has no two of a kind, a second run removes nothing,
and every problem that leaves is reported with the one that stays for it. Shapes: P problems.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from curator.embedding import NUM_PLANES, Embed, plane_agreement, plane_sides
from curator.minhash import NUM_HASHES, Bands, Hashes, band_keys, banding, signatures, text_jaccard

KEY_TEXTS = 1 << 15
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class Match(NamedTuple):
    """A problem that is the like of one that stays."""

    problem: int
    kept: int
    """Index of the one that stays."""
    similarity: float


def normalised(text: str) -> str:
    """A text without what is not content: compatible characters as one (NFKC), one space between words, no case."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def digest(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def exact_matches(keys: Sequence[bytes], ids: Sequence[str], num_fixed: int = 0) -> list[Match]:
    """Problems whose key is that of a fixed one or of an earlier one in the order of ids.

    The first `num_fixed` are fixed: they stay, whatever they are alike to.
    """
    kept: dict[bytes, int] = {}
    found = []
    for problem in in_order(ids, num_fixed):
        other = kept.setdefault(keys[problem], problem)
        if other != problem and problem >= num_fixed:
            found.append(Match(problem, other, 1.0))
    return found


def near_matches(
    texts: Sequence[str],
    ids: Sequence[str],
    *,
    threshold: float,
    same_numbers: bool = True,
    num_fixed: int = 0,
    among_pool: bool = True,
) -> list[Match]:
    """Problems with a Jaccard similarity of character n-grams of at least `threshold` to one that stays.

    Candidates come from MinHash with banding, which misses one pair in 200 at the threshold and fewer above it; every
    match is verified by the exact Jaccard similarity. `same_numbers`: problems whose numbers differ, or stand in
    another order, are different problems. `among_pool`: False compares with the fixed ones alone.
    """
    bands = banding(threshold, NUM_HASHES)
    keys_PN = _keys(texts, lambda start, end: signatures(texts[start:end]), bands, same_numbers)
    return _matches(
        keys_PN, ids, lambda a, b: text_jaccard(texts[a], texts[b]), threshold, num_fixed, among_pool=among_pool
    )


def semantic_matches(
    texts: Sequence[str],
    ids: Sequence[str],
    *,
    embed: Embed,
    threshold: float,
    same_numbers: bool = True,
    num_fixed: int = 0,
    among_pool: bool = True,
) -> list[Match]:
    """Problems whose vector has a cosine of at least `threshold` with that of one that stays.

    Candidates lie on the same sides of a band of random planes; every match is verified by the cosine.
    """
    vectors = embed(texts)
    bands = banding(plane_agreement(threshold), NUM_PLANES)
    keys_PN = _keys(texts, lambda start, end: plane_sides(vectors[start:end]), bands, same_numbers)
    return _matches(
        keys_PN, ids, lambda a, b: float(vectors[a] @ vectors[b]), threshold, num_fixed, among_pool=among_pool
    )


def _keys(
    texts: Sequence[str], places: Callable[[int, int], NDArray[np.uint32]], bands: Bands, same_numbers: bool
) -> Hashes:
    """`band_keys` of all texts, of whose signatures a part is in memory at a time."""
    parts = [np.zeros((0, bands.num_bands), np.uint64)]
    for start in range(0, len(texts), KEY_TEXTS):
        end = min(len(texts), start + KEY_TEXTS)
        parts.append(band_keys(places(start, end), bands, number_salt(texts[start:end], same_numbers)))
    return np.concatenate(parts)


def number_salt(texts: Sequence[str], same_numbers: bool) -> Hashes:
    """A hash of the numbers of each text in their order, shape [P]; zeros where numbers may differ."""
    if not same_numbers:
        return np.zeros(len(texts), np.uint64)
    return np.fromiter(
        (int.from_bytes(digest(" ".join(_NUMBER.findall(text)))[:8], "little") for text in texts),
        np.uint64,
        len(texts),
    )


def in_order(ids: Sequence[str], num_fixed: int) -> list[int]:
    """Indices of problems: the fixed ones, then the others by id."""
    return [*range(num_fixed), *sorted(range(num_fixed, len(ids)), key=ids.__getitem__)]


def _matches(
    keys_PN: Hashes,
    ids: Sequence[str],
    similarity: Callable[[int, int], float],
    threshold: float,
    num_fixed: int,
    *,
    among_pool: bool,
) -> list[Match]:
    found = []
    kept_by_bucket: dict[int, list[int]] = {}
    for problem, buckets in _shared_buckets(keys_PN, in_order(ids, num_fixed)):
        candidates = dict.fromkeys(kept for bucket in buckets for kept in kept_by_bucket.get(bucket, ()))
        if problem >= num_fixed:
            similarities = ((kept, similarity(problem, kept)) for kept in candidates)
            match = next(((kept, s) for kept, s in similarities if s >= threshold), None)
            if match is not None:
                found.append(Match(problem, *match))
                continue
        if problem < num_fixed or among_pool:
            for bucket in buckets:
                kept_by_bucket.setdefault(bucket, []).append(problem)
    return found


def _shared_buckets(keys_PN: Hashes, order: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The problems that share a key with another one, in their order, with the numbers of these keys."""
    rank_P = np.empty(len(order), np.int64)
    rank_P[np.asarray(order, np.int64)] = np.arange(len(order))
    problems: list[NDArray[np.int64]] = []
    buckets: list[NDArray[np.int64]] = []
    num_buckets = 0
    for band in range(keys_PN.shape[1]):
        by_key = np.argsort(keys_PN[:, band], kind="stable")
        keys = keys_PN[by_key, band]
        is_first = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.zeros(0, bool)
        bucket = np.cumsum(is_first) - 1
        is_shared = np.bincount(bucket)[bucket] > 1 if len(keys) else np.zeros(0, bool)
        problems.append(by_key[is_shared])
        buckets.append(bucket[is_shared] + num_buckets)
        num_buckets += int(np.count_nonzero(is_first))
    all_problems, all_buckets = np.concatenate(problems), np.concatenate(buckets)
    by_rank = np.argsort(rank_P[all_problems], kind="stable")
    all_problems, all_buckets = all_problems[by_rank], all_buckets[by_rank]
    ends = np.flatnonzero(np.diff(all_problems, append=-1)) + 1
    start = 0
    for end in ends.tolist():
        yield int(all_problems[start]), all_buckets[start:end].tolist()
        start = end
