"""What a Hugging Face folder must hold, checked without torch in a fraction of a second, before anything starts."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from stream_grpo.config import Config
from stream_grpo.config_lora import Lora, layer_of
from stream_grpo.errors import ConfigError
from stream_grpo.files import read_object

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
TOKENIZER_FILES = (TOKENIZER, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Any of these is a tokenizer's vocabulary."""
OTHER_OBJECTS = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Optional files that are read later, as JSON objects."""
MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the format's own limit."""
PUT_BACK = "put back the file that came with the model"
STRETCHING_ROPES = ("linear", "dynamic", "yarn")
"""Kinds of rotary embedding that reach `factor` times as far as they were trained."""


def unusable(config: Config) -> list[str]:
    """Why the model folder cannot be used: the file, the field, the value, and what would be right. Empty: it can."""
    folder = config.model.path
    # The folder is named once, and files by their names in it.
    found = [complaint.replace(f"{folder}/", "") for complaint in _complaints(folder, config)]
    return [f"model.path = {folder}: {complaint}" for complaint in found]


def _complaints(folder: Path, config: Config) -> Iterator[str]:
    if not folder.is_dir():
        yield "no such folder" if not folder.exists() else "not a folder; name the one that holds config.json"
        return
    plain: dict[str, Any] = {}
    if not (folder / CONFIG).exists():
        yield f"no {CONFIG}"
    else:
        try:
            plain = read_object(folder / CONFIG)
            yield from _config_complaints(plain, config)
        except ValueError as error:
            yield f"{error}; {PUT_BACK}"
    yield from _weight_complaints(folder)
    yield from _target_complaints(folder, config.learner.lora)
    yield from _tokenizer_complaints(folder, vocab_size(plain))


def model_config(folder: Path) -> dict[str, Any]:
    """The content of config.json. Raises ConfigError."""
    try:
        return read_object(folder / CONFIG)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def vocab_size(plain: Mapping[str, Any]) -> int | None:
    """Of the model's logits, as its configuration says; None where it does not."""
    return _whole(_text_setting(plain, "vocab_size"))


def length_limit(plain: Mapping[str, Any]) -> int | None:
    """The longest sequence the model has positions for, as its configuration says; None where it does not."""
    limit = _whole(_text_setting(plain, "max_position_embeddings") or _text_setting(plain, "n_positions"))
    rope = _text_setting(plain, "rope_parameters") or _text_setting(plain, "rope_scaling")
    if limit is None or not isinstance(rope, Mapping):
        return limit
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings", limit)
    if rope.get("rope_type", rope.get("type")) in STRETCHING_ROPES and isinstance(factor, int | float):
        return max(limit, int(factor * trained))
    return limit


def _text_setting(plain: Mapping[str, Any], name: str) -> Any:
    """Models of several modalities keep what the language model is in an object of its own."""
    inner = plain.get("text_config")
    return plain.get(name, inner.get(name) if isinstance(inner, Mapping) else None)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _config_complaints(plain: Mapping[str, Any], config: Config) -> Iterator[str]:
    kind, architectures = plain.get("model_type"), plain.get("architectures")
    if not isinstance(kind, str):
        yield f"{CONFIG}: model_type = {kind!r}: expected the kind of the model, for example 'llama'; {PUT_BACK}"
    elif not _is_known(f'("{kind}",'):
        yield f"{CONFIG}: model_type = {kind!r}: transformers has no such model; use one that it has"
    elif not isinstance(architectures, list) or not architectures:
        yield f"{CONFIG}: architectures = {architectures!r}: expected a class, for example ['LlamaForCausalLM']"
    elif not any(_is_known(f'"{name}"') for name in architectures):
        yield f"{CONFIG}: architectures = {architectures!r}: transformers has no such class; use one it has"
    limit, wanted = length_limit(plain), config.model.max_length_tokens
    if limit is not None and limit < wanted:
        yield (
            f"{CONFIG}: max_position_embeddings = {limit}: shorter than model.max_length_tokens = {wanted}; "
            f"use model.max_length_tokens = {limit} or less"
        )


