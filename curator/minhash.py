"""Sets of character n-grams as hashes, MinHash signatures of them, and banding: texts likely alike share a key.

MinHash: Broder, "On the resemblance and containment of documents", 1997. Banding: Leskovec, Rajaraman, Ullman,
"Mining of Massive Datasets", chapter 3.4. Shapes: B texts, T shingles of all texts, K hash functions, N bands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

SHINGLE_CHARACTERS = 5
NUM_HASHES = 128
BLOCK_CHARACTERS = 1 << 15
"""Texts hashed at once: their hashes stay in the processor's cache while the hash functions go over them."""
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def mix(x: Hashes) -> Hashes:
    """Spread every bit over all 64: the finaliser of splitmix64 (Steele, Lea, Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Shingles(NamedTuple):
    """Hashes of the n-grams of several texts, one text after the other."""

    hashes_T: Hashes
    starts_B: NDArray[np.int64]
    """Where the hashes of each text begin."""


def shingles(texts: Sequence[str], width: int = SHINGLE_CHARACTERS) -> Shingles:
    """Hashes of the character n-grams of texts; those that reach over the end of a text are filled up with zeros.

    So every text has as many as characters, and a text shorter than `width` has n-grams of its own too. An empty text
    counts as one zero.
    """
    filler = "\0" * (width - 1)
    texts = [text or "\0" for text in texts]
    joined = filler.join([*texts, ""]).encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(joined, np.uint32).astype(np.uint64)
    hashes = np.zeros(len(codes) - width + 1, np.uint64)
    for i in range(width):
        hashes = hashes * _MULTIPLIER + codes[i : i + len(hashes)]
    lengths_B = np.fromiter(map(len, texts), np.int64, len(texts))
    starts_B = np.concatenate([[0], np.cumsum(lengths_B)[:-1]])
    # Those that begin within a filler belong to no text.
    fillers = np.repeat(np.arange(len(texts)) * (width - 1), lengths_B)
    return Shingles(mix(hashes[np.arange(lengths_B.sum()) + fillers]), starts_B)


def jaccard(left: Hashes, right: Hashes) -> float:
    """Common members over all members of two sets, each given with or without repeats."""
    left, right = np.unique(left), np.unique(right)
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / (len(left) + len(right) - common)


def text_jaccard(left: str, right: str) -> float:
    """The exact Jaccard similarity of the character n-grams of two texts."""
    return jaccard(shingles([left]).hashes_T, shingles([right]).hashes_T)


def signatures(texts: Sequence[str], *, num_hashes: int = NUM_HASHES, seed: int = 0) -> NDArray[np.uint32]:
    """MinHash signatures, shape [B, K]: the share of equal places of two is an unbiased estimate of their Jaccard."""
    rng = np.random.default_rng(seed)
    factors_K = rng.integers(0, 1 << 63, num_hashes, np.uint64) * np.uint64(2) + np.uint64(1)
    offsets_K = rng.integers(0, 1 << 63, num_hashes, np.uint64)
    result = np.empty((len(texts), num_hashes), np.uint32)
    for start, end in blocks(texts):
        hashes_T, starts_B = shingles(texts[start:end])
        hashed_T = np.empty_like(hashes_T)
        for k, (factor, offset) in enumerate(zip(factors_K, offsets_K, strict=True)):
            np.multiply(hashes_T, factor, out=hashed_T)
            np.add(hashed_T, offset, out=hashed_T)
            # The lower half tells smallest members apart as well as the whole does.
            result[start:end, k] = np.minimum.reduceat(hashed_T, starts_B).astype(np.uint32)
    return result


def blocks(texts: Sequence[str], block_characters: int = BLOCK_CHARACTERS) -> Iterator[tuple[int, int]]:
    """Ranges of texts of about `block_characters` together; a longer text has a range of its own."""
    start = characters = 0
    for end, text in enumerate(texts):
        if characters and characters + len(text) > block_characters:
            yield start, end
            start, characters = end, 0
        characters += len(text)
    if start < len(texts):
        yield start, len(texts)


class Bands(NamedTuple):
    """How a signature is cut: two texts are candidates where all rows of a band are equal."""

    num_bands: int
    rows: int

    def recall(self, agreement: float) -> float:
        """Probability that two texts are candidates whose places agree with this probability: 1 - (1 - s^r)^b."""
        return float(1 - (1 - agreement**self.rows) ** self.num_bands)


def banding(agreement: float, num_places: int, min_recall: float = 0.995) -> Bands:
    """The longest bands, so the fewest candidates, that find two texts of such agreement with `min_recall`."""
    for rows in range(num_places, 1, -1):
        bands = Bands(num_places // rows, rows)
        if bands.recall(agreement) >= min_recall:
            return bands
    return Bands(num_places, 1)


def band_keys(places_BK: NDArray[np.uint32], bands: Bands, salt_B: Hashes) -> Hashes:
    """One key for each text and band, shape [B, N]; texts of another salt have other keys."""
    keys_BN = np.empty((len(places_BK), bands.num_bands), np.uint64)
    for band in range(bands.num_bands):
        key_B = mix(salt_B + np.uint64(band))
        for row in range(bands.rows):
            key_B = mix(key_B ^ places_BK[:, band * bands.rows + row])
        keys_BN[:, band] = key_B
    return keys_BN
