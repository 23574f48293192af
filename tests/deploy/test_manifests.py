"""Checks of deploy/ that need no cloud: schemas, and each command parsed by the program that will run it."""

import json
import os
import re
import shlex
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from ray.autoscaler._private.util import prepare_config, validate_config

from precompute.config import PrecomputeConfig
from shards.base.config import load_config, load_from_args
from tests.deploy.crds import MANIFESTS, problems, strict
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGE = "latentmill:" + metadata.version("latentmill")


def manifest(name: str) -> Any:
    """Load a manifest of deploy/kubernetes."""
    return yaml.safe_load((MANIFESTS / name).read_text())


def values_of(tree: Any, key: str) -> list[Any]:
    """Return every value of that key, at any depth."""
    if isinstance(tree, list):
        return [value for item in tree for value in values_of(item, key)]
    if not isinstance(tree, dict):
        return []
    here = [tree[key]] if key in tree else []
    return here + [value for item in tree.values() for value in values_of(item, key)]


def precompute_config(words: list[str]) -> PrecomputeConfig:
    """Parse the config of `python -m precompute --config FILE …`."""
    assert words[:4] == ["python", "-m", "precompute", "--config"]
    return load_config(PrecomputeConfig, str(ROOT / words[4]), words[5:], "precompute", "")


def test_ray_accepts_the_cluster_and_its_job() -> None:
    """Validate with the function that `ray up` calls before it contacts the cloud."""
    config = prepare_config(yaml.safe_load((DEPLOY / "ray" / "aws.yaml").read_text()))
    validate_config(config)
    workers = config["available_node_types"]["gpu"]
    assert (workers["min_workers"], workers["max_workers"]) == (0, 16)
    # Ray's default image has Python 3.6, and its default profile is for the head only
    assert all("ImageId" in node["node_config"] for node in config["available_node_types"].values())
    assert "IamInstanceProfile" in workers["node_config"]
    with pytest.raises(Exception, match="max_worker"):
        validate_config(config | {"max_worker": 1})


def test_pods_are_the_image_of_this_version_and_not_root() -> None:
    for path in MANIFESTS.glob("*.yaml"):
        tree = manifest(path.name)
        assert set(values_of(tree, "image")) <= {IMAGE}, path
        assert len(values_of(tree, "containers")) == len(values_of(tree, "securityContext")), path
        assert all(context == {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}
                   for context in values_of(tree, "securityContext")), path  # fmt: skip


def test_the_cluster_is_of_the_ray_in_the_image_and_scales_from_nothing() -> None:
    spec = manifest("raycluster.yaml")["spec"]
    locked = re.search(r"^ray\[?.*==([\d.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked is not None and spec["rayVersion"] == locked[1]
    assert spec["authOptions"] == {"mode": "token"} and spec["enableInTreeAutoscaling"]
    (workers,) = spec["workerGroupSpecs"]
    assert workers["minReplicas"] == 0 < workers["maxReplicas"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    defaults = PrecomputeConfig.model_fields["workers"].annotation()  # type: ignore[misc]
    assert limits["cpu"] >= limits["nvidia.com/gpu"] * defaults.num_cpus  # otherwise GPUs would be idle


def test_the_rayjob_asks_for_what_stage_1_understands() -> None:
    job = manifest("rayjob.yaml")["spec"]
    assert job["clusterSelector"]["ray.io/cluster"] == manifest("raycluster.yaml")["metadata"]["name"]
    config = precompute_config(shlex.split(job["entrypoint"]))
    assert (config.shards, str(config.output)) == ("all", "s3://bucket/latents")


def test_the_jobset_launches_what_stage_2_understands() -> None:
    tree = manifest("jobset.yaml")
    (job,) = tree["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "train.launch"]
    words = [word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in container["args"]]
    flags, trainer = words[: words.index("-m")], words[words.index("-m") + 2 :]
    launched = launch_command_parser().parse_args([*flags, "-m", "train"])
    nodes, gpus = spec["completions"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert (launched.num_machines, launched.num_processes, launched.machine_rank) == (nodes, nodes * gpus, 1)
    first_pod = f"{tree['metadata']['name']}-{job['name']}-0-0.{tree['metadata']['name']}"
    assert launched.main_process_ip == first_pod and spec["parallelism"] == nodes
    config = load_from_args(TrainConfig, [f"--config={ROOT / 'configs/phase1.yaml'}", *trainer[1:]], "train", None)
    pod = spec["template"]["spec"]
    (kills_after,) = (float(variable["value"]) for variable in container["env"])
    assert pod["terminationGracePeriodSeconds"] > kills_after == config.checkpoint.grace
    assert str(config.run_dir).startswith("/runs/") and str(config.data.cache).startswith("/tmp/")
    sizes = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in pod["volumes"]}
    assert sizes["cache"] == "2Ti" and 0 < (config.data.cache_limit or 0) < 2 * 2**40


def test_the_jobset_begins_again_on_75_and_not_on_2() -> None:
    """Decide like JobSet: the first rule whose reason and pattern match the Job's failure applies."""
    tree = manifest("jobset.yaml")["spec"]
    (exits, disrupted) = tree["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert exits["onExitCodes"]["values"] == [2, 75] and disrupted["onPodConditions"][0]["type"] == "DisruptionTarget"

    def action(message: str) -> str:
        return next(
            rule["action"]
            for rule in tree["failurePolicy"]["rules"]
            if any(re.search(pattern, message) for pattern in rule.get("onJobFailureMessagePatterns", [""]))
        )

    said = "Container trainer for pod default/latentmill-train-x failed with exit code {} matching FailJob rule"
    assert action(said.format(2)) == "FailJobSet"
    assert action(said.format(75)) == "RestartJobSetAndIgnoreMaxRestarts"
    assert (
        action("Pod default/x has condition DisruptionTarget matching FailJob") == "RestartJobSetAndIgnoreMaxRestarts"
    )


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("slurm/*.sbatch")), ids=lambda path: path.name)
def test_sbatch_scripts_parse(script: Path) -> None:
    found = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30)
    assert found.returncode == 0, found.stderr
    lines = script.read_text().splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])  # sbatch stops reading options at the first command


