"""`launch kubernetes`: a run on several hosts as a manifest, an Indexed Job with its headless Service or a JobSet.

One pod per host with one process that owns all of its GPUs: jax drives several GPUs from one process, so a pod needs
no launcher inside, gets SIGTERM itself, and ends with the run's own exit code, which the failure policies read. Who it
is, `runtime/world.py` reads from JOB_COMPLETION_INDEX, which Kubernetes sets, and from the variables set here; nothing
asks the cluster's API. Read next: `yaml.py`, `../runtime/exits.py` for the codes.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from openpi_train.launch.spec import DEFAULT_PORT, LaunchError, check_variable
from openpi_train.launch.yaml import dump_all

Json = dict[str, Any]

_CONTAINER = "train"
_REPLICATED_JOB = "hosts"
_GIVE_UP = [2, 3, 4, 5, 6]  # usage, data, checkpoint, numbers, batch: the same would happen again
_GO_ON = [70, 75]  # a peer was lost, or stopped on request after a good save
# Distinguishes jobs, and in a JobSet also attempts: every Job has a uid of its own.
_UID_LABEL = "metadata.labels['batch.kubernetes.io/controller-uid']"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesSpec:
    """A run as Kubernetes is asked for it."""

    name: str
    image: str
    arguments: tuple[str, ...]
    """What follows `python -m openpi_train` in every pod."""
    num_nodes: int
    gpus_per_node: int
    form: str = "job"
    namespace: str | None = None
    port: int = DEFAULT_PORT
    claims: tuple[tuple[str, str], ...] = ()
    """Persistent volume claims and where they are mounted."""
    cpus: str | None = None
    memory: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    service_account: str | None = None
    shared_memory_gib: int = 16
    max_restarts: int = 10
    grace_s: int = 120

    def __post_init__(self):
        # The last part of a pod's host name is its index, and a name of DNS has 63 letters.
        longest = len(self.pod_name(self.num_nodes - 1))
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or longest > 63:
            raise LaunchError(
                f"--name {self.name!r} is not a name for Kubernetes: lower-case letters, digits and '-', a letter "
                f"first, at most {len(self.name) + 63 - longest} of them here"
            )
        if self.num_nodes < 1 or self.gpus_per_node < 0 or self.max_restarts < 0 or self.grace_s < 1:
            raise LaunchError("--nodes and --grace-s must be at least 1, --gpus-per-node and --max-restarts at least 0")
        if not 1 <= self.port <= 65534:
            raise LaunchError(f"--port {self.port} is not from 1 to 65534")
        for variable, _ in self.env:
            check_variable(variable)
        if self.memory is not None and not re.fullmatch(r"[1-9]\d*[KMGTP]i?", self.memory):
            raise LaunchError(f"--memory {self.memory!r} is no amount as Kubernetes writes it: 256Gi")
        mounts = ["/dev/shm", *(path for _, path in self.claims)]
        if twice := [path for path in mounts if mounts.count(path) > 1]:
            raise LaunchError(f"--pvc: {twice[0]} cannot be mounted twice (/dev/shm is there already)")
        _check_arguments(self.arguments)

    def pod_name(self, index: int) -> str:
        """The host name of the pod of this index, which the headless service makes known to the others."""
        job = self.name if self.form == "job" else f"{self.name}-{_REPLICATED_JOB}-0"
        return f"{job}-{index}"


def manifest(spec: KubernetesSpec) -> list[Json]:
    """The objects to create, in order."""
    return [_service(spec), _job(spec)] if spec.form == "job" else [_jobset(spec)]


def _job(spec: KubernetesSpec) -> Json:
    """Pods that fail are replaced one by one. 70 and 75, and evictions, do not count towards --max-restarts."""
    ignored = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_codes(_GO_ON)},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec),
        "spec": _job_spec(spec, backoff_limit=spec.max_restarts, further_rules=ignored),
    }


def _jobset(spec: KubernetesSpec) -> Json:
    """All pods are replaced together, as soon as one fails in a way that another attempt may mend."""
    give_up = {"name": "giveUp", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(spec),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": spec.max_restarts, "rules": [give_up]},
            "replicatedJobs": [
                {
                    "name": _REPLICATED_JOB,
                    "replicas": 1,
                    "template": {"spec": _job_spec(spec, backoff_limit=0, further_rules=[])},
                }
            ],
        },
    }


def _service(spec: KubernetesSpec) -> Json:
    """Gives the pods names; also before they are ready, since they are ready only when they have met."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": spec.name},
            "ports": [
                {"name": "coordinator", "port": spec.port},
                {"name": "rendezvous", "port": spec.port + 1},
            ],
        },
    }


