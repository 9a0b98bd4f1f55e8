"""`launch kubernetes`: a run on several hosts as a manifest, an Indexed Job with its headless Service or a JobSet.

One pod per host with one process that owns all of its GPUs: jax drives several GPUs from one process, so a pod needs
no launcher inside, gets SIGTERM itself, and ends with the run's own exit code, which the failure policies read.
`runtime/world.py` identifies the process by JOB_COMPLETION_INDEX, which Kubernetes sets, and by the variables set here;
the cluster's API is not used. Read next: `yaml.py`, `../faults.py` for the codes.
"""

import argparse
import dataclasses
import re
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

from openpi_train import faults
from openpi_train.faults import Restart
from openpi_train.launch.options import Launch, option
from openpi_train.launch.preflight import require_start
from openpi_train.launch.spec import (
    DEFAULT_PORT,
    LaunchError,
    check_arguments,
    check_port,
    check_variable,
    without_going_back,
)
from openpi_train.launch.status import MAX_RESTARTS_VARIABLE
from openpi_train.launch.yaml import dump_all

Json = dict[str, Any]

_CONTAINER = "train"
# The run counts the restarts in a row without progress itself (`training/crash_loop.py`), and ends when they are too
# many. Kubernetes counts over the run's whole life, also pods that are killed before the run is open.
_KILLS_PER_RESTART = 20
_REPLICATED_JOB = "hosts"
_GIVE_UP = faults.codes_with(Restart.NEVER, Restart.FEWER_HOSTS)  # the same would happen again
_GO_ON = faults.codes_with(Restart.SAME_HOSTS, Restart.OTHER_HOSTS)
_TOKEN_VARIABLE, _TOKEN_KEY = "OPENPI_TRAIN_JOB_TOKEN", "token"
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|AUTH|JWT|COOKIE)$|SECRET|PASSW|CREDENTIAL")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=VALUE nor NAME")
    return name, value if equals else None


