"""Which engine a run has, and what no engine can be asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stream_grpo.config import Config
from stream_grpo.config_run import Model
from stream_grpo.config_sampler import Sampler
from stream_grpo.sampler.engines import make_engine


def config(**sampler: object) -> Config:
    return Config(model=Model(path=Path("model")), sampler=Sampler.model_validate(sampler))


@pytest.mark.parametrize(
    ("sampler", "module", "name"),
    [
        ({}, "stream_grpo.sampler.engine", "InProcessEngine"),
        ({"engine": "async"}, "stream_grpo.sampler.async_engine", "AsyncEngine"),
        ({"engine": "async", "tensor_parallel_size": 2}, "stream_grpo.sampler.async_engine", "AsyncEngine"),
    ],
)
def test_the_engine_is_the_one_that_the_configuration_names(
    sampler: dict[str, object], module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("stream_grpo.sampler.engine", "stream_grpo.sampler.async_engine"):
        # Without the class that is asked for, taking the other one raises ImportError.
        monkeypatch.setitem(sys.modules, other, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: lambda c: (name, c)}))  # type: ignore[arg-type]
    made = config(**sampler)
    assert make_engine(made) == (name, made)


def test_several_workers_need_the_async_engine() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size = 2: .* use sampler.engine = 'async'"):
        config(tensor_parallel_size=2)


def test_the_prefix_cache_of_other_processes_needs_sequences_that_give_up_their_own() -> None:
    with pytest.raises(ValueError, match=r"sampler.prefix_cache = true .* use sampler.kv_after_update = 'recompute'"):
        config(engine="async", prefix_cache=True)
    assert config(engine="async", prefix_cache=True, kv_after_update="recompute").sampler.prefix_cache
    assert not config().sampler.prefix_cache


def test_every_worker_needs_a_gpu_of_its_own_where_gpus_are_used() -> None:
    with pytest.raises(ValueError, match=r"num_gpus = 1: .* use num_gpus = 2"):
        config(engine="async", tensor_parallel_size=2, num_gpus=1)
    assert config(engine="async", tensor_parallel_size=2, num_gpus=2).sampler.num_gpus == 2
