"""The environment variables of a sampler process; loads neither torch nor vLLM, which read them at import."""

from __future__ import annotations

from stream_grpo.config import Config

# In one process, weights change between two steps and every token's version is exact.
ALWAYS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
# Compiling the one small function that dynamo would compile costs seconds and gains nothing on CPU.
ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}


def environment(config: Config) -> dict[str, str]:
    """What a sampler's process must have in its environment before it imports torch.

    Example: `{"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", ...}`.
    """
    variables = dict(ALWAYS)
    if config.sampler.num_gpus == 0:
        threads = str(config.sampler.num_threads)
        variables |= ON_CPU | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return variables