def _claim(text: str) -> tuple[str, str]:
    name, _, path = text.partition(":")
    if not name or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:/MOUNT, a claim and an absolute path")
    return name, path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kubernetes(Launch):
    """A manifest for Kubernetes: an Indexed Job or a JobSet."""

    name: str = option("name of the job, its service and its pods")
    image: str = option("container image with openpi_train installed")
    image_pull_secret: str | None = option("secret of the image's registry, in the namespace", None)
    num_nodes: int = option("number of hosts: one pod and process on each", flags=["--nodes"], metavar="NODES")
    gpus_per_node: int = option("GPUs of each pod; 0 trains on CPUs")
    form: str = option("jobset needs its controller (%(default)s)", "job", choices=("job", "jobset"))
    namespace: str | None = option("(default: that of kubectl)", None)
    port: int = option("coordinator's port (%(default)s)", DEFAULT_PORT)
    claims: tuple[tuple[str, str], ...] = option(
        "volume claim", (), flags=["--pvc"], type=_claim, metavar="NAME:/MOUNT"
    )
    fs_group: int | None = option("group that may write to the volumes; of our Dockerfile's image: 1000", None)
    run_as_user: int | None = option(
        "user of the pods' processes, 0 for root; needed if the image's user is a name or root", None
    )
    cpus: str | None = option('CPUs of each pod, in the format of Kubernetes: "32"', None)
    memory: str | None = option('memory of each pod, including /dev/shm: "256Gi"', None)
    env: tuple[tuple[str, str | None], ...] = option(
        "set in every pod; NAME alone: from the secret of --env-secret, and the manifest does not hold it",
        (),
        type=_variable,
        metavar="NAME=VALUE",
    )
    env_secret: str | None = option("secret with the variables of --env NAME (default: <name>-env)", None)
    node_selector: tuple[tuple[str, str], ...] = option(None, (), type=_pair, metavar="KEY=VALUE")
    service_account: str | None = option("(default: the namespace's; none is needed)", None)
    shared_memory_gib: int = option("size of /dev/shm (%(default)s)", 16)
    max_restarts: int = option("restarts in a row without a new checkpoint (%(default)s)", 10)
    grace_s: int = option("time to save after SIGTERM (%(default)s s)", 120)
    out: Path | None = option("file to write (default: the terminal)", None)
    apply: bool = option("pass the manifest to `kubectl apply`", False)
    no_check: bool = option("do not look whether the command line is one that the run takes", False)
    dry_run: bool = option("only write the manifest, also with --apply", False)

    def __post_init__(self):
        # The last part of a pod's host name is its index, and a name of DNS has 63 letters.
        longest = len(self.pod_name(self.num_nodes - 1))
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or longest > 63:
            raise LaunchError(
                f"--name {self.name!r} is not a valid Kubernetes name: lower-case letters, digits and '-', a letter "
                f"first, at most {len(self.name) + 63 - longest} of them here"
            )
        if self.num_nodes < 1 or self.gpus_per_node < 0 or self.max_restarts < 0 or self.grace_s < 1:
            raise LaunchError("--nodes and --grace-s must be at least 1, --gpus-per-node and --max-restarts at least 0")
        if self.fs_group is not None and self.fs_group < 0:
            raise LaunchError(
                f"--fs-group {self.fs_group} is not the number of a group; the image of our Dockerfile has 1000"
            )
        if self.run_as_user is not None and self.run_as_user < 0:
            raise LaunchError(f"--run-as-user {self.run_as_user} is not the number of a user")
        check_port(self.port, "--port")
        for variable, _ in self.env:
            check_variable(variable)
        if self.env_secret is not None and not re.fullmatch(_SUBDOMAIN, self.env_secret):
            raise LaunchError(f"--env-secret {self.env_secret!r} is not the name of a Kubernetes secret")
        if self.memory is not None and not re.fullmatch(r"[1-9]\d*[KMGTP]i?", self.memory):
            raise LaunchError(f"--memory {self.memory!r} is not in the format of Kubernetes: 256Gi")
        mounts = ["/dev/shm", *(path for _, path in self.claims)]
        if twice := [path for path in mounts if mounts.count(path) > 1]:
            raise LaunchError(f"--pvc: {twice[0]} cannot be mounted twice (/dev/shm is there already)")
        _check_arguments(self.arguments)

    def pod_name(self, index: int) -> str:
        """The host name of the pod of this index, which the headless service publishes to the others."""
        job = self.name if self.form == "job" else f"{self.name}-{_REPLICATED_JOB}-0"
        return f"{job}-{index}"

    @property
    def given(self) -> dict[str, str]:
        """The variables that were given with a value."""
        return {name: value for name, value in self.env if value is not None}

    @property
    def from_secret(self) -> list[str]:
        """The variables whose values are in the secret `secret_name`."""
        return [name for name, value in self.env if value is None]

    @property
    def secret_name(self) -> str:
        """The secret with the variables that were given by name."""
        return self.env_secret or f"{self.name}-env"

    def _tell_secrets(self) -> None:
        """Tell how the secret is made, and which values in the manifest look like one."""
        if self.from_secret:
            namespace = f" --namespace {self.namespace}" if self.namespace else ""
            values = " ".join(f'--from-literal={name}="${name}"' for name in self.from_secret)
            sys.stderr.write(
                f"launch: the pods wait for the secret {self.secret_name}: kubectl create secret generic "
                f"{self.secret_name}{namespace} {values}\n"
            )
        for name in filter(_SECRET_NAME.search, self.given):
            sys.stderr.write(f"launch: --env {name}=... puts its value into the manifest: --env {name} does not\n")

    def launch(self) -> int:
        """Write the manifest, apply it if asked to, and return the exit code."""
        if not self.no_check and not self.dry_run:
            devices = self.num_nodes * max(self.gpus_per_node, 1)
            require_start(self.arguments, num_devices=devices, env=self.given, has_files=False)
        text = dump_all(manifest(self))
        self._tell_secrets()
        if not self.claims:
            sys.stderr.write("launch: no --pvc: everything a pod writes, even checkpoints, is lost with the pod\n")
        if self.out:
            _write(self.out, text)
        if not self.apply or self.dry_run:
            sys.stdout.write("" if self.out else text)
            return 0
        try:
            return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode
        except FileNotFoundError:
            raise LaunchError(
                "--apply: kubectl is not installed here; write the manifest with --out FILE and apply it"
            ) from None


