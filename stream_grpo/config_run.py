"""The settings of the run itself: its name and length, the model, where its figures go. Loads no torch.

Part of the tree of `config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from stream_grpo.config_section import Section


class Run(Section):
    """What is run and where it is kept."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._ -]{0,99}$")
    """Folder under `root`: letters, digits, dot, dash, underscore, space. One that exists is refused unless resumed."""
    root: Path = Path("runs")
    """Folder of all runs, relative to the working directory."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Every seed of the run is derived from this one."""
    num_steps: int = Field(100, ge=0)
    """Learner steps in all, those before a resume included."""
    max_generated_tokens: int | None = Field(None, ge=1)
    """Its last step is that after which so many tokens were sampled, evaluations left out. None: num_steps alone."""
    stop_timeout_s: float = Field(25.0, gt=0)
    """What a stop by signal gives the processes, the learner's step in hand and its checkpoint included."""


class Model(Section):
    """The model to train."""

    path: Path
    """A Hugging Face folder: config, tokenizer, safetensors."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights in sampler and learner."""
    prompt_format: Literal["text", "chat"] = "text"
    """`text`: the prompt is tokenised as it is; `chat`: through the tokenizer's chat template."""
    max_length_tokens: int = Field(256, ge=2)
    """Prompt and response together, of one sequence."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longer prompts are refused; None: what max_new_tokens leaves of max_length_tokens."""


class Tracking(Section):
    """Where metrics go besides metrics.jsonl."""

    dashboard: bool = True
    """Whether `train` serves the live page of the run, on loopback, in a process of its own."""
    dashboard_port: int = Field(0, ge=0, le=65535)
    """Of the live page; 0: a free one, which is printed."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    """W&B mode; offline needs no account."""
    wandb_project: str = Field("stream-grpo", pattern=r"^[^/\\#?%:]{1,128}$")
    """W&B project: at most 128 characters, none of / \\ # ? % and colon."""
    tensorboard: bool = False
    """Whether an event file for TensorBoard is written, into `tensorboard/` of the run."""
    prometheus_port: int | None = Field(None, ge=0, lt=1 << 16)
    """Port on loopback under which Prometheus finds the newest figures; 0 takes a free one. None: no such server."""
