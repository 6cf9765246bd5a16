"""launch/kubernetes: the manifests fit the published schemas, say what a run needs, and
their commands train.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from launch.kubernetes import render
from megacore.errors import ConfigError
from megacore.tools.local_ranks import free_port
from tests.commands import run_script
from tests.pool import PATIENCE, ROOT
from tests.training import write_config, write_corpus

ASKED = ["--nodes", "2", "--gpus", "0", "--image", "megacore:1", "--volume", "training", "--name", "run"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config whose corpus lies where the volume will be mounted."""
    (tmp_path / "data").mkdir()
    write_corpus(tmp_path / "data")
    return write_config(
        tmp_path, "data/corpus", train={"steps": 5}, log={"dir": "runs/run"}, checkpoint={"last": False}
    )


def rendered(config: str, *arguments: str) -> list[dict[str, Any]]:
    """The objects of a manifest, read back from what the script prints."""
    done = run_script("launch/kubernetes/render.py", "--config", config, *ASKED, *arguments)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_job_fits_the_schema(config: str, version: str) -> None:
    """Kubernetes would refuse the manifest, or drop a misspelt key silently and train without it."""
    objects = rendered(config, "--gpus", "4", "train.global_batch_size=64")
    assert [thing["kind"] for thing in objects] == ["ConfigMap", "Service", "Job"]
    for thing in objects:
        kubernetes_validate.validate(thing, version, strict=True)
    objects[2]["spec"]["podFailurePolicies"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects[2], version, strict=True)


def test_jobset_holds_the_same_job(config: str) -> None:
    """No schema of a JobSet is at hand: its job is checked as one, and its own keys
    are those of JobSet's v1alpha2.
    """
    settings, jobset = rendered(config, "--kind", "jobset")
    assert (jobset["apiVersion"], jobset["kind"], settings["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        "ConfigMap",
    )
    spec = jobset["spec"]
    assert spec.keys() == {"network", "failurePolicy", "replicatedJobs"}
    assert spec["network"].keys() <= {"enableDNSHostnames", "subdomain", "publishNotReadyAddresses"}
    assert spec["failurePolicy"].keys() == {"maxRestarts", "rules"}
    (nodes,) = spec["replicatedJobs"]
    assert nodes.keys() == {"name", "replicas", "template"} and nodes["template"].keys() == {"spec"}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x"},
        "spec": nodes["template"]["spec"],
    }
    kubernetes_validate.validate(job, "1.31", strict=True)
    assert job["spec"]["backoffLimit"] == 0, (
        "the job would put a pod in a lost one's place, and the JobSet restart nothing"
    )
    (leader,) = (v["value"] for v in container(job)["env"] if v["name"] == "MASTER_ADDR")
    assert leader == "run-nodes-0-0.run", "the name that JobSet gives to the first pod"


def container(job: dict[str, Any]) -> dict[str, Any]:
    """The one container of a job's pods."""
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize(
    ("options", "cpu", "memory", "shared"),
    [
        (["--gpus", "0"], "1", "4Gi", "64Gi"),
        (["--gpus", "4", "train.global_batch_size=64"], "32", "192Gi", "64Gi"),
        (
            ["--gpus", "0", "--cpus", "1.5", "--memory", "6G", "--shared-memory", "500Mi"],
            "1.5",
            "6G",
            "500Mi",
        ),
        (["--gpus", "0", "--memory", "6000000k"], "1", "6000000k", "64Gi"),
    ],
)
def test_pods_ask_for_cores_and_memory(
    config: str, options: list[str], cpu: str, memory: str, shared: str
) -> None:
    """A pod that asks for none is put on a full node, and is the first to be killed there."""
    (_, _, job) = render.manifest(render.parse(["--config", config, *ASKED, *options]))
    assert container(job)["resources"]["requests"] == {"cpu": cpu, "memory": memory}
    (volume,) = (v for v in job["spec"]["template"]["spec"]["volumes"] if v["name"] == "shared-memory")
    assert volume["emptyDir"]["sizeLimit"] == shared
    kubernetes_validate.validate(job, "1.31", strict=True)


def test_statuses_are_told_apart(config: str) -> None:
    """A bad config would be tried again and again, and a run that saved when it was asked
    to stop would count as failed.
    """
    *_, job = rendered(config, "--restarts", "3")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_status = {
        status: rule["action"] for rule in rules for status in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_status == {2: "FailJob", 75: "Ignore"} and job["spec"]["backoffLimit"] == 3 * 2
    service = next(thing for thing in rendered(config) if thing["kind"] == "Service")
    pod = job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items(), (
        "the first pod's name would not resolve"
    )
    assert pod["spec"]["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"


def test_commands_train_as_one_process_does(config: str, tmp_path: Path) -> None:
    """The pods' commands, with the variables that Kubernetes sets, would not start, or
    train each node alone.
    """
    settings, _, job = rendered(config, "--", "train.seed=7")
    (tmp_path / "settings").mkdir()
    for name, text in settings["data"].items():
        (tmp_path / "settings" / name).write_text(text)
    (tmp_path / "launch").symlink_to(ROOT / "launch")  # an image holds the checkout beside data/ and runs/
    port = str(free_port())
    pods = [start(container(job), index, tmp_path, port) for index in range(2)]
    ended = [pod.communicate(timeout=PATIENCE)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], ended
    one = run_script(
        "launch/pretrain.py",
        "--config",
        config,
        "train.seed=7",
        f"data.train={tmp_path}/data/corpus",
        f"log.dir={tmp_path}/one",
    )
    assert one.returncode == 0, one.stderr
    losses = [
        [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "runs" / "run", tmp_path / "one")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 5


def start(found: dict[str, Any], index: int, folder: Path, port: str) -> subprocess.Popen[str]:
    """A pod's command, in a folder that stands for /megacore, with /etc/megacore in it; the
    first pod's name is this machine's.
    """
    own = {variable["name"]: variable["value"] for variable in found["env"]} | {
        "JOB_COMPLETION_INDEX": str(index)
    }
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    command = [re.sub(r"\$\((\w+)\)", lambda match: own[match[1]], part) for part in found["command"]]
    command = [part.replace("/etc/megacore", str(folder / "settings")) for part in command]
    command[0] = str(Path(sys.executable).parent / command[0])
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    } | own
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


WRONG = {
    "ranks": (["parallel.tensor=3"], "parallel.tensor"),
    "log.dir": (["log.dir=/tmp/runs"], "log.dir: /tmp/runs is not on the volume"),
    "corpus": (["data.train=../corpus"], "data.train: ../corpus is not on the volume"),
    "nodes": (["--nodes", "0"], "--nodes: 0 is too few"),
    "name": (["--name", "Run_1"], "--name: 'Run_1' is no name for a job"),
    "memory": (["--memory", "much"], "--memory: 'much' is no size"),
    "thousands": (["--memory", "6000000K"], "--memory: '6000000K' is no size"),  # Kubernetes writes them k
    "shared memory": (["--shared-memory", "64i"], "--shared-memory: '64i' is no size"),
    "nothing": (["--memory", "0Gi"], "--memory: '0Gi' is no size"),
    "cores": (["--cpus", "0"], "--cpus: 0 is no number of cores"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_bad_input_is_one_line(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Pods would be scheduled on every node, to fail there."""
    with pytest.raises(ConfigError) as error:
        render.run(["--config", config, *ASKED, *arguments])
    assert message in str(error.value) and capsys.readouterr().out == ""
