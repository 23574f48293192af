"""The image of deploy/container, built by buildah on a base from mmdebstrap, and both stages run in it, as root.

$LATENTMILL_STORAGE names a folder that keeps the base and the image between runs.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from shards.open import open_store
from tests.roots import load_tars, precompute_arguments
from tests.runs import UNET, train_fields, write_config

pytestmark = [pytest.mark.slow, pytest.mark.container]
ROOT = Path(__file__).parents[2]
IMAGE = f"latentmill:{metadata.version('latentmill')}"
USER = 1000
VARIABLES = ("HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=1", "RAY_AUTH_MODE=token", f"RAY_AUTH_TOKEN={'0123456789abcdef' * 4}")
"""The cluster's token is passed like a Kubernetes secret."""


class Image:
    """The image and two containers, one per pod, for commands that run at the same time."""

    def __init__(self, storage: Path, data: Path):
        self.buildah = ["buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run")]
        self.data = data
        if "localhost/latentmill-base" not in self.call("images", "--format", "{{.Name}}"):
            self.make_base(storage)
        cache = Path.home() / ".cache" / "uv"
        volume = ["--volume", f"{cache}:/root/.cache/uv"] if cache.is_dir() else []
        words = ["--isolation", "chroot", "--layers", "--build-arg", "BASE=localhost/latentmill-base", *volume]
        self.call("bud", *words, "-f", str(ROOT / "deploy/container/Dockerfile"), "-t", IMAGE, str(ROOT))
        self.pods = [self.call("from", f"localhost/{IMAGE}").strip() for _ in range(2)]

    def make_base(self, storage: Path) -> None:
        """Build a minimal Debian base with this machine's access to a package index: certificates and pip's config."""
        here = storage / "here"
        (here / "etc/ssl/certs").mkdir(parents=True)
        (here / "etc/uv").mkdir()
        shutil.copy("/etc/ssl/certs/ca-certificates.crt", here / "etc/ssl/certs")
        (here / "etc/pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        (here / "etc/uv/uv.toml").write_text("system-certs = true\n")
        words = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=ca-certificates", "bookworm"]
        subprocess.run([*words, str(storage / "base.tar")], check=True, timeout=900)
        container = self.call("from", "scratch").strip()
        self.call("add", container, str(storage / "base.tar"), "/")
        self.call("add", container, str(here), "/")
        self.call("commit", container, "latentmill-base")
        self.call("rm", container)

    def call(self, *words: str) -> str:
        """Run a buildah command, and return its output."""
        found = subprocess.run([*self.buildah, *words], capture_output=True, text=True, timeout=2400)
        assert found.returncode == 0, f"{words}: {found.stdout[-3000:]}{found.stderr[-3000:]}"
        return found.stdout

    def run(self, *command: str, pod: int = 0) -> str:
        """Run a command in a pod's container as the image's user, with `data` mounted at its own path."""
        return self.call(*self.words(command, pod))

    def words(self, command: tuple[str, ...], pod: int) -> list[str]:
        """Return the arguments for buildah."""
        own = [f"{self.data}:{self.data}", "/dev/shm:/dev/shm"]
        volumes = [word for volume in own for word in ("--volume", volume)]
        variables = [word for variable in VARIABLES for word in ("--env", variable)]
        return ["run", "--isolation", "chroot", *variables, *volumes, self.pods[pod], "--", *command]

    @contextmanager
    def running(self, *command: str, pod: int = 0) -> Iterator[None]:
        """Run a command in the background within the context."""
        with subprocess.Popen([*self.buildah, *self.words(command, pod)], start_new_session=True) as process:
            try:
                yield
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    missing = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid():
        pytest.fail(f"These tests need root, and {' and '.join(missing)}: apt-get install buildah mmdebstrap")
    storage = Path(os.environ.get("LATENTMILL_STORAGE") or tmp_path_factory.mktemp("images"))
    image = Image(storage, tmp_path_factory.mktemp("data"))
    yield image
    image.call("rm", *image.pods)


def test_it_is_not_root_and_carries_no_tools(image: Image) -> None:
    assert image.run("id", "-u").strip() == str(USER)
    assert image.run("sh", "-c", "command -v pip uv git || echo none").strip() == "none"
    assert "precompute.yaml" in image.run("ls", "configs")
    versions = "import torch, ray, diffusers; print(torch.__version__.split('+')[0], ray.__version__)"
    locked = dict(
        line.split("==")[:2] for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line
    )
    assert image.run("python", "-c", versions).split() == [locked["torch"].split()[0], locked["ray"].split()[0]]


def test_nccl_can_use_infiniband(image: Image) -> None:
    image.run("python", "-c", "import ctypes; ctypes.CDLL('libibverbs.so.1')")
    assert "mlx5.driver" in image.run("ls", "/etc/libibverbs.d").split()


def test_it_is_no_larger_than_the_page_says(image: Image) -> None:
    page = (ROOT / "docs/how-to/container.md").read_text()
    (ceiling,) = re.findall(r"at most ([\d.]+) GB", page)
    listed = [line.split() for line in image.call("images", "--format", "{{.Name}}:{{.Tag}} {{.Size}}").splitlines()]
    ((_, size, unit),) = (words for words in listed if words[0] == f"localhost/{IMAGE}")
    print(f"the image has {size} {unit}")
    assert unit == "GB" and float(size) <= float(ceiling)


def contents(root: Path) -> dict[str, dict[str, int]]:
    """Return tar → bucket → number of samples."""
    return {tar.tar: {name: part.samples for name, part in tar.parts.items()} for tar in load_tars(open_store(root))}


def encode_on_a_cluster(image: Image, words: list[str]) -> None:
    """Start a head without CPUs in one container and a node in the other, and submit the RayJob's entrypoint."""
    port, dashboard = "6399", "127.0.0.1:8299"
    head = ["--head", "--num-cpus", "0", "--port", port, "--dashboard-host", "127.0.0.1", "--dashboard-port", "8299"]
    node = ["--address", f"127.0.0.1:{port}", "--num-cpus", "2", "--dashboard-agent-listen-port", "52399"]
    submit = ["ray", "job", "submit", "--address", f"http://{dashboard}", "--", *words]
    with image.running("ray", "start", *head, "--block"):
        wait_for(f"http://{dashboard}/api/version")
        with image.running("ray", "start", *node, "--block", pod=1):
            said = image.run(*submit)
    assert "Tars: 2 encoded (46 samples in, 30 accepted, 16 rejected)" in said and "succeeded" in said


def wait_for(address: str) -> None:
    """Wait until the server responds."""
    for _ in range(240):
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except urllib.error.HTTPError:  # as without the cluster's token
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"{address} does not answer")