def manifest(spec: Kubernetes) -> list[Json]:
    """The objects to create, in order. Each manifest has a new token for the pods, which nobody can guess."""
    # Its name is new, too: a manifest that is applied to a job that runs leaves that job's token as it is.
    token = None if _TOKEN_VARIABLE in dict(spec.env) else f"{spec.name}-token-{secrets.token_hex(4)}"
    first = [_token_secret(spec, token)] if token else []
    return [*first, _service(spec), _job(spec, token)] if spec.form == "job" else [*first, _jobset(spec, token)]


def _token_secret(spec: Kubernetes, token: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**_metadata(spec), "name": token},
        "type": "Opaque",
        "immutable": True,
        "stringData": {_TOKEN_KEY: secrets.token_hex(16)},
    }


def _write(file: Path, text: str) -> None:
    """Write the manifest; a new file is its owner's alone, since it holds the token."""
    file.touch(0o600)
    file.write_text(text, encoding="utf-8")


def _job(spec: Kubernetes, token: str | None) -> Json:
    """Pods that fail are replaced one by one. What a restart mends, and evictions, do not count towards --max-restarts:
    the run itself counts the starts that saved nothing new."""
    ignored = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_codes(_GO_ON)},
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(spec),
        "spec": _job_spec(spec, token, backoff_limit=_KILLS_PER_RESTART * spec.max_restarts, further_rules=ignored),
    }


def _jobset(spec: Kubernetes, token: str | None) -> Json:
    """All pods are replaced together, as soon as one fails in a way that a restart may fix."""
    give_up = {"name": "giveUp", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(spec),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": _KILLS_PER_RESTART * spec.max_restarts, "rules": [give_up]},
            "replicatedJobs": [
                {
                    "name": _REPLICATED_JOB,
                    "replicas": 1,
                    "template": {"spec": _job_spec(spec, token, backoff_limit=0, further_rules=[])},
                }
            ],
        },
    }


