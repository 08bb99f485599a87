"""Which node each process goes to, and what a cluster is asked to reserve."""

from typing import Any

import pytest

from stream_grpo.config import Config
from stream_grpo.config_file import parse, to_toml
from stream_grpo.errors import ConfigError
from stream_grpo.placement import Group, Place, groups, place_of, sentences

HOME = "10.0.0.1"
COLOCATED = {"cluster": {"colocate": True}, "sampler": {"num_gpus": 0.5}, "learner": {"num_gpus": 0.5}}


def config(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "evaluation": {"interval": 0}, **sections}
    return parse(tree, "test")


def test_a_local_ray_reserves_nothing() -> None:
    local = config(sampler={"num_samplers": 2}, learner={"num_ranks": 2})
    assert groups(local, HOME) == {}
    assert place_of(local, "sampler-1") is None
    assert list(sentences(local))[:2] == [
        "Ray: a local one",
        "buffer, curator: this machine; sockets on loopback",
    ]


def test_on_a_cluster_ranks_keep_together_and_samplers_are_spread() -> None:
    found = config(
        cluster={"address": "10.0.0.1:6379"},
        sampler={"num_samplers": 3, "num_gpus": 2, "tensor_parallel_size": 2, "engine": "async", "num_threads": 4},
        learner={"num_ranks": 2, "num_threads": 8},
    )
    assert groups(found, HOME) == {
        "learner": Group(role="learner", strategy="STRICT_PACK", bundles=({"CPU": 8, "node:10.0.0.1": 0.001},) * 2),
        "samplers": Group(role="samplers", strategy="SPREAD", bundles=({"CPU": 4, "GPU": 2},) * 3),
    }
    assert place_of(found, "learner-1") == Place("learner", 1)
    assert place_of(found, "sampler-2") == Place("samplers", 2)
    assert place_of(found, "buffer") is None
    packed = config(cluster={"address": "10.0.0.1:6379", "samplers": "pack"})
    assert groups(packed, HOME)["samplers"].strategy == "PACK"
    said = "\n".join(sentences(found))
    assert "samplers: 3 x (4 CPU, 2 GPU) over the cluster, spread, 2 workers each" in said
    assert "learner: 2 x (8 CPU) on the node of the command, ZeRO 1" in said


def test_ranks_go_over_nodes_where_asked_and_the_first_stays_with_the_command() -> None:
    spread = config(cluster={"address": "10.0.0.1:6379", "learner": "spread"}, learner={"num_ranks": 3, "num_gpus": 1})
    first, *others = groups(spread, HOME)["learner"].bundles
    assert first == {"CPU": 1, "GPU": 1, "node:10.0.0.1": 0.001}
    assert others == [{"CPU": 1, "GPU": 1}] * 2
    assert groups(spread, HOME)["learner"].strategy == "SPREAD"
    assert place_of(spread, "learner-2") == Place("learner", 2)
    said = "learner: 3 x (1 CPU, 1 GPU) over the cluster, spread, the first on the node of the command, ZeRO 1"
    assert said in sentences(spread)


def test_with_colocation_the_first_sampler_is_in_the_bundle_of_the_learner() -> None:
    shared = config(cluster={"colocate": True}, sampler={"num_samplers": 2, "num_gpus": 0.5}, learner={"num_gpus": 0.5})
    found = groups(shared, HOME)
    assert found["learner"].bundles == ({"CPU": 2, "GPU": 1, "node:10.0.0.1": 0.001},)
    assert found["samplers"].bundles == ({"CPU": 1, "GPU": 0.5},)
    assert [place_of(shared, name) for name in ("learner", "sampler-0", "sampler-1")] == [
        Place("learner", 0),
        Place("learner", 0),
        Place("samplers", 0),
    ]
    alone = config(cluster={"colocate": True}, sampler={"num_gpus": 0.5}, learner={"num_gpus": 0.5})
    assert groups(alone, HOME).keys() == {"learner"}


def test_the_sampler_that_evaluates_is_where_the_folder_of_the_run_is() -> None:
    away = {"address": "10.0.0.1:6379", "node_root": "/scratch"}
    found = config(cluster=away, sampler={"num_samplers": 2}, evaluation={"interval": 25})
    assert groups(found, HOME)["samplers"].bundles == ({"CPU": 1, "node:10.0.0.1": 0.001}, {"CPU": 1})
    assert "the first sampler, which evaluates during training, is on the node of the command" in sentences(found)
    # Where all nodes see the folder, and where nothing is evaluated, it may be anywhere.
    shared = config(cluster={"address": "10.0.0.1:6379"}, sampler={"num_samplers": 2}, evaluation={"interval": 25})
    never = config(cluster=away, sampler={"num_samplers": 2})
    assert [groups(run, HOME)["samplers"].bundles for run in (shared, never)] == [({"CPU": 1},) * 2] * 2


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"cluster": {"server_node": "10.0.0.2"}}, "without cluster.address: a local Ray has one node"),
        ({"cluster": {"node_root": "/scratch"}}, "without cluster.address: a local Ray has one node"),
        ({"cluster": {"address": "ray://10.0.0.1:10001"}}, "the command itself must run on a node of the cluster"),
        (
            {"cluster": {"address": "a:1", "node_root": "/scratch", "server_node": "10.0.0.2"}},
            "buffer and curator need the run's folder",
        ),
        ({"cluster": {"address": "a:1", "node_root": "scratch"}}, "use an absolute path"),
        ({"cluster": {"address": "a:1", "learner": "pack"}}, "with learner.num_ranks = 1: the first rank stays"),
        (
            {"cluster": {"learner": "spread"}, "learner": {"num_ranks": 2}},
            "without cluster.address: a local Ray has one node",
        ),
        (
            {
                "cluster": {"address": "a:1", "node_root": "/scratch", "learner": "pack"},
                "learner": {"num_ranks": 2},
            },
            "every rank writes its part of a checkpoint into the run's folder",
        ),
        ({"cluster": {"colocate": True}}, "the two are shares of one GPU"),
        (
            {"cluster": {"colocate": True}, "sampler": {"num_gpus": 1}, "learner": {"num_gpus": 1}},
            "the two are shares of one GPU",
        ),
        (
            {**COLOCATED, "evaluation": {"files": ["heldout.jsonl"], "interval": 0}},
            "cluster.colocate = true with an evaluation before and after training",
        ),
        (
            {
                **COLOCATED,
                "evaluation": {"guards": [{"name": "a", "files": ["a.jsonl"]}], "interval": 0},
            },
            "cluster.colocate = true with an evaluation before and after training",
        ),
        ({"cluster": {"adress": "a:1"}}, "did you mean cluster.address"),
    ],
)
def test_what_cannot_work_together_is_refused(sections: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config(**sections)
    assert reason in str(refused.value)


def test_colocation_goes_with_held_out_problems_that_are_scored_during_training_alone() -> None:
    evaluation = {"files": ["heldout.jsonl"], "num_problems": 0, "interval": 25}
    assert config(**COLOCATED, evaluation=evaluation).cluster.colocate


def test_the_section_ray_is_another_name_for_the_address() -> None:
    assert config(ray={"address": "a:1"}) == config(cluster={"address": "a:1"})
    assert config(ray={}) == config()
    assert "[ray]" not in to_toml(config(ray={"address": "a:1"}))
    with pytest.raises(ConfigError, match="unknown key ray"):
        config(ray={"port": 1})
    with pytest.raises(ConfigError, match=r"cluster = 3: expected a section"):
        parse({"model": {"path": "m"}, "ray": {"address": "a:1"}, "cluster": 3}, "test")
