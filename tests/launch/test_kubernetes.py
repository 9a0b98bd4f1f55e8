"""Manifests against Kubernetes' published schemas, and against what a process in a pod makes of them."""

import dataclasses
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_failure_policy_rule import JobsetV1alpha2FailurePolicyRule
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from runs.command import ROOT, environment, places
from small_runs import SMALL

from openpi_train.launch import kubernetes, launchers
from openpi_train.launch.kubernetes import Kubernetes, manifest
from openpi_train.launch.processes import free_port
from openpi_train.launch.spec import LaunchError
from openpi_train.runtime.world import WorldFlags, find_world

RUN = ("pi0_bridge_traj", "--exp-name", "x", "--resume")
PLAIN = Kubernetes(name="run", image="registry/trainer:1", arguments=RUN, num_nodes=2, gpus_per_node=8)
FULL = Kubernetes(
    name="run",
    image="registry:5000/team/trainer@sha256:0123",
    arguments=RUN,
    num_nodes=12,
    gpus_per_node=8,
    namespace="robots",
    claims=(("checkpoints", "/checkpoints"), ("data", "/data")),
    cpus="64",
    memory="512Gi",
    env=(("WANDB_MODE", "offline"), ("EMPTY", "")),
    node_selector=(("cloud.google.com/gke-accelerator", "nvidia-h100"), ("on", "yes")),
    service_account="trainer",
    image_pull_secret="registry",
    fs_group=1000,
    run_as_user=1000,
    shared_memory_gib=64,
    max_restarts=3,
    grace_s=300,
)
OPTIONS = "--nodes 2 --gpus-per-node 8 --image registry/trainer:1 --name run --pvc data:/data".split()
# The oldest that ships with the validator and knows podFailurePolicy as stable, and the newest.
VERSIONS = ("1.31", kubernetes_validate.latest_version())


