"""Write the Kubernetes manifest of a run: an Indexed Job with a headless Service, or a JobSet."""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

# so that a checkout runs without being installed; an installed script has no such folder
if (Path(__file__).resolve().parents[2] / "megacore").is_dir():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import megacore.tools.cli  # noqa: F401  (first: Ctrl-C counts from here on)
from megacore.config import Config
from megacore.errors import ConfigError
from megacore.files import read_text
from megacore.tools.cli import Parser, add_config, add_overrides, exit_with
from megacore.tools.settings.load import load

EXAMPLE = (
    "python launch/kubernetes/render.py --config configs/gpt_7b.json --nodes 4 --gpus 8 --image megacore:1 "
    "--volume training data.train=data/train"
)
NOTES = (
    "Each pod runs the deepspeed launcher on its node. The image has megacore in /megacore, and the volume, "
    "which all pods can write to, has data/ and runs/. When a pod is lost, all pods restart from the newest "
    "checkpoint. Write the manifest to a file for kubectl apply -f. Needs PyYAML: pip install "
    "'megacore[kubernetes]'."
)
HOME, SETTINGS, PORT = "/megacore", "/etc/megacore", 29500
# of the volume; relative paths in a config then mean there what they mean in a checkout
FOLDERS = ("data", "runs")
GIB = 1 << 30
GRACE_SECONDS = 120  # for a checkpoint, when a pod must go
BAD_CONFIG, STOPPED = 2, 75
TEXT = "tag:yaml.org,2002:str"  # texts of several lines are written as they are


def parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        "Print the Kubernetes manifest of a run, with one pod for each node.",
        example=EXAMPLE,
        notes=NOTES,
        status="0 done, 2 wrong config or arguments",
        page="docs/operations.md",
    )
    add_config(parser, "config of the run, which is checked and copied into the manifest")
    parser.add_argument(
        "--nodes", type=int, required=True, metavar="N", help="number of nodes, with one pod each"
    )
    parser.add_argument(
        "--gpus",
        type=int,
        required=True,
        metavar="N",
        help="GPUs of a node, one rank each; 0 trains on CPUs, with one rank in each pod",
    )
    parser.add_argument("--image", required=True, metavar="NAME", help="container image")
    parser.add_argument(
        "--volume",
        required=True,
        metavar="CLAIM",
        help="PersistentVolumeClaim (ReadWriteMany) that all pods share",
    )
    parser.add_argument(
        "--kind",
        choices=("job", "jobset"),
        default="job",
        help="kind of the manifest; jobset needs the JobSet operator",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the job (default: that of the config)")
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="restarts of the whole job after failures"
    )
    parser.add_argument(
        "--cpus",
        type=float,
        metavar="N",
        help="CPU cores for a pod (default: 8 for each GPU, 1 without GPUs)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory for a pod, such as 64Gi (default: --shared-memory and 32Gi for each GPU; 4Gi without "
        "GPUs)",
    )
    parser.add_argument(
        "--shared-memory",
        default="64Gi",
        metavar="SIZE",
        help="limit of a pod's shared memory, for NCCL and the data loader",
    )
    add_overrides(parser)
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the parsed command line. Raises `ConfigError`."""
    args = parser().parse_intermixed_args(argv)
    args.name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(args.config).stem.lower()).strip("-")
    for option, least in (("nodes", 1), ("gpus", 0), ("restarts", 0)):
        if getattr(args, option) < least:
            raise ConfigError(f"--{option}", f"{getattr(args, option)} is too few", f"{least} or more")
    # of 63 characters some are for what Kubernetes appends
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?", args.name):
        raise ConfigError(
            "--name",
            f"{args.name!r} is no name for a job",
            "letters a-z, digits and -, 42 characters at most",
        )
    args.cpus = 8 * args.gpus or 1 if args.cpus is None else args.cpus
    if not 0.001 <= args.cpus <= 1e6:
        raise ConfigError("--cpus", f"{args.cpus:g} is no number of cores", "such as 8 or 0.5")
    shared = sized("--shared-memory", args.shared_memory)
    args.memory = args.memory or (f"{math.ceil(shared / GIB) + 32 * args.gpus}Gi" if args.gpus else "4Gi")
    sized("--memory", args.memory)
    return args


def sized(option: str, size: str) -> float:
    """The bytes of a size as Kubernetes writes it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:([KMGT])(i)|([kMGT]))?", size, re.ASCII)
    if found is None or float(found[1]) == 0:
        raise ConfigError(option, f"{size!r} is no size", "such as 64Gi")
    return float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(
        (found[2] or found[4] or " ").upper()
    )


