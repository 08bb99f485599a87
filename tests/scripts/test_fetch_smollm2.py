"""The folder of SmolLM2-135M-Instruct: what says that it is there, its configuration, and what the model answers."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from fetch_smollm2 import GGUF, GGUF_SHA256, MANIFEST, is_made, make, plain_settings

from stream_grpo.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "fetch_smollm2"


def folder_of(path: Path, **changes: Any) -> Path:
    """A folder that holds one file and a manifest that says so."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    files = {"config.json": hashlib.sha256(b"{}").hexdigest()}
    (path / MANIFEST).write_text(json.dumps({"gguf_sha256": GGUF_SHA256, "files": files} | changes))
    return path


def test_a_free_place_is_still_to_be_filled_and_a_complete_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert not is_made(tmp_path / "missing")
    assert not is_made(tmp_path / "empty")
    assert is_made(folder_of(tmp_path / "complete"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{ }"), "config.json is missing or not as it was made"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing or not as it was made"),
        (lambda folder: (folder / MANIFEST).unlink(), "holds no readable"),
        (lambda folder: (folder / MANIFEST).write_text('{"gguf_sha256": "0", "files": {}}'), "SHA-256 0, not b179c9"),
    ],
    ids=["changed", "lost", "foreign", "other-weights"],
)
def test_a_folder_that_holds_anything_else_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = folder_of(tmp_path / "folder")
    change(folder)
    with pytest.raises(ConfigError, match=message):
        is_made(folder)


def test_other_weights_than_the_pinned_ones_make_no_folder(tmp_path: Path) -> None:
    (tmp_path / GGUF).parent.mkdir()
    (tmp_path / GGUF).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=f"expected {GGUF_SHA256}"):
        make(tmp_path / "made", tmp_path)
    assert not (tmp_path / "made").exists()


def test_the_configuration_is_that_of_the_model_not_of_the_file() -> None:
    converted = {
        "_name_or_path": "x",
        "quantization_config": {"quant_method": "gguf"},
        "hidden_size": 576,
        "rms_norm_eps": 9.999999747378752e-06,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    # 1e-5 in float32 is 9.99999975e-06, to six digits 1e-05 again.
    assert plain_settings(converted) == {
        "hidden_size": 576,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


@pytest.mark.nightly
@pytest.mark.slow
def test_the_folder_is_made_and_answers(tmp_path: Path) -> None:
    """Also that the chat template is the one that the model was tuned with, and that white space keeps its tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "smollm2"
    subprocess.run([SCRIPT, folder], check=True)
    again = subprocess.run([SCRIPT, folder], check=True, capture_output=True, text=True)
    assert again.stdout == f"{folder}: already made\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["smollm2"]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    # A digit is a word of its own, so that the two line ends before it are one token.
    assert tokenizer.tokenize("=\n\n12") == ["=", "ĊĊ", "1", "2"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert model.generation_config.eos_token_id == [2, 0]
    ids_BT = torch.tensor([tokenizer(prompt).input_ids])
    answer = model.generate(ids_BT, attention_mask=torch.ones_like(ids_BT), do_sample=False, max_new_tokens=24)
    text = tokenizer.decode(answer[0, ids_BT.shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")