def job_of(spec):
    """The Job that pods come from; of a JobSet, the one that its controller makes."""
    if spec.form == "job":
        return manifest(spec)[-1]
    (replicated,) = manifest(spec)[-1]["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "made"}, **replicated["template"]}


def variables(spec, index):
    """What a process in the pod finds in its environment: ours, and what Kubernetes adds."""
    entries = job_of(spec)["spec"]["template"]["spec"]["containers"][0]["env"]
    environ = {entry["name"]: entry.get("value", "uid-of-the-job") for entry in entries}
    return {**environ, "JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def with_form(spec, form):
    return Kubernetes(**{**vars(spec), "form": form})


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("spec", [PLAIN, FULL, with_form(PLAIN, "jobset"), with_form(FULL, "jobset")])
def test_manifest_fits_the_published_schemas(spec, version):
    secret, *others = manifest(spec)
    for document in [secret, *(others if spec.form == "job" else [job_of(spec)])]:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schemas_do_refuse_a_wrong_manifest():
    job = job_of(PLAIN)
    job["spec"]["completionMod"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError, match="completionMod"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def jobset_of(spec):
    """The JobSet without the pods, which are checked as a part of its Job, above."""
    jobset = manifest(with_form(spec, "jobset"))[-1]
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"] = {}
    return jobset


def jobset_as_published(document):
    """The JobSet as far as its published models know it: fields that they do not know are gone."""
    known = JobsetV1alpha2JobSet.from_dict(document)
    return known.to_dict() if known else {}


@pytest.mark.parametrize("spec", [PLAIN, FULL])
def test_the_jobset_fits_its_published_models(spec):
    jobset = jobset_of(spec)
    assert jobset_as_published(jobset) == jobset
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    # The models have the values that the cluster allows in words only.
    allowed = (JobsetV1alpha2FailurePolicyRule.model_fields["action"].description or "").partition("Valid values")[2]
    assert rule["action"] in re.findall(r"\w+", allowed)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("spec", "replicatedJob"),
        ("spec network", "publishNotReadyAddress"),
        ("spec failurePolicy", "maxRestart"),
        ("spec failurePolicy rules 0", "onJobFailureReason"),
        ("spec replicatedJobs 0", "replica"),
        ("spec replicatedJobs 0 template", "specs"),
    ],
)
def test_the_published_models_do_refuse_a_wrong_jobset(path, name):
    jobset = inner = jobset_of(PLAIN)
    for key in path.split():
        inner = inner[int(key)] if key.isdecimal() else inner[key]
    inner[name] = inner.pop(next(known for known in inner if name[:-1] in known))
    assert jobset_as_published(jobset) != jobset


@pytest.mark.parametrize(("name", "value"), [("maxRestarts", "3"), ("rules", "none")])
def test_the_published_models_do_refuse_a_value_of_another_type(name, value):
    jobset = jobset_of(PLAIN)
    jobset["spec"]["failurePolicy"][name] = value
    with pytest.raises((ValueError, AttributeError)):
        jobset_as_published(jobset)


@pytest.mark.parametrize("form", ["job", "jobset"])
@pytest.mark.parametrize("index", [0, 11])
def test_a_process_in_a_pod_finds_its_place(form, index):
    spec = with_form(FULL, form)
    world = find_world(WorldFlags(), variables(spec, index))
    assert (world.source, world.process_index, world.process_count) == ("kubernetes", index, 12)
    assert (world.local_index, world.local_count) == (0, 1), "one process owns all GPUs of a pod"
    assert world.token == "uid-of-the-job"
    # The name under which DNS knows the first pod: <job>-<index>.<subdomain>, as Kubernetes and JobSet make them.
    job = {"job": "run", "jobset": "run-hosts-0"}[form]
    assert world.coordinator == f"{job}-0.run:29500"
    assert job_of(spec)["spec"]["template"]["spec"]["subdomain"] == "run"


def test_the_service_is_headless_and_selects_the_jobs_pods_before_they_are_ready():
    service = manifest(PLAIN)[-2]["spec"]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert service["selector"] == {"batch.kubernetes.io/job-name": "run"}
    assert [port["port"] for port in service["ports"]] == [29500]


def test_the_pods_of_a_jobset_have_names_before_they_are_ready():
    """They are ready only when they have met; JobSet itself makes the service, of this name."""
    network = manifest(with_form(PLAIN, "jobset"))[-1]["spec"]["network"]
    assert network == {"enableDNSHostnames": True, "subdomain": "run", "publishNotReadyAddresses": True}


# What the "restricted" level of Kubernetes' pod security standards asks of a pod, and of its containers.
RESTRICTED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
RESTRICTED_CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_pods_fit_the_restricted_level_of_pod_security(form):
    pod = job_of(with_form(PLAIN, form))["spec"]["template"]["spec"]
    assert pod["securityContext"] == RESTRICTED
    assert [container["securityContext"] for container in pod["containers"]] == [RESTRICTED_CONTAINER]
    assert pod["automountServiceAccountToken"] is False
    assert {kind for volume in pod["volumes"] for kind in volume} <= {"name", "emptyDir", "persistentVolumeClaim"}
    assert "hostNetwork" not in pod


def test_root_and_a_service_account_are_asked_for():
    spec = dataclasses.replace(PLAIN, run_as_user=0, service_account="trainer")
    pod = job_of(spec)["spec"]["template"]["spec"]
    assert pod["securityContext"] == {**RESTRICTED, "runAsNonRoot": False, "runAsUser": 0}
    assert "automountServiceAccountToken" not in pod


def test_every_option_is_in_the_manifest(capsys):
    options = """--name run --image img --nodes 2 --gpus-per-node 8 --namespace robots --port 4000 --pvc ckpt:/ckpt
        --pvc data:/data --cpus 64 --memory 512Gi --env A=b=c --node-selector kind=h100 --service-account trainer
        --shared-memory-gib 64 --max-restarts 3 --grace-s 300 --form job --image-pull-secret registry --fs-group 1000
        --run-as-user 2000"""
    assert launchers.main(["kubernetes", *options.split(), "--", *RUN]) == 0
    secret, service, job = yaml.safe_load_all(capsys.readouterr().out)
    assert {document["metadata"]["namespace"] for document in (secret, service, job)} == {"robots"}
    assert [port["port"] for port in service["spec"]["ports"]] == [4000]
    sizes = {name: job["spec"][name] for name in ("completions", "parallelism", "backoffLimit")}
    assert sizes == {"completions": 2, "parallelism": 2, "backoffLimit": 60}
    variables = job["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "OPENPI_TRAIN_MAX_RESTARTS", "value": "3"} in variables
    pod = job["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 300 and pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {"kind": "h100"} and pod["imagePullSecrets"] == [{"name": "registry"}]
    group = {"fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}
    assert pod["securityContext"] == {**RESTRICTED, "runAsUser": 2000, **group}
    (container,) = pod["containers"]
    assert container["image"] == "img" and container["command"][-len(RUN) :] == list(RUN)
    assert {"name": "A", "value": "b=c"} in container["env"]
    assert container["resources"] == {
        "requests": {"cpu": "64", "memory": "512Gi"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert {path: volumes[name] for path, name in mounts.items()} == {
        "/dev/shm": {"emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}},
        "/ckpt": {"persistentVolumeClaim": {"claimName": "ckpt"}},
        "/data": {"persistentVolumeClaim": {"claimName": "data"}},
    }


def action(spec, code):
    """What becomes of a pod that ends with `code`, by the first rule that matches; None: it counts as a failure."""
    for rule in job_of(spec)["spec"]["podFailurePolicy"]["rules"]:
        if code in rule.get("onExitCodes", {"values": ()})["values"]:
            return rule["action"]
    return None


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 72, 130])
def test_what_another_attempt_cannot_mend_fails_the_run_at_once(code):
    assert action(PLAIN, code) == "FailJob"
    assert action(with_form(PLAIN, "jobset"), code) == "FailJob"
    (rule,) = manifest(with_form(PLAIN, "jobset"))[-1]["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize("code", [70, 71, 75])
def test_a_lost_peer_and_a_preemption_are_tried_again(code):
    assert action(FULL, code) == "Ignore"
    assert action(with_form(FULL, "jobset"), code) is None, "it fails the Job, and so restarts all pods together"
    jobset = manifest(with_form(FULL, "jobset"))[-1]["spec"]
    assert jobset["failurePolicy"]["maxRestarts"] == 60
    assert job_of(with_form(FULL, "jobset"))["spec"]["backoffLimit"] == 0


def test_other_failures_are_tried_again_a_limited_number_of_times():
    assert action(FULL, 137) is None
    assert job_of(FULL)["spec"]["backoffLimit"] == 60


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_a_pod_knows_how_long_it_has_to_save(form):
    spec = with_form(FULL, form)
    assert variables(spec, 0)["OPENPI_TRAIN_GRACE_S"] == "300"
    assert job_of(spec)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 300


def test_a_pod_on_processors_is_told_so():
    cpu = Kubernetes(**{**vars(PLAIN), "gpus_per_node": 0})
    assert variables(cpu, 0)["JAX_PLATFORMS"] == "cpu"
    assert "resources" in job_of(cpu)["spec"]["template"]["spec"]["containers"][0]
    assert "JAX_PLATFORMS" not in variables(PLAIN, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "Run_1"}, "not a valid Kubernetes name: lower-case"),
        ({"name": "a" * 62}, "at most 61 of them here"),
        ({"fs_group": -1}, "--fs-group -1 is not the number of a group"),
        ({"run_as_user": -1}, "--run-as-user -1 is not the number of a user"),
        ({"name": "a" * 60, "form": "jobset"}, "at most 53 of them here"),
        ({"num_nodes": 0}, "--nodes and --grace-s must be at least 1"),
        ({"port": 65536}, "--port 65536"),
        ({"arguments": ()}, "nothing to run"),
        ({"arguments": (*RUN, "--overwrite")}, "--overwrite: a pod that is restarted"),
        ({"arguments": (*RUN, "--resume-from=best")}, "a pod that is restarted would go back again"),
        ({"arguments": RUN[:3]}, "add --resume"),
        ({"arguments": ("pi0", "--exp-name=x")}, "add --resume"),
        ({"memory": "lots"}, "--memory 'lots' is not in the format of Kubernetes"),
        ({"env": (("A B", "1"),)}, "'A B' is not the name of a variable"),
        ({"env": (("OPENPI_TRAIN_NUM_PROCESSES", "3"),)}, "the launcher sets it for each process"),
        ({"claims": (("a", "/data"), ("b", "/data"))}, "/data cannot be mounted twice"),
        ({"claims": (("a", "/dev/shm"),)}, "/dev/shm cannot be mounted twice"),
    ],
)
def test_what_kubernetes_or_a_restart_would_choke_on_is_refused(changes, message):
    with pytest.raises(LaunchError, match=message):
        Kubernetes(**{**vars(PLAIN), **changes})


def test_a_verb_runs_in_pods_too():
    assert Kubernetes(**{**vars(PLAIN), "arguments": ("doctor",)}).arguments == ("doctor",)


def test_the_command_prints_the_manifest_as_yaml(capsys, monkeypatch):
    monkeypatch.setattr(kubernetes.secrets, "token_hex", lambda size: "ab" * size)
    assert launchers.main(["kubernetes", *OPTIONS, "--", *RUN]) == 0
    out, err = capsys.readouterr()
    expected = Kubernetes(**{**vars(PLAIN), "claims": (("data", "/data"),)})
    assert list(yaml.safe_load_all(out)) == manifest(expected)
    assert err == ""


def test_the_manifest_goes_to_a_file_and_to_kubectl(tmp_path, monkeypatch, capfd):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/applied\nexit 7\n')
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    out = tmp_path / "run.yaml"
    assert launchers.main(["kubernetes", *OPTIONS, "--out", str(out), "--dry-run", "--apply", "--", *RUN]) == 0
    assert not (tmp_path / "applied").exists()
    assert launchers.main(["kubernetes", *OPTIONS, "--out", str(out), "--apply", "--", *RUN]) == 7, (
        "kubectl's own exit code"
    )
    assert (tmp_path / "arguments").read_text() == "apply -f -\n"
    assert (tmp_path / "applied").read_text() == out.read_text()
    assert capfd.readouterr().out == ""


def test_without_kubectl_it_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launchers.main(["kubernetes", *OPTIONS, "--apply", "--", *RUN]) == 2
    assert "kubectl is not installed here; write the manifest with --out FILE" in capsys.readouterr().err


def test_checkpoints_that_die_with_their_pod_are_warned_of(capsys):
    assert launchers.main(["kubernetes", *OPTIONS[:-2], "--", *RUN]) == 0
    assert "no --pvc" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--pvc", "data"), ("--pvc", "data:relative"), ("--env", "=b")])
def test_a_malformed_option_is_named(option, value, capsys):
    with pytest.raises(SystemExit):
        launchers.main(["kubernetes", *OPTIONS, option, value, "--", *RUN])
    assert option in capsys.readouterr().err


@pytest.fixture
def pod(tmp_path):
    """Start a pod's own command line in its own environment; a mount namespace stands in for the cluster's DNS."""
    started: list[subprocess.Popen] = []

    def start(spec: Kubernetes, index: int) -> Path:
        hosts = tmp_path / f"hosts_{index}"
        hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")  # a pod knows its own name, too
        inside = ("unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh")
        if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True).returncode:
            pytest.skip("a private mount needs root")
        python, *words = job_of(spec)["spec"]["template"]["spec"]["containers"][0]["command"]
        assert python == "python"
        with (tmp_path / f"output_{index}").open("wb") as output:
            command = [*inside, sys.executable, *words]
            env = environment(**variables(spec, index))
            started.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=output, stderr=output))
        return hosts

    yield start, started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_pods_of_a_manifest_train_together_although_dns_is_late(pod, tmp_path):
    start, started = pod
    run = (SMALL, *places(tmp_path), "--resume")
    spec = Kubernetes(
        name="run", image="x", arguments=run, num_nodes=2, gpus_per_node=0, port=free_port(), form="jobset"
    )
    names = [start(spec, index) for index in (1, 0)]
    time.sleep(6)  # until both ask for the name, which nobody knows
    for hosts in names:
        with hosts.open("a") as file:
            file.write("127.0.0.1 run-hosts-0-0.run\n")
    outputs = [tmp_path / f"output_{index}" for index in (1, 0)]
    codes = [process.wait(timeout=600) for process in started]
    assert codes == [0, 0], "\n".join(output.read_text()[-3000:] for output in outputs)
    results = json.loads((tmp_path / "runs" / "small" / "x" / "results.json").read_text())
    environment_json = json.loads((tmp_path / "runs" / "small" / "x" / "environment.json").read_text())
    (begin,) = environment_json["starts"]
    assert results["summary"]["checkpoints"] and begin["process_count"] == 2
    assert begin["collectives"]["devices"] == 2