def checked(args: argparse.Namespace) -> Config:
    """The resolved config.

    Raises `ConfigError` unless it fits the ranks, and keeps what it writes on the volume.
    """
    config = load(args.config, args.overrides, args.nodes * max(1, args.gpus)).config
    data, checkpoint = config.data, config.checkpoint
    if config.model.is_custom:
        raise ConfigError(
            config.model.custom_key,
            "a manifest holds the text of the config alone",
            "null, or a ConfigMap of your own",
        )
    inside = {
        "log.dir": config.log.dir,
        "data.train": data.train,
        "data.valid": data.valid,
        "checkpoint.mirror": checkpoint.mirror,
    }
    inside |= {"checkpoint.weights": checkpoint.weights}
    inside |= {"data.tokenizer": None if data.tokenizer == "bytes" else data.tokenizer}
    inside |= {"checkpoint.resume": None if checkpoint.resume in ("auto", "never") else checkpoint.resume}
    for key, value in inside.items():
        for path in [value] if isinstance(value, str) else [prefix for _, prefix in value or []]:
            if Path(path).parts[:1] not in [(folder,) for folder in FOLDERS]:
                raise ConfigError(key, f"{path} is not on the volume", "a path below data/ or runs/")
    return config


def training(args: argparse.Namespace, leader: str) -> dict[str, Any]:
    """The container that trains. Kubernetes puts the values of variables in the place of ``$(NAME)``."""
    config = f"{SETTINGS}/{Path(args.config).name}"
    launcher = [
        "deepspeed",
        "--no_ssh",
        "--hostfile",
        f"{SETTINGS}/hostfile",
        "--node_rank",
        "$(JOB_COMPLETION_INDEX)",
    ]
    launcher += ["--master_addr", "$(MASTER_ADDR)", "--master_port", "$(MASTER_PORT)"]
    verbatim = [override.replace("$", "$$") for override in args.overrides]
    mounts = [{"name": "volume", "mountPath": f"{HOME}/{folder}", "subPath": folder} for folder in FOLDERS]
    mounts += [
        {"name": "settings", "mountPath": SETTINGS},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return {
        "name": "megacore",
        "image": args.image,
        "workingDir": HOME,
        "command": [*launcher, "launch/pretrain.py", "--config", config, *verbatim],
        "env": [{"name": "MASTER_ADDR", "value": leader}, {"name": "MASTER_PORT", "value": str(PORT)}],
        "resources": resources(args),
        "volumeMounts": mounts,
    }


def resources(args: argparse.Namespace) -> dict[str, Any]:
    """What a pod asks for.

    It may use more cores and memory where there are more: it has no limits but its GPUs.
    """
    asked = {"requests": {"cpu": f"{args.cpus:g}", "memory": args.memory}}
    return asked | ({"limits": {"nvidia.com/gpu": args.gpus}} if args.gpus else {})


def job(args: argparse.Namespace, leader: str, subdomain: str | None, *, limit: int) -> dict[str, Any]:
    """The spec of an Indexed Job: as many pods as nodes, each on a node of its own.

    `limit`: failed pods that it bears.
    """
    apart = {"labelSelector": {"matchLabels": {"app": args.name}}, "topologyKey": "kubernetes.io/hostname"}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # a pod that ended is replaced: only so the failure policy sees its status
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **({} if subdomain is None else {"subdomain": subdomain}),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [training(args, leader)],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": args.volume}},
            {"name": "settings", "configMap": {"name": args.name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": args.shared_memory}},
        ],
    }
    ended = {"containerName": "megacore", "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": ended | {"values": [BAD_CONFIG]}},
        {"action": "Ignore", "onExitCodes": ended | {"values": [STOPPED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    return {
        "completionMode": "Indexed",
        "completions": args.nodes,
        "parallelism": args.nodes,
        "backoffLimit": limit,
        "podReplacementPolicy": "Failed",  # not while the old one still saves a checkpoint
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"app": args.name}}, "spec": pod},
    }


def manifest(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All objects of the run."""
    try:
        text = read_text(args.config)
    except OSError as error:
        raise ConfigError("--config", f"{args.config}: {error.strerror}", "the path of a config") from None
    hosts = "".join(f"node{i} slots={max(1, args.gpus)}\n" for i in range(args.nodes))
    named = {"metadata": {"name": args.name}}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        **named,
        "data": {Path(args.config).name: text, "hostfile": hosts},
    }
    if args.kind == "jobset":
        leader = f"{args.name}-nodes-0-0.{args.name}"
        replicated = {"name": "nodes", "replicas": 1, "template": {"spec": job(args, leader, None, limit=0)}}
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": args.name},
            # All pods anew, as soon as one has failed; not where the job's own policy has failed it.
            "failurePolicy": {
                "maxRestarts": args.restarts,
                "rules": [
                    {
                        "name": "bad-config",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [replicated],
        }
        return [settings, {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", **named, "spec": spec}]
    # Pods get names in the service's domain before they are ready: ranks look for the first of them while
    # they start.
    domain = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"app": args.name},
        "ports": [{"port": PORT}],
    }
    service = {"apiVersion": "v1", "kind": "Service", **named, "spec": domain}
    spec = job(args, f"{args.name}-0.{args.name}", args.name, limit=args.restarts * args.nodes)
    return [settings, service, {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": spec}]


def run(argv: list[str]) -> int:
    """Everything that the script does."""
    args = parse(argv)
    checked(args)
    objects = manifest(args)
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            "render.py", "PyYAML is not installed", "pip install 'megacore[kubernetes]'"
        ) from None
    yaml.SafeDumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar(TEXT, text, style="|" if "\n" in text else None)
    )
    print(yaml.safe_dump_all(objects, sort_keys=False, width=120), end="")
    return 0


if __name__ == "__main__":
    exit_with(run)