def run_precompute_script(folder: Path, ray: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run precompute.sbatch with shell scripts in place of Slurm's commands, `ray` and Python."""
    commands = {"srun": 'exec "$@"', "scontrol": "echo node", "ray": ray, "python": 'echo "$@"'}
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(DEPLOY / "slurm/precompute.sbatch"), "--config", "a b.yaml"], text=True, timeout=60, cwd=folder,
        env=variables | {"PATH": path, "PYTHON": str(folder / "python"), "SLURM_NNODES": "1"}, capture_output=True,
    )  # fmt: skip


RUNS_ITS_COMMAND = 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"'


def test_a_stage_1_job_whose_ray_cannot_start_fails(tmp_path: Path) -> None:
    """`ray symmetric-run` itself exits with 0 then."""
    found = run_precompute_script(tmp_path, RUNS_ITS_COMMAND)
    assert (found.returncode, found.stdout) == (0, "-m precompute --config a b.yaml\n"), found.stderr
    found = run_precompute_script(tmp_path, "echo Failed to start Ray")
    assert (found.returncode, found.stdout) == (1, "Failed to start Ray\n"), found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "ray", "scontrol", "srun"]


def test_an_array_job_says_which_of_its_settings_is_missing(tmp_path: Path) -> None:
    array = {"SHARDS": "00000-00099", "TARS_PER_TASK": "30", "SLURM_ARRAY_TASK_ID": "3"}
    found = run_precompute_script(tmp_path, RUNS_ITS_COMMAND, **array)
    assert found.stdout.endswith(" --shards 00090-00099\n"), found.stderr
    for name in ("TARS_PER_TASK", "SLURM_ARRAY_TASK_ID"):
        found = run_precompute_script(tmp_path, RUNS_ITS_COMMAND, **{k: v for k, v in array.items() if k != name})
        assert found.returncode == 2 and "set TARS_PER_TASK and submit an array" in found.stderr
    for wrong in ("7", "all", "00000-00009,00020-00029", "00000-00009 "):
        found = run_precompute_script(tmp_path, RUNS_ITS_COMMAND, **array | {"SHARDS": wrong})
        assert found.returncode == 2
        assert f"SHARDS must be FIRST-LAST, such as 00000-78999, but is '{wrong}'" in found.stderr


def test_what_a_schema_does_not_have_is_found() -> None:
    """tests/deploy/crds.py finds unknown fields and missing schemas."""
    spec = {"type": "object", "required": ["size"], "properties": {"size": {"x-kubernetes-int-or-string": True}}}
    known = {("a/v1", "B"): strict({"type": "object", "properties": {
        "apiVersion": {"type": "string"}, "kind": {"type": "string"}, "spec": spec}})}  # fmt: skip
    sound = {"apiVersion": "a/v1", "kind": "B", "spec": {"size": "1Gi"}}
    assert list(problems(sound, known)) == [] == list(problems(sound | {"spec": {"size": 1}}, known))
    wrong = list(problems(sound | {"spec": {"sizes": [1]}}, known))
    assert any("'sizes' was unexpected" in line for line in wrong) and any("'size' is a required" in w for w in wrong)
    assert json.dumps(list(problems(sound | {"kind": "C"}, known))) == '["no schema of a/v1 C"]'
