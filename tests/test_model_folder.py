"""A model folder that cannot be used is refused with file, field, value and what would be right."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import parse
from stream_grpo.config_learner import Learner
from stream_grpo.model_folder import INDEX, length_limit, tensor_shapes, unusable

SOUND = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4,
    "max_position_embeddings": 256,
}


def write_tensors(path: Path, *names: str, size: int | None = None, shape: tuple[int, ...] = (1,)) -> None:
    """A safetensors file of one float32 for every name; `size` cuts it."""
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    path.write_bytes((struct.pack("<Q", len(header)) + header + bytes(4 * len(names)))[:size])


def write_object(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_object(tmp_path / "config.json", SOUND)
    write_object(tmp_path / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 3}}, "added_tokens": [{"id": 9}]})
    write_object(tmp_path / "tokenizer_config.json", {})
    write_tensors(tmp_path / "model.safetensors", "w", "v")
    return tmp_path


def configuration(folder: Path, max_length_tokens: int = 128) -> Config:
    return parse({"model": {"path": str(folder), "max_length_tokens": max_length_tokens}}, "test")


def test_a_sound_folder_is_taken(folder: Path) -> None:
    assert unusable(configuration(folder)) == []
    assert tensor_shapes(folder / "model.safetensors") == {"w": (1,), "v": (1,)}


def test_a_unigram_vocabulary_and_a_multimodal_configuration_are_read(folder: Path) -> None:
    inner = {"vocab_size": 2, "max_position_embeddings": 256}
    plain = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner}
    write_object(folder / "config.json", plain)
    write_object(folder / "tokenizer.json", {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    assert unusable(configuration(folder)) == []


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def with_text(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def with_config(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: write_object(folder / "config.json", SOUND | settings)


def with_tensors(size: int | None, *names: str) -> Callable[[Path], None]:
    return lambda folder: write_tensors(folder / "model.safetensors", *names, size=size)


def with_index(weight_map: Any) -> Callable[[Path], None]:
    return lambda folder: write_object(folder / INDEX, {"weight_map": weight_map})


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (without("config.json"), r"no config\.json$"),
    "config empty": (with_text("config.json", ""), r"config\.json: empty; put back"),
    "config cut": (with_text("config.json", '{"model_type": "lla'), r"config\.json: not JSON: .*; put back"),
    "config of bytes": (with_text("config.json", "\x00\x01"), r"config\.json: not JSON"),
    "config a list": (with_text("config.json", "[]"), r"config\.json: a JSON list where an object is expected"),
    "config {}": (with_text("config.json", "{}"), r"config\.json: model_type = None: expected the kind"),
    "unknown kind": (with_config(model_type="lama"), r"model_type = 'lama': transformers has no such model"),
    "unknown class": (with_config(architectures=["LamaLM"]), r"architectures = \['LamaLM'\]: transformers has no such"),
    "no class": (with_config(architectures=None), r"architectures = None: expected a class"),
    "short": (
        with_config(max_position_embeddings=64),
        r"max_position_embeddings = 64: shorter than model\.max_length_tokens = 128; .*= 64 or less",
    ),
    "no weights": (without("model.safetensors"), r"no weights \(\*\.safetensors\)"),
    "weights empty": (with_text("model.safetensors", ""), r"model\.safetensors: 0 bytes, cut short within its header"),
    "weights cut in the header": (with_tensors(30, "w"), r"30 bytes, cut short within its header"),
    "weights cut": (with_tensors(-1, "w", "v"), r"model\.safetensors: \d+ bytes, its header says \d+; copy"),
    "weights of text": (with_text("model.safetensors", "version https://lfs"), r"19 bytes, cut short .* or no safe"),
    "weights of nothing": (with_tensors(None), r"no readable safetensors header, or one without tensors"),
    "part missing": (
        with_index({"w": "model.safetensors", "x": "b.safetensors"}),
        r"names b\.safetensors: no such file",
    ),
    "tensor missing": (with_index({"x": "model.safetensors"}), r"model\.safetensors: no tensor x"),
    "index broken": (with_index(3), r"model\.safetensors\.index\.json: no weight_map"),
    "no tokenizer": (without("tokenizer.json"), r"no tokenizer; expected tokenizer\.json, or one of"),
    "tokenizer cut": (with_text("tokenizer.json", '{"model'), r"tokenizer\.json: not JSON: .*; put back"),
    "tokenizer {}": (with_text("tokenizer.json", "{}"), r"tokenizer\.json: no vocabulary \(model\.vocab\)"),
    "tokenizer settings": (with_text("tokenizer_config.json", "{"), r"tokenizer_config\.json: not JSON"),
    "larger vocabulary": (
        with_config(vocab_size=3),
        r"tokenizer\.json: token ids up to 3, but config\.json has vocab_size = 3; use the tokenizer that belongs",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_one_sentence(folder: Path, damage: str) -> None:
    make, expected = DAMAGES[damage]
    make(folder)
    (found,) = unusable(configuration(folder))
    assert found.startswith(f"model.path = {folder}: ")
    assert re.search(expected, found), found


def test_layers_that_are_to_get_an_adapter_must_be_there(folder: Path) -> None:
    names = [f"model.layers.0.{layer}.weight" for layer in ("q_proj", "k_proj")]
    write_tensors(folder / "model.safetensors", *names, "model.embed_tokens.weight", shape=(1, 1))
    # A vector and a tensor of three dimensions are of no linear layer.
    write_tensors(folder / "norms.safetensors", "model.layers.0.input_norm.weight")
    write_tensors(folder / "experts.safetensors", "model.layers.0.gate_up_proj.weight", shape=(1, 1, 1))

    def found(*targets: str) -> list[str]:
        lora = {"rank": 8, "target_modules": targets}
        return unusable(configuration(folder).model_copy(update={"learner": Learner.model_validate({"lora": lora})}))

    assert found("q_proj", "k_proj") == found() == []
    for wrong in ("query", "input_norm", "gate_up_proj"):
        (complaint,) = found("q_proj", wrong)
        assert f"target_modules: no linear layer {wrong!r} in its tensors; has k_proj, q_proj; name" in complaint


def test_no_folder_and_a_file_are_told_apart(folder: Path) -> None:
    assert unusable(configuration(folder / "none")) == [f"model.path = {folder / 'none'}: no such folder"]
    (found,) = unusable(configuration(folder / "config.json"))
    assert "not a folder; name the one that holds config.json" in found


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 100),
        ({"rope_type": "default"}, 100),
        ({"rope_type": "llama3", "factor": 8.0}, 100),  # its max_position_embeddings has the factor in it
        ({"type": "linear", "factor": 4.0}, 400),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 25}, 100),
    ],
)
def test_a_stretched_rotary_embedding_reaches_further(rope: dict[str, Any] | None, expected: int) -> None:
    assert length_limit({"max_position_embeddings": 100, "rope_scaling": rope}) == expected


def test_a_model_that_names_no_limits_has_none(folder: Path) -> None:
    write_object(folder / "config.json", {name: SOUND[name] for name in ("model_type", "architectures")})
    assert unusable(configuration(folder, max_length_tokens=1 << 20)) == []


def test_the_check_loads_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from stream_grpo.config_file import parse; from stream_grpo.model_folder import unusable; "
        f"assert not unusable(parse({{'model': {{'path': {str(folder)!r}}}}}, 'x')); "
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