def _service(spec: Kubernetes) -> Json:
    """The headless service, which gives the pods names even before they are ready (they are ready once all have
    met)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(spec),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": spec.name},
            "ports": [{"name": "coordinator", "port": spec.port}],
        },
    }


def _job_spec(spec: Kubernetes, token: str | None, *, backoff_limit: int, further_rules: list[Json]) -> Json:
    give_up = {"action": "FailJob", "onExitCodes": _exit_codes(_GIVE_UP)}
    return {
        "completionMode": "Indexed",
        "completions": spec.num_nodes,
        "parallelism": spec.num_nodes,
        "backoffLimit": backoff_limit,
        "podFailurePolicy": {"rules": [give_up, *further_rules]},
        "template": {"metadata": {"labels": _labels(spec)}, "spec": _pod_spec(spec, token)},
    }


def _pod_spec(spec: Kubernetes, token: str | None) -> Json:
    claims = [(f"claim-{number}", name, path) for number, (name, path) in enumerate(spec.claims)]
    memory = {"medium": "Memory", "sizeLimit": f"{spec.shared_memory_gib}Gi"}
    optional: Json = {
        "serviceAccountName": spec.service_account,
        "nodeSelector": dict(spec.node_selector),
        "imagePullSecrets": [{"name": name} for name in (spec.image_pull_secret,) if name],
        "automountServiceAccountToken": None if spec.service_account else False,  # the cluster's API is not used
        "securityContext": _security(spec),
    }
    return {
        "restartPolicy": "Never",  # required by podFailurePolicy; the Job makes a new pod instead
        "subdomain": spec.name,
        "terminationGracePeriodSeconds": spec.grace_s,
        **{name: value for name, value in optional.items() if value or value is False},
        "containers": [
            {
                "name": _CONTAINER,
                "image": spec.image,
                # No shell around the process, so that SIGTERM reaches it.
                "command": ["python", "-m", "openpi_train", *spec.arguments],
                "env": _environment(spec, token),
                "ports": [{"containerPort": spec.port}],
                "resources": _resources(spec),
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
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


def _environment(spec: Kubernetes, token: str | None) -> list[Json]:
    variables = {
        "OPENPI_TRAIN_NUM_PROCESSES": str(spec.num_nodes),
        "OPENPI_TRAIN_COORDINATOR": f"{spec.pod_name(0)}.{spec.name}:{spec.port}",
        "OPENPI_TRAIN_GRACE_S": str(spec.grace_s),
        MAX_RESTARTS_VARIABLE: str(spec.max_restarts),
        "PYTHONUNBUFFERED": "1",
        **({} if spec.gpus_per_node else {"JAX_PLATFORMS": "cpu"}),
        **spec.given,
    }
    return [
        *([_from_secret(_TOKEN_VARIABLE, token, _TOKEN_KEY)] if token else []),
        *(_from_secret(name, spec.secret_name, name) for name in spec.from_secret),
        *({"name": name, "value": value} for name, value in variables.items()),
    ]


def _from_secret(variable: str, secret: str, key: str) -> Json:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _security(spec: Kubernetes) -> Json:
    """No root, the runtime's own list of system calls; and a group that may write to volumes.

    A new volume belongs to root, and an image's own user writes to it as a member of this group alone.
    """
    found: Json = {"runAsNonRoot": spec.run_as_user != 0, "seccompProfile": {"type": "RuntimeDefault"}}
    if spec.run_as_user is not None:
        found["runAsUser"] = spec.run_as_user
    if spec.fs_group is not None:
        # Of a volume that has the group already, the files are not visited one by one at each start.
        found |= {"fsGroup": spec.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return found


def _resources(spec: Kubernetes) -> Json:
    """Memory is limited to the request; CPU time is not, since data workers can use idle cores."""
    requests = {name: value for name, value in (("cpu", spec.cpus), ("memory", spec.memory)) if value}
    limits = {"memory": spec.memory} if spec.memory else {}
    if spec.gpus_per_node:
        limits["nvidia.com/gpu"] = str(spec.gpus_per_node)
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _metadata(spec: Kubernetes) -> Json:
    namespace = {"namespace": spec.namespace} if spec.namespace else {}
    return {"name": spec.name, **namespace, "labels": _labels(spec)}


def _labels(spec: Kubernetes) -> Json:
    return {"app.kubernetes.io/name": "openpi-train", "app.kubernetes.io/instance": spec.name}


def _exit_codes(numbers: list[int]) -> Json:
    return {"containerName": _CONTAINER, "operator": "In", "values": list(numbers)}


def _check_arguments(arguments: tuple[str, ...]) -> None:
    flags = {argument.partition("=")[0] for argument in arguments}
    check_arguments(arguments)
    if "--overwrite" in flags:
        raise LaunchError("--overwrite: a pod that is restarted would move its own run aside; give --resume instead")
    if (point := without_going_back(arguments)[1]) is not None:
        raise LaunchError(
            f"--resume-from {point}: a pod that is restarted would go back again; begin another run there: --exp-name "
            "NEW --resume-from <path of the checkpoint> --resume"
        )
    if "--exp-name" in flags and "--resume" not in flags:
        raise LaunchError("pods are restarted: add --resume after the experiment; it also starts new runs")
