"""What stands beside published weights: version, forks, tensors, checksum, probe.

On disk a version is a folder `<branch>.<step:08d>` with `model.safetensors` and `manifest.json`; the file `latest`
names the newest complete one. The tensors are the model's, or those of an adapter, where the manifest says so.
"""

from __future__ import annotations

import hashlib
import json
import struct
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stream_grpo.errors import WeightsError
from stream_grpo.types import Forks, PolicyVersion, forks_from_plain, forks_to_plain

TENSORS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
LATEST_FILE = "latest"
HASH = "sha256"
"""The one tensor in the file of a version whose tensors go over NCCL (`nccl_sender`)."""
_FORMAT = 1

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of dtypes in a safetensors header and in torch."""


class TensorSpec(NamedTuple):
    """Shape and torch name of the dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: str


Fingerprint = Mapping[str, bytes]
"""Of one sequence: for every module, in the order of computation, [T, 1 + K] float32 (see `fingerprint`)."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids with the learner's own logprobs of them: what loaded weights must reproduce."""

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """At temperature 1, of every token of a sequence after the first: one less than its tokens."""
    fingerprints: tuple[Fingerprint, ...] = ()
    """What the learner's modules give out on the starts of the first sequences; says where a failed proof departs."""

    def __post_init__(self) -> None:
        """Raises ValueError for an empty probe or lengths that do not fit."""
        if not self.sequences:
            raise ValueError("a probe needs at least one sequence")
        lengths = [(len(ids), len(values)) for ids, values in zip(self.sequences, self.logprobs, strict=True)]
        if any(num_ids < 2 or num_values != num_ids - 1 for num_ids, num_values in lengths):
            raise ValueError(f"a probe needs T >= 2 tokens and T - 1 logprobs a sequence, got {lengths}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What published tensors are added to, where they are not the whole model, and how (see `adapter`)."""

    base_sha256: str
    """Of the weights trained from, see `adapter.Base`."""
    rank: int
    alpha: float

    @property
    def scaling(self) -> float:
        """What B A is taken times."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a publish says of itself."""

    version: PolicyVersion
    forks: Forks
    tensors: Mapping[str, TensorSpec]
    sha256: str
    """Of the bytes of `model.safetensors`."""
    probe: Probe
    created_at_s: float
    """Unix time."""
    adapter: Adapter | None = None
    """None: the tensors are the whole model."""
    tensor_sha256: Mapping[str, str] = field(default_factory=dict)
    """See `tensors_file.tensor_sha256`; of all tensors, where `weights.publish = "changed"`, else empty."""
    held_in: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """The tensors that are as an earlier version has them, and stand in its file alone."""

    @property
    def is_sent(self) -> bool:
        """Whether the tensors are no files, but go over NCCL."""
        return self.tensors.keys() == {HASH}

    @property
    def weights_sha256(self) -> str:
        """The same for the same weights, however much of them the file holds."""
        if not self.tensor_sha256:
            return self.sha256
        return hashlib.sha256(json.dumps(sorted(self.tensor_sha256.items())).encode()).hexdigest()


def folder_name(version: PolicyVersion) -> str:
    """Example: (0, 12) is `0.00000012`."""
    return f"{version.branch}.{version.step:08d}"


def parse_folder_name(name: str) -> PolicyVersion:
    """The inverse of `folder_name`; raises WeightsError for anything else."""
    branch, _, step = name.partition(".")
    if not (branch.isdecimal() and step.isdecimal()):
        raise WeightsError(f"{name!r} names no version of weights")
    return PolicyVersion(int(branch), int(step))


def to_json(manifest: Manifest) -> str:
    """The text of `manifest.json`."""
    plain: dict[str, Any] = {
        "format": _FORMAT,
        "version": list(manifest.version),
        "forks": forks_to_plain(manifest.forks),
        "tensors": {name: [list(spec.shape), spec.dtype] for name, spec in manifest.tensors.items()},
        "sha256": manifest.sha256,
        "probe": {
            "sequences": manifest.probe.sequences,
            "logprobs": manifest.probe.logprobs,
            "fingerprints": [_as_text(fingerprint) for fingerprint in manifest.probe.fingerprints],
        },
        "created_at_s": manifest.created_at_s,
    }
    if manifest.adapter is not None:
        plain["adapter"] = asdict(manifest.adapter)
    if manifest.tensor_sha256:
        plain["tensor_sha256"] = dict(manifest.tensor_sha256)
        plain["held_in"] = {name: list(version) for name, version in manifest.held_in.items()}
    return json.dumps(plain)


def from_json(text: str) -> Manifest:
    """The inverse of `to_json`; raises WeightsError where the text is no manifest of this format."""
    try:
        plain: dict[str, Any] = json.loads(text)
        if plain["format"] != _FORMAT:
            raise WeightsError(f"manifest of format {plain['format']} where {_FORMAT} is read")
        return Manifest(
            version=PolicyVersion(*plain["version"]),
            forks=forks_from_plain(plain["forks"]),
            tensors={name: TensorSpec(tuple(shape), dtype) for name, (shape, dtype) in plain["tensors"].items()},
            sha256=plain["sha256"],
            probe=_probe(plain["probe"]),
            created_at_s=plain["created_at_s"],
            adapter=Adapter(**plain["adapter"]) if "adapter" in plain else None,
            tensor_sha256=plain.get("tensor_sha256", {}),
            held_in={name: PolicyVersion(*version) for name, version in plain.get("held_in", {}).items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"not a manifest of weights: {error!r}") from error


def _probe(plain: Mapping[str, Any]) -> Probe:
    fingerprints = [
        {name: b64decode(text) for name, text in modules.items()} for modules in plain.get("fingerprints", ())
    ]
    return Probe(_rows(plain["sequences"]), _rows(plain["logprobs"]), tuple(fingerprints))


def _as_text(fingerprint: Fingerprint) -> dict[str, str]:
    return {name: b64encode(values).decode() for name, values in fingerprint.items()}


def _rows(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows)


def model_tensors(model_dir: Path, dtype: str) -> dict[str, TensorSpec]:
    """Names and shapes of the tensors of a Hugging Face folder, as published with `dtype`; reads headers alone.

    The head of a model with tied embeddings is the embedding and has no tensor of its own.
    Raises WeightsError where the folder holds no safetensors.
    """
    specs: dict[str, TensorSpec] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        specs |= {name: TensorSpec(spec.shape, dtype) for name, spec in _header(path).items()}
    if not specs:
        raise WeightsError(f"{model_dir}: no *.safetensors")
    config = json.loads((model_dir / "config.json").read_text())
    if config.get("tie_word_embeddings", False):
        specs.pop("lm_head.weight", None)
    return specs


def _header(path: Path) -> dict[str, TensorSpec]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {
        name: TensorSpec(tuple(entry["shape"]), DTYPES.get(entry["dtype"], entry["dtype"]))
        for name, entry in header.items()
    }