def _job_spec(spec: KubernetesSpec, *, backoff_limit: int, further_rules: list[Json]) -> Json:
    give_up = {"action": "FailJob", "onExitCodes": _exit_codes(_GIVE_UP)}
    return {
        "completionMode": "Indexed",
        "completions": spec.num_nodes,
        "parallelism": spec.num_nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {"rules": [give_up, *further_rules]},
        "template": {"metadata": {"labels": _labels(spec)}, "spec": _pod_spec(spec)},
    }


def _pod_spec(spec: KubernetesSpec) -> Json:
    claims = [(f"claim-{number}", name, path) for number, (name, path) in enumerate(spec.claims)]
    memory = {"medium": "Memory", "sizeLimit": f"{spec.shared_memory_gib}Gi"}
    optional = {"serviceAccountName": spec.service_account, "nodeSelector": dict(spec.node_selector)}
    return {
        "restartPolicy": "Never",  # what podFailurePolicy needs; the Job makes a new pod instead
        "subdomain": spec.name,
        "terminationGracePeriodSeconds": spec.grace_s,
        **{name: value for name, value in optional.items() if value},
        "containers": [
            {
                "name": _CONTAINER,
                "image": spec.image,
                # The process itself is what gets SIGTERM: no shell around it.
                "command": ["python", "-m", "openpi_train", *spec.arguments],
                "env": _environment(spec),
                "ports": [{"containerPort": spec.port}, {"containerPort": spec.port + 1}],
                "resources": _resources(spec),
                "volumeMounts": [
                    {"name": "shared-memory", "mountPath": "/dev/shm"},
                    *({"name": volume, "mountPath": path} for volume, _, path in claims),
                ],
            }
        ],
        "volumes": [
            {"name": "shared-memory", "emptyDir": memory},
            *({"name": volume, "persistentVolumeClaim": {"claimName": name}} for volume, name, _ in claims),
        ],
    }


def _environment(spec: KubernetesSpec) -> list[Json]:
    variables = {
        "OPENPI_TRAIN_NUM_PROCESSES": str(spec.num_nodes),
        "OPENPI_TRAIN_COORDINATOR": f"{spec.pod_name(0)}.{spec.name}:{spec.port}",
        "OPENPI_TRAIN_GRACE_S": str(spec.grace_s),
        "PYTHONUNBUFFERED": "1",
        **({} if spec.gpus_per_node else {"JAX_PLATFORMS": "cpu"}),
        **dict(spec.env),
    }
    token = {"name": "OPENPI_TRAIN_JOB_TOKEN", "valueFrom": {"fieldRef": {"fieldPath": _UID_LABEL}}}
    return [token, *({"name": name, "value": value} for name, value in variables.items())]


def _resources(spec: KubernetesSpec) -> Json:
    """Memory is limited to what is asked for; processor time is not, since data workers can use idle cores."""
    requests = {name: value for name, value in (("cpu", spec.cpus), ("memory", spec.memory)) if value}
    limits = {"memory": spec.memory} if spec.memory else {}
    if spec.gpus_per_node:
        limits["nvidia.com/gpu"] = str(spec.gpus_per_node)
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _metadata(spec: KubernetesSpec) -> Json:
    namespace = {"namespace": spec.namespace} if spec.namespace else {}
    return {"name": spec.name, **namespace, "labels": _labels(spec)}


def _labels(spec: KubernetesSpec) -> Json:
    return {"app.kubernetes.io/name": "openpi-train", "app.kubernetes.io/instance": spec.name}


