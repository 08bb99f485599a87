"""What a run optimises, as one readable record with a hash, and in what two runs differ. No torch.

The manifest of a run keeps a list of these records: that of its start, and a further one from every restart that
optimises something else.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stream_grpo.algo.recipe import Recipe
from stream_grpo.config import Config
from stream_grpo.config_lora import Lora
from stream_grpo.errors import ConfigError
from stream_grpo.files import read_object

MANIFEST_FILE = "manifest.json"
"""In the folder of a run."""

NOT_IN_IT: Mapping[str, frozenset[str] | None] = {
    "run": None,
    "model": frozenset({"path"}),
    "pool": None,
    "curator": frozenset({"flush_outcomes"}),
    "sampler": frozenset(
        {
            "num_samplers",
            "max_num_seqs",
            "kv_cache_bytes",
            "prefix_cache",
            "gpu_memory_utilization",
            "num_threads",
            "num_gpus",
            "engine",
            "tensor_parallel_size",
            "max_restarts",
        }
    ),
    "stream": frozenset(
        {
            "stall_timeout_s",
            "max_groups_without_signal",
            "ticket_timeout_s",
            "partial_interval_s",
        }
    ),
    "buffer": None,
    "learner": frozenset(
        {
            "zero_stage",
            "num_ranks",
            "collective_timeout_s",
            "microbatch_tokens",
            "share_prompts",
            "packing",
            "logits_bytes",
            "activation_checkpointing",
            "num_threads",
            "num_gpus",
            "checkpoint_interval",
            "keep_checkpoints",
            "max_restarts",
        }
    ),
    "rewards": frozenset(
        {"num_workers", "max_retries", "retry_after_s", "max_errors_in_row", "function_dir", "hidden"}
    ),
    "environment": frozenset(
        {
            "num_workers",
            "step_timeout_s",
            "memory_limit_bytes",
            "max_retries",
            "max_errors_in_row",
            "max_waiting",
            "waiting_kv",
        }
    ),
    "weights": frozenset(
        {
            "transfer",
            "keep_versions",
            "publish",
            "poll_interval_s",
            "num_probe_sequences",
            "probe_mean_tolerance",
            "probe_max_tolerance",
        }
    ),
    "evaluation": None,
    "cluster": None,
    "tracking": None,
    "alarms": None,
}
"""Settings that say where, how long and how fast, not what; None: the whole section. Every other setting is a choice
that decides what is optimised. Files count by the hash of what is in them."""

WHERE_USED: Mapping[str, Mapping[str, Any]] = {
    "algo": {
        "advantage": "reward",
        **dict.fromkeys(("gae_gamma", "gae_lambda", "gae_whiten", "value_clip", "critic_rate")),
    },
    "curator": {"start_from": None, "group_sizes": []},
    "learner": {"lora": Lora().model_dump(mode="json")},
    "environment": {"branch_share": 0.0, "branch_turns": None, "grammar": False},
}
"""Choices that are in the record only where they are in use, with what they are where they are not: so the record of
a run that knows nothing of them is that of one that does not use them."""

_PROXIMAL = {
    "recomputed": "the learner's weights at the start of the learner step",
    "behavior": "the behavior policy",
    "interpolated": "between behavior and policy, log-linear by age",
}
_REFERENCE = {
    None: "none",
    "fixed": "the weights that the run began with",
    "refreshed": "a copy of the policy, taken every kl_refresh_interval learner steps",
    "ema": "a moving average of the policy",
    "behavior": "the behavior policy",
}
_DENOMINATOR = {
    "tokens": "trained tokens",
    "sequences": "sequences with a trained token, each the mean over its own",
    "problems": "problems with a trained token, each the mean over its own",
    "constant": "groups x group_size x max_new_tokens",
}


def identity(
    config: Config,
    *,
    model_sha256: Mapping[str, str],
    tokenizer: str,
    pool: str,
    verifiers: Mapping[str, str],
    environment: str | None = None,
) -> dict[str, Any]:
    """Every choice that decides what is optimised, by section; plain values, as JSON holds them.

    `model_sha256` is by file of the model folder, `tokenizer` and `pool` are fingerprints, `verifiers` are those that
    problems name, with their versions, `environment` is the version of the one in use. Seeds and versions of libraries
    stand beside it in the manifest: they decide which numbers come out, not of what.
    """
    chosen = {
        section: {name: value for name, value in values.items() if name not in (NOT_IN_IT.get(section) or ())}
        for section, values in config.model_dump(mode="json").items()
        if NOT_IN_IT.get(section, frozenset()) is not None
    }
    if not config.control.enabled:
        del chosen["control"]
    if config.environment.name is None:
        del chosen["environment"]
    else:
        chosen["environment"]["version"] = environment
    # Where a judge is and how fast it is asked decides nothing.
    chosen["rewards"]["http"] = {name: judge.rules() for name, judge in config.rewards.http.items()}
    for section in WHERE_USED.keys() & chosen.keys():
        for name, value in WHERE_USED[section].items():
            if chosen[section][name] == value:
                del chosen[section][name]
    return {
        **chosen,
        "policies": _policies(config.algo),
        "reduction": _reduction(config.algo),
        "samples": _samples(config.algo, config.rewards.shaping.truncated),
        "verifiers": dict(verifiers),
        "contents": {"pool": pool, "tokenizer": tokenizer, **model_sha256},
    }


def identity_hash(record: Mapping[str, Any]) -> str:
    """SHA-256 of the record as canonical JSON: keys sorted, no spaces."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def entry(record: Mapping[str, Any], *, from_step: int) -> dict[str, Any]:
    """An item of the manifest's `identities`: the record, its hash, and the learner step it holds from."""
    return {"from_step": from_step, "sha256": identity_hash(record), "identity": record}