@cache
def _tables() -> str:
    # Read as text: the import of transformers takes seconds, and brings torch.
    found = importlib.util.find_spec("transformers")
    folders = [Path(place) / "models" / "auto" for place in (found and found.submodule_search_locations) or ()]
    names = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")
    files = [folder / name for folder in folders for name in names]
    return "".join(file.read_text(encoding="utf-8") for file in files if file.exists())


def _is_known(text: str) -> bool:
    """Whether transformers' tables of models hold this text; True where it has none to look at."""
    return text in _tables() or not _tables()


def _weight_complaints(folder: Path) -> Iterator[str]:
    headers: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            headers[path.name] = set(tensor_shapes(path))
        except (ValueError, OSError) as error:
            yield f"{error}; copy or download the file again"
    if not any(folder.glob("*.safetensors")):
        yield "no weights (*.safetensors)"
    if not (folder / INDEX).exists():
        return
    try:
        places = read_object(folder / INDEX)["weight_map"].items()
    except (ValueError, KeyError, AttributeError) as error:
        yield f"{INDEX}: no weight_map in it ({error}); {PUT_BACK}"
        return
    if missing := sorted({str(file) for _, file in places if not (folder / str(file)).exists()}):
        yield f"{INDEX} names {', '.join(missing)}: no such file; copy or download it again"
    for tensor, file in places:
        if file in headers and tensor not in headers[file]:
            yield f"{file}: no tensor {tensor}, which {INDEX} says is there; copy or download both again"
            return


def _target_complaints(folder: Path, lora: Lora) -> Iterator[str]:
    try:
        found = [layer_of(*tensor) for path in folder.glob("*.safetensors") for tensor in tensor_shapes(path).items()]
    except (ValueError, OSError):
        return  # which is said already
    layers = {layer for layer in found if layer is not None}
    for target in lora.target_modules:
        if target not in layers:
            yield (
                f"learner.lora.target_modules: no linear layer {target!r} in its tensors; has "
                f"{', '.join(sorted(layers)) or 'none at all'}; name some of these, or none for all"
            )


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a safetensors file, by its header alone: 8 bytes of length, JSON, then all data without a gap.

    Raises ValueError naming the file where its size is not what the header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: {size} bytes, cut short within its header or no safetensors file")
        header = file.read(length)
    try:
        plain: dict[str, Any] = json.loads(header)
        plain.pop("__metadata__", None)
        end = 8 + length + max(int(entry["data_offsets"][1]) for entry in plain.values())
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in plain.items()}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path}: no readable safetensors header, or one without tensors") from error
    if size != end:
        raise ValueError(f"{path}: {size} bytes, its header says {end}")
    return shapes


def _tokenizer_complaints(folder: Path, num_tokens: int | None) -> Iterator[str]:
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        yield f"no tokenizer; expected {TOKENIZER}, or one of {', '.join(TOKENIZER_FILES[1:])}"
    objects: dict[str, dict[str, Any]] = {}
    for name in (TOKENIZER, *OTHER_OBJECTS):
        try:
            if (folder / name).exists():
                objects[name] = read_object(folder / name)
        except ValueError as error:
            yield f"{error}; {PUT_BACK}"
    if TOKENIZER in objects:
        yield from _vocabulary_complaints(objects[TOKENIZER], num_tokens)


def _vocabulary_complaints(tokenizer: Mapping[str, Any], num_tokens: int | None) -> Iterator[str]:
    """Added tokens are left out: some models have one that no text holds and that they have no row for."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if not isinstance(vocabulary, dict | list) or not vocabulary:
        yield f"{TOKENIZER}: no vocabulary (model.vocab) in it; {PUT_BACK}"
        return
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    highest = max((i for i in ids if _whole(i) is not None), default=0)
    if num_tokens is not None and highest >= num_tokens:
        yield (
            f"{TOKENIZER}: token ids up to {highest}, but {CONFIG} has vocab_size = {num_tokens}; use the tokenizer "
            f"that belongs to the model"
        )
