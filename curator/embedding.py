"""Texts as unit vectors, so that the cosine says how alike they are.

By default they come from hashed n-grams: numpy alone, no model. Another embedding is named as `LIBRARY:FOLDER`; its
library is loaded when it is used, its model is a folder on disk.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from curator.errors import PoolError
from curator.minhash import blocks, shingles

Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str]], Vectors]

HASHED = "hashed"
NUM_DIMENSIONS = 512
WIDTHS = (3, 4, 5)
"""Characters of the n-grams that are counted."""
NUM_PLANES = 512


def hashed_ngrams(texts: Sequence[str]) -> Vectors:
    """Signed counts of hashed character n-grams, shape [B, NUM_DIMENSIONS], length 1.

    Feature hashing: Weinberger et al., "Feature hashing for large scale multitask learning", 2009. The sign keeps the
    expected inner product that of the counts themselves, collisions or not.
    """
    vectors = np.zeros((len(texts), NUM_DIMENSIONS), np.float32)
    for start, end in blocks(texts):
        counts = np.zeros((end - start) * NUM_DIMENSIONS)
        for width in WIDTHS:
            hashes_T, starts_B = shingles(texts[start:end], width)
            lengths_B = np.diff(starts_B, append=len(hashes_T))
            places_T = (hashes_T % np.uint64(NUM_DIMENSIONS)).astype(np.int64)
            places_T += np.repeat(np.arange(end - start) * NUM_DIMENSIONS, lengths_B)
            signs_T = 1.0 - 2.0 * (hashes_T >> np.uint64(63)).astype(np.float64)
            counts += np.bincount(places_T, signs_T, len(counts))
        vectors[start:end] = counts.reshape(end - start, NUM_DIMENSIONS)
    return unit(vectors)


def unit(vectors: NDArray[Any]) -> Vectors:
    """The vectors with length 1; one without a direction stays 0."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0, 1, lengths), np.float32)


def plane_sides(vectors: Vectors, *, num_planes: int = NUM_PLANES, seed: int = 0) -> NDArray[np.uint32]:
    """On which side of random planes each vector lies, shape [B, planes]: 1 or 0.

    Two vectors agree at a plane with probability 1 - angle / pi (Charikar, "Similarity estimation techniques from
    rounding algorithms", 2002).
    """
    planes = np.random.default_rng(seed).standard_normal((vectors.shape[1], num_planes)).astype(np.float32)
    return np.concatenate(
        [np.asarray(vectors[i : i + 4096] @ planes > 0, np.uint32) for i in range(0, max(1, len(vectors)), 4096)]
    )


def plane_agreement(cosine: float) -> float:
    """The probability that two vectors of this cosine lie on one side of a random plane."""
    return float(1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi)


def load_embedding(name: str) -> Embed:
    """The embedding of a name. Raises PoolError for an unknown one, and where its library or folder are missing."""
    if name == HASHED:
        return hashed_ngrams
    library, colon, folder = name.partition(":")
    if library not in _LIBRARIES or not colon:
        forms = ", ".join(f"{known}:FOLDER" for known in _LIBRARIES)
        raise PoolError(f"embedding '{name}': unknown; known: {HASHED}, {forms}")
    module, load = _LIBRARIES[library]
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise PoolError(f"embedding '{name}': the package {library} is not installed ({error})") from error
    try:
        model = load(loaded, folder)
    except (OSError, ValueError) as error:
        raise PoolError(f"embedding '{name}': the model cannot be loaded: {error}") from error
    return lambda texts: unit(np.asarray(model.encode(list(texts))))


_LIBRARIES: Mapping[str, tuple[str, Callable[[Any, str], Any]]] = {
    "model2vec": ("model2vec", lambda library, folder: library.StaticModel.from_pretrained(folder)),
    "sentence-transformers": (
        "sentence_transformers",
        lambda library, folder: library.SentenceTransformer(folder, local_files_only=True),
    ),
}