SECRETS = ("--env", "WANDB_API_KEY", "--env", "WANDB_MODE=online", "--env", "HF_TOKEN")


def written(capsys, *options):
    assert launchers.main(["kubernetes", *OPTIONS, "--no-check", *options, "--", *RUN]) == 0
    out, err = capsys.readouterr()
    documents = list(yaml.safe_load_all(out))
    return documents, documents[-1]["spec"]["template"]["spec"]["containers"][0]["env"], out, err


def test_a_variable_by_its_name_comes_from_a_secret_and_not_from_here(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    documents, env, out, err = written(capsys, *SECRETS, "--namespace", "robots")
    entries = {entry["name"]: entry for entry in env}
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        assert entries[name] == {"name": name, "valueFrom": {"secretKeyRef": {"name": "run-env", "key": name}}}
    assert entries["WANDB_MODE"]["value"] == "online" and "0123456789" * 4 not in out + err
    command = 'kubectl create secret generic run-env --namespace robots --from-literal=WANDB_API_KEY="$WANDB_API_KEY"'
    assert f'{command} --from-literal=HF_TOKEN="$HF_TOKEN"\n' in err and "manifest:" not in err
    for document in documents:
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)
    _, env, _, _ = written(capsys, *SECRETS, "--env-secret", "our.keys")
    assert {entry["valueFrom"]["secretKeyRef"]["name"] for entry in env if "valueFrom" in entry} >= {"our.keys"}


