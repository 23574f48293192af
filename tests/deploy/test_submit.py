"""Stage 1 launched with the commands of docs/how-to/cluster.md, on machines that share only files.

The clone is an altered copy that only the commands can bring to the nodes, which refuse any other code.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shards.open import open_store
from shards.root.committed import load_receipts
from tests.deploy.machines import Machine, Machines, missing
from tests.faults.world import World
from tests.runs import PYTHON, environment, wait_until

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "how-to" / "cluster.md"


def block(language: str, having: str) -> str:
    """Return the page's code block in this language that contains this text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = (text for text in blocks if having in text)
    return str(found)


def command(having: str) -> str:
    """Return the page's only command line that contains this text."""
    lines = [line for line in PAGE.read_text().splitlines() if having in line and not line.startswith("#")]
    (found,) = (line for line in lines if line.startswith(("ray ", "RAY_", "kubectl ")))
    return found


class Site:
    """A login node without Ray, a head, and a node for workers, with the values of the page's placeholders."""

    def __init__(self, machines: Machines, models: Path, tars: Path, folder: Path):
        self.machines, self.models, self.tars, self.folder = machines, models, tars, folder
        self.login, self.head, self.node = (machines.machines[name] for name in ("login", "head", "node"))

    def here(self, text: str, root: Path) -> str:
        """Fill in this site's address, tars, models and root."""
        fields = World(self.models, self.tars, Path("none")).config(root).model_dump(mode="json")
        config = self.folder / f"{root.name}.yaml"
        config.write_text(yaml.safe_dump(fields))
        names = {
            "10.0.0.1": self.head.address,
            "configs/precompute.yaml": str(config),
            "00000-00999": "00000-00001",
            "s3://bucket/tars": str(self.tars),
            "s3://bucket/latents": str(root),
        }
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    def type(self, machine: Machine, line: str, root: Path) -> str:
        """Run a command of the page, and return its output."""
        found = machine.run("bash", "-c", self.here(line, root))
        return found.stdout + found.stderr

    def check(self, root: Path) -> None:
        """Check that the node encoded all tars with the clone's code."""
        code = "from shards.root.provenance import source_sha256; print(source_sha256())"
        sent = self.login.run("python", "-c", code).stdout.strip()
        receipts = load_receipts(open_store(root))
        assert {receipt.made_by.host for receipt in receipts if receipt.made_by} == {"node"}
        assert {receipt.made_by.source_sha256 for receipt in receipts if receipt.made_by} == {sent}
        assert {receipt.tar for receipt in receipts} == {"00000", "00001"}


@pytest.fixture(scope="module")
def site(models: Path, tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The cluster, started with the page's commands."""
    if missing():
        pytest.fail(f"These tests need {', '.join(missing())}: apt-get install iproute2 util-linux, as root")
    folder = tmp_path_factory.mktemp("site")
    clone = folder / "clone"
    for package in ("shards", "cluster", "precompute", "configs"):
        shutil.copytree(REPOSITORY / package, clone / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (clone / "precompute" / "pixels" / "color.py").open("a") as file:
        file.write("\n# otherwise the same\n")
    variables = environment(HOME=str(folder), RAY_AUTH_MODE="token")
    variables["PATH"] = f"{Path(PYTHON[0]).parent}:{variables['PATH']}"
    variables.pop("PYTHONPATH", None)
    with Machines(folder, clone, variables, ["login", "head", "node"]) as machines:
        site = Site(machines, models, tars, folder)
        site.type(site.login, command("get-auth-token"), folder)
        site.type(site.head, f"cd / && {command('start --head')} --num-cpus 0", folder)
        site.type(site.node, f"cd / && {command('start --address')} --num-cpus 2", folder)
        jobs = ["ray", "job", "list", "--address", f"http://{site.head.address}:8265"]
        wait_until(lambda: site.login.run(*jobs, check=False).returncode == 0, 120)
        yield site


def test_from_a_login_node_the_clone_goes_along(site: Site, tmp_path: Path) -> None:
    said = site.type(site.login, command("ray job submit"), tmp_path / "root")
    assert "Tars: 2 encoded" in said
    site.check(tmp_path / "root")


def test_from_a_node_as_from_a_pod(site: Site, tmp_path: Path) -> None:
    """Run the command of `kubectl exec` in the head's pod, and the same command on a node."""
    said = site.type(site.head, command("RAY_ADDRESS=10.0.0.1"), tmp_path / "root")
    assert "Tars: 2 encoded" in said
    site.check(tmp_path / "root")
    pod = command("kubectl exec").partition(" -- ")[2]
    assert "2 already done" in site.type(site.head, pod, tmp_path / "root")


def test_from_a_notebook(site: Site, tmp_path: Path) -> None:
    cells = block("python", "JobSubmissionClient") + "\nprint(client.get_job_status(job))"
    (script := tmp_path / "cells.py").write_text(site.here(cells, tmp_path / "root"))
    as_a_notebook = (
        "import ast, asyncio, sys; cells = open(sys.argv[1]).read(); "
        "asyncio.run(eval(compile(cells, 'cells', 'exec', ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)))"
    )
    said = site.login.run("python", "-c", as_a_notebook, str(script)).stdout
    assert "Tars: 2 encoded" in said and "SUCCEEDED" in said
    site.check(tmp_path / "root")


def test_a_driver_that_is_on_no_node_is_told_how(site: Site, tmp_path: Path) -> None:
    line = site.here(command("RAY_ADDRESS=10.0.0.1"), tmp_path / "root")
    result = site.login.run("bash", "-c", line, check=False)
    assert result.returncode == 2, result.stderr
    assert "ray job submit" in " ".join(result.stderr.split()) and "Traceback" not in result.stderr