def _policies(recipe: Recipe) -> dict[str, str]:
    return {
        "behavior": "the weights that sampled a token; every token keeps their version (branch, step) and its logprob",
        "proximal": _PROXIMAL[recipe.proximal],
        "reference": _REFERENCE[recipe.kl_reference],
    }


def _reduction(recipe: Recipe) -> dict[str, str]:
    return {
        "loss": "-(1/D) sum sg(w b m) A log policy + beta KL - c entropy",
        "D": _DENOMINATOR[recipe.aggregation],
        "counted": "over all microbatches of an optimizer update, before any mask",
    }


def _samples(recipe: Recipe, truncated: str) -> dict[str, str]:
    """What happens to rollouts and groups that are not as one wishes."""
    left_out = "in neither baseline nor loss"
    return {
        "unscored rollout": left_out,
        "aborted rollout": left_out,
        "empty rollout": left_out,
        "rollout cut at max_new_tokens": "scored and trained" if truncated == "keep" else left_out,
        "group without spread": "ends as no_signal" if recipe.needs_spread else "trained",
        "group past its deadline or its age": "ends as stale",
        "group with an unsound rollout": "ends as invalid",
        "group sampled under another configuration": "ends as invalid",
        "group scored under another configuration": "by stream.on_reward_change",
    }


class Difference(NamedTuple):
    """A choice in which two records differ; None where one has none."""

    name: str
    left: Any
    right: Any


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    """The values at `section.name` that are not the same, in the order of the left record, then of the right."""
    ours, theirs = dict(_flat(left)), dict(_flat(right))
    return [
        Difference(name, ours.get(name), theirs.get(name))
        for name in {**ours, **theirs}
        if name not in ours or name not in theirs or ours[name] != theirs[name]
    ]


def lines(found: Sequence[Difference]) -> list[str]:
    """The differences for reading, aligned: `section.name  left | right`. Of a hash the beginning is shown."""
    cells = [(name, _shown(left), _shown(right)) for name, left, right in found]
    name_width = max((len(name) for name, _, _ in cells), default=0)
    left_width = max((len(left) for _, left, _ in cells), default=0)
    return [f"{name:<{name_width}}  {left:<{left_width}} | {right}" for name, left, right in cells]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return f"{value[:12]}..." if re.fullmatch(r"[0-9a-f]{64}", value) else value
    return json.dumps(value, ensure_ascii=False)


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_identity(run_dir: Path) -> dict[str, Any]:
    """A run's identity with its seed and versions, as its last start left them. Raises ConfigError where there is none.

    `history` lists the identities of a run that had several, as "step hash": to end alike is not to be equal.
    """
    path = run_dir / MANIFEST_FILE
    if not path.exists():
        raise ConfigError(f"{run_dir}: no run there (no {MANIFEST_FILE})")
    try:
        manifest = read_object(path)
        *earlier, last = manifest["identities"]
        start = {**manifest, **(manifest["resumed"] or [{}])[-1]}
        return {
            **last["identity"],
            "history": [f"{item['from_step']} {item['sha256'][:12]}" for item in [*earlier, last]] if earlier else [],
            "seed": start["seed"],
            "versions": {"python": start["python"], **start["libraries"]},
        }
    except (ValueError, KeyError, TypeError, IndexError) as error:
        reason = str(error) if str(path) in str(error) else f"{path}: no identity in it: {error!r}"
        raise ConfigError(f"{reason}; it is written when a run begins") from error