def test_a_secret_by_its_value_is_told(capsys):
    *_, err = written(capsys, "--env", "WANDB_API_KEY=abc", "--env", "TOKENIZERS_PARALLELISM=false")
    assert err.count("puts its value into the manifest") == 1 and "--env WANDB_API_KEY=... puts" in err


@pytest.mark.parametrize("words", [("--env", "=x"), ("--env", "A B"), ("--env", "RANK"), ("--env-secret", "No_Name")])
def test_what_names_no_variable_and_no_secret_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ending:
        raise SystemExit(launchers.main(["kubernetes", *OPTIONS, "--no-check", *words, "--", *RUN]))
    assert ending.value.code == 2 and words[0] in capsys.readouterr().err


@pytest.mark.parametrize("form", ["job", "jobset"])
def test_each_manifest_has_a_token_of_its_own_in_a_secret(form):
    secrets = [manifest(with_form(PLAIN, form))[0] for _ in range(2)]
    values = [secret["stringData"]["token"] for secret in secrets]
    assert len(set(values)) == 2 and all(len(value) == 32 for value in values)
    assert len({secret["metadata"]["name"] for secret in secrets}) == 2, "a job that runs keeps its own"
    secret, *_, last = manifest(with_form(PLAIN, form))
    name, value = secret["metadata"]["name"], secret["stringData"]["token"]
    assert f"'secretKeyRef': {{'name': '{name}', 'key': 'token'}}" in str(last) and value not in str(last)


def test_a_token_of_the_users_own_takes_its_place(capsys):
    documents, env, _, _ = written(capsys, "--env", "OPENPI_TRAIN_JOB_TOKEN")
    assert [document["kind"] for document in documents] == ["Service", "Job"]
    (entry,) = [entry for entry in env if entry["name"] == "OPENPI_TRAIN_JOB_TOKEN"]
    assert entry["valueFrom"]["secretKeyRef"] == {"name": "run-env", "key": "OPENPI_TRAIN_JOB_TOKEN"}


def test_a_written_manifest_is_its_owners_alone(tmp_path):
    file = tmp_path / "run.yaml"
    assert launchers.main(["kubernetes", *OPTIONS, "--no-check", "--out", str(file), "--", *RUN]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