def train_in_two_pods(image: Image, config: Path, root: Path, run: Path) -> None:
    """Run the JobSet's command, with changed addresses and paths, and one process instead of a machine's GPUs."""
    (job,) = yaml.safe_load((ROOT / "deploy/kubernetes/jobset.yaml").read_text())["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    here = {
        "--main_process_ip=latentmill-train-node-0-0.latentmill-train": "--main_process_ip=127.0.0.1",
        "--num_processes=16": "--num_processes=2",
        "--config=configs/phase1.yaml": f"--config={config}",
        "--data.root=s3://bucket/latents": f"--data.root={root}",
        "--run_dir=/runs/phase1": f"--run_dir={run}",
    }
    words = [*container["command"], *container["args"]]
    assert here.keys() <= set(words)
    with ThreadPoolExecutor() as pods:
        ends = [
            pods.submit(
                image.run,
                *(here.get(word, word.replace("$(JOB_COMPLETION_INDEX)", str(index))) for word in words),
                pod=index,
            )
            for index in range(job["template"]["spec"]["completions"])
        ]
    for end in ends:
        end.result()


def test_both_stages_run_in_it(image: Image, models: Path, tars: Path) -> None:
    """Run the commands of the manifests, with this machine's paths and sizes."""
    data = image.data
    shutil.copytree(models, data / "models")
    shutil.copytree(tars, data / "tars")
    shutil.copy(UNET, data / "unet.json")
    root, run = data / "latents", data / "runs" / "phase1"
    fields = train_fields(root, run, backbone={"config": str(data / "unet.json")}, max_steps=4)
    config = write_config(data, fields)
    for path in [data, *data.rglob("*")]:
        shutil.chown(path, USER, USER)
    data.chmod(0o755)
    job = yaml.safe_load((ROOT / "deploy/kubernetes/rayjob.yaml").read_text())["spec"]["entrypoint"]
    words = precompute_arguments(data / "models", data / "tars", root)[2:]
    said = image.run(*shlex.split(job)[:5], *words)
    assert "Tars: 2 encoded (46 samples in, 30 accepted, 16 rejected)" in said
    assert len(load_tars(open_store(root))) == 2
    there = data / "on-a-cluster"
    arguments = precompute_arguments(data / "models", data / "tars", there)[2:]
    encode_on_a_cluster(image, [*shlex.split(job)[:5], *arguments])
    assert contents(there) == contents(root)
    train_in_two_pods(image, config, root, run)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    assert {path.stat().st_uid for path in [*root.rglob("*"), *run.rglob("*")]} == {USER}