def _exit_codes(codes: list[int]) -> Json:
    return {"containerName": _CONTAINER, "operator": "In", "values": list(codes)}


def _check_arguments(arguments: tuple[str, ...]) -> None:
    flags = {argument.partition("=")[0] for argument in arguments}
    if not arguments:
        raise LaunchError(
            "nothing to run: put the experiment after --, as in `-- pi0_bridge_traj --exp-name x --resume`"
        )
    if "--overwrite" in flags:
        raise LaunchError("--overwrite: a pod that is restarted would move its own run aside; give --resume instead")
    if "--exp-name" in flags and "--resume" not in flags:
        raise LaunchError("pods are restarted: add --resume after the experiment, which also starts a run that is new")


def add_parser(forms: Any) -> None:
    """Add this form to the `launch` verb's."""
    parser = forms.add_parser("kubernetes", help="a manifest for Kubernetes: an Indexed Job or a JobSet")
    parser.add_argument("--name", required=True, help="name of the job, its service and its pods")
    parser.add_argument("--image", required=True, help="container image with openpi_train installed")
    parser.add_argument("--nodes", type=int, required=True, help="number of hosts: one pod and process on each")
    parser.add_argument("--gpus-per-node", type=int, required=True, help="GPUs of each pod; 0 trains on processors")
    parser.add_argument(
        "--form", choices=("job", "jobset"), default="job", help="jobset needs its controller (%(default)s)"
    )
    parser.add_argument("--namespace", help="(default: that of kubectl)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="coordinator's port; it and the next (%(default)s)"
    )
    parser.add_argument("--pvc", type=_claim, action="append", default=[], metavar="NAME:/MOUNT", help="volume claim")
    parser.add_argument("--cpus", help='processors of each pod, as Kubernetes writes them: "32"')
    parser.add_argument("--memory", help='memory of each pod, with its /dev/shm: "256Gi"')
    parser.add_argument("--env", type=_pair, action="append", default=[], metavar="NAME=VALUE", help="set in every pod")
    parser.add_argument("--node-selector", type=_pair, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--service-account", help="(default: the namespace's; none is needed)")
    parser.add_argument("--shared-memory-gib", type=int, default=16, help="size of /dev/shm (%(default)s)")
    parser.add_argument("--max-restarts", type=int, default=10, help="after failures that may pass (%(default)s)")
    parser.add_argument("--grace-s", type=int, default=120, help="time to save after SIGTERM (%(default)s s)")
    parser.add_argument("--out", type=Path, help="file to write (default: the terminal)")
    parser.add_argument("--apply", action="store_true", help="hand the manifest to `kubectl apply`")
    parser.add_argument("--dry-run", action="store_true", help="only write the manifest, also with --apply")
    parser.set_defaults(launch=launch)


def launch(given: argparse.Namespace, arguments: tuple[str, ...]) -> int:
    """Write the manifest, apply it if asked to, and return the exit code."""
    spec = KubernetesSpec(
        name=given.name,
        image=given.image,
        arguments=arguments,
        num_nodes=given.nodes,
        gpus_per_node=given.gpus_per_node,
        form=given.form,
        namespace=given.namespace,
        port=given.port,
        claims=tuple(given.pvc),
        cpus=given.cpus,
        memory=given.memory,
        env=tuple(given.env),
        node_selector=tuple(given.node_selector),
        service_account=given.service_account,
        shared_memory_gib=given.shared_memory_gib,
        max_restarts=given.max_restarts,
        grace_s=given.grace_s,
    )
    text = dump_all(manifest(spec))
    if not spec.claims:
        sys.stderr.write("launch: no --pvc: what a pod writes, checkpoints too, is lost with the pod\n")
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    if not given.apply or given.dry_run:
        sys.stdout.write("" if given.out else text)
        return 0
    try:
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode
    except FileNotFoundError:
        raise LaunchError(
            "--apply: there is no kubectl here; write the manifest with --out FILE and apply it"
        ) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _claim(text: str) -> tuple[str, str]:
    name, _, path = text.partition(":")
    if not name or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:/MOUNT, a claim and an absolute path")
    return name, path
