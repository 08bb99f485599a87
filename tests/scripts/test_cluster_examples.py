"""The examples for Kubernetes and Slurm, read by the tools they are for where these are installed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stream_grpo.config_file import parse, with_overrides

FOLDER = Path(__file__).parents[2] / "scripts" / "cluster"
KUBERAY, SLURM = FOLDER / "kuberay.yaml", FOLDER / "slurm.sbatch"


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def said(*command: str | Path, given: str | None = None, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)), input=given, capture_output=True, text=True, timeout=60, check=False, **more
    )


def kuberay() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    (found,) = yaml.safe_load_all(KUBERAY.read_text())
    assert isinstance(found, dict)
    return found


def pods() -> list[dict[str, Any]]:
    """The templates of head and workers as pods."""
    cluster = kuberay()["spec"]["rayClusterSpec"]
    templates = [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **template} for template in templates]


def lost(asked: Any, kept: Any, path: str = "") -> list[str]:
    """What of nested values is missing in others, or is another value there."""
    if isinstance(asked, dict) and isinstance(kept, dict):
        return [line for name, value in asked.items() for line in lost(value, kept.get(name), f"{path}.{name}")]
    if isinstance(asked, list) and isinstance(kept, list) and len(asked) == len(kept):
        return [line for i, pair in enumerate(zip(asked, kept, strict=True)) for line in lost(*pair, f"{path}[{i}]")]
    return [] if asked == kept else [path]


def through_kubectl(manifest: dict[str, Any]) -> dict[str, Any]:
    """As kubectl has it in Kubernetes' own types, without a server: a field that they do not have is gone."""
    done = said("kubectl", "set", "env", "--local", "-f", "-", "READ=1", "-o", "json", given=json.dumps(manifest))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    for container in found["spec"]["containers"]:
        container["env"] = [entry for entry in container["env"] if entry["name"] != "READ"]
    return found


@needs("kubectl")
def test_kubectl_reads_the_example_and_knows_every_field_of_its_pods() -> None:
    done = said("kubectl", "label", "--local", "-f", KUBERAY, "read=yes", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["spec"] == kuberay()["spec"]
    assert len(pods()) == 2
    for pod in pods():
        assert lost(pod, through_kubectl(pod)) == []
    wrong = pods()[0]
    wrong["spec"]["containers"][0]["volumeMount"] = []
    assert lost(wrong, through_kubectl(wrong)) == [".spec.containers[0].volumeMount"]


def test_the_cluster_of_the_example_has_the_tokens_and_the_ray_of_this_project() -> None:
    job = kuberay()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    # Without it the operator, which submits the command over HTTP, has no token to be let in by.
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["rayVersion"] == metadata.version("ray")
    mounts = [pod["spec"]["containers"][0]["volumeMounts"] for pod in pods()]
    assert mounts[0] == mounts[1]


def command_of(text: str) -> list[str]:
    words = shlex.split(text)
    return words[words.index("stream-grpo") :]


@pytest.mark.parametrize("example", [KUBERAY, SLURM], ids=["kuberay", "slurm"])
def test_the_settings_of_their_commands_are_known(example: Path) -> None:
    if example is KUBERAY:
        words = command_of(kuberay()["spec"]["entrypoint"])
    else:
        (line,) = [line for line in SLURM.read_text().splitlines() if line.startswith("  stream-grpo ")]
        words = command_of(line)
    assert words[:2] == ["stream-grpo", "train"]
    settings = [word for before, word in pairwise(words) if before == "--set"]
    assert any(setting.startswith("cluster.address=") for setting in settings)
    parse(with_overrides({"model": {"path": "m"}}, settings), source=example.name)


def test_bash_reads_the_script_for_slurm() -> None:
    done = said("bash", "-n", SLURM)
    assert (done.returncode, done.stderr) == (0, "")


@needs("shellcheck")
def test_shellcheck_finds_nothing_in_it() -> None:
    done = said("shellcheck", "--external-sources", SLURM, cwd=FOLDER.parents[1])
    assert (done.returncode, done.stdout) == (0, "")


# Of a cluster that is not there: sbatch parses all options before it looks for the controller.
CONFIGURATION = """ClusterName=nowhere
SlurmctldHost=localhost
SlurmctldPort=1
AuthType=auth/none
CredType=cred/none
GresTypes=gpu
MessageTimeout=1
NodeName=localhost
PartitionName=all Nodes=ALL Default=YES
"""


@needs("sbatch")
@pytest.mark.parametrize(
    ("option", "other", "answer"),
    [
        ("", "", "Unable to contact slurm controller"),
        ("--exclusive", "--exclusif", "unrecognized option '--exclusif'"),
        ("--time=24:00:00", "--time=24hours", "Invalid --time specification"),
    ],
    ids=["as it is", "an unknown option", "a wrong value"],
)
def test_sbatch_takes_its_options(tmp_path: Path, option: str, other: str, answer: str) -> None:
    text = SLURM.read_text()
    assert option in text
    script, configuration = tmp_path / "job.sbatch", tmp_path / "slurm.conf"
    script.write_text(text.replace(option, other) if option else text)
    configuration.write_text(CONFIGURATION)
    done = said("sbatch", "--test-only", script, env={"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/bin"})
    assert answer in done.stderr


@pytest.mark.slow
def test_ray_has_the_options_that_the_script_gives_to_symmetric_run() -> None:
    text = " ".join(SLURM.read_text().replace("\\\n", " ").split())
    call = text.partition("ray symmetric-run ")[2].partition(" -- ")[0]
    options = re.findall(r"--[a-z-]+", call)
    assert options == ["--address", "--min-nodes"]
    shown = said(sys.executable, "-m", "ray.scripts.scripts", "symmetric-run", "--help")
    assert shown.returncode == 0, shown.stderr
    assert [option for option in options if option not in shown.stdout] == []
