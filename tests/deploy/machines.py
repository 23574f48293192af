"""Simulated machines: each has its own network address, host name, processes, /dev/shm and /mnt.

They share only the file system. A machine's /mnt starts empty and holds its temporary files. Killing a machine's first
process kills all of its processes, like a power cut. Root is required.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import psutil

from tests.runs import wait_until

NETWORK = "10.213.77"
START = """
hostname $0
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /mnt
{setup}
touch /mnt/.started
sleep infinity & wait
"""


def missing(*programs: str) -> list[str]:
    """Return the programs that these tests need and this machine lacks."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    found = [name for name in ("unshare", "nsenter", "ip", *programs) if shutil.which(name, path=path) is None]
    return found + (["root"] if os.geteuid() else [])


class Machine:
    """A network namespace with an address, and an init process in separate namespaces, which all other processes run
    below."""

    def __init__(self, cluster: "Machines", name: str, number: int):
        self.cluster, self.name, self.number = cluster, name, number
        self.address = f"{NETWORK}.{number}"
        self.network = f"{cluster.tag}-{name}"
        sh("ip", "netns", "add", self.network)
        self._ip("link", "set", "lo", "up")
        self._wire()
        self.start()

    def _wire(self) -> None:
        """Connect the machine to the bridge."""
        outer = f"{self.cluster.tag}{self.number}"
        sh("ip", "link", "add", "eth0", "netns", self.network, "type", "veth", "peer", "name", outer)
        sh("ip", "link", "set", outer, "netns", self.cluster.tag)
        sh("ip", "-n", self.cluster.tag, "link", "set", outer, "master", "switch", "up")
        self._ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")

    def _ip(self, *words: str) -> None:
        sh("ip", "-n", self.network, *words)

    def start(self) -> None:
        """Start the machine."""
        script = START.format(folder=self.cluster.folder, setup=self.cluster.setup)
        own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.network}", *own, "bash", "-ec", script, self.name],
            stdout=subprocess.DEVNULL,
            stderr=(self.cluster.folder / f"{self.name}.log").open("a"),
        )
        wait_until(lambda: psutil.Process(self.process.pid).children(), 30)
        (first,) = psutil.Process(self.process.pid).children()
        entered = ["--mount", "--uts", "--net", "--pid", f"--wdns={self.cluster.repository}"]
        self.inside = ["nsenter", "--target", str(first.pid), *entered]
        wait_until(lambda: self.run("test", "-e", "/mnt/.started", check=False).returncode == 0, 30)

    def run(
        self, *command: str, check: bool = True, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine."""
        found = subprocess.run(
            [*self.inside, *command],
            env=self.cluster.environment | dict(variables or {}),
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert found.returncode == 0 or not check, f"{command}: {found.stdout}{found.stderr}"
        return found

    def power_cut(self) -> None:
        """Kill all processes of the machine at once."""
        psutil.Process(self.process.pid).children()[0].kill()
        self.process.wait()

    def kill(self, name: str) -> None:
        """Send SIGKILL to this machine's processes of that name."""
        found = self.run("grep", "-lx", name, *self.run("sh", "-c", "ls /proc/[0-9]*/comm").stdout.split(), check=False)
        self.run("kill", "-9", *(path.split("/")[2] for path in found.stdout.split()))


class Machines:
    """Several machines on one network; a context manager."""

    setup = ""
    """Bash script that each machine runs when it starts."""

    def __init__(self, folder: Path, repository: Path, environment: dict[str, str], names: list[str]):
        """Prepare the machines. Commands run in the folder `repository`, with `environment`."""
        self.folder, self.repository, self.names = folder, repository, names
        self.tag = f"lm{os.getpid() % 100_000}"
        own = {"TMPDIR": "/mnt", "RAY_TMPDIR": "/mnt", "PATH": f"{environment['PATH']}:/usr/sbin:/sbin"}
        self.environment = environment | own
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self) -> None:
        """Start all machines."""
        numbers = {name: number for number, name in enumerate(self.names, start=1)}
        hosts = [f"{NETWORK}.{number} {name}" for name, number in numbers.items()]
        (self.folder / "hosts").write_text("\n".join([*hosts, "127.0.0.1 localhost", ""]))
        sh("ip", "netns", "add", self.tag)
        sh("ip", "-n", self.tag, "link", "add", "switch", "type", "bridge")
        sh("ip", "-n", self.tag, "link", "set", "switch", "up")
        for name, number in numbers.items():
            self.machines[name] = Machine(self, name, number)

    def __exit__(self, *_: object) -> None:
        for machine in self.machines.values():
            machine.process.kill()  # `--kill-child` kills all of its processes as well
            machine.process.wait()
            sh("ip", "netns", "delete", machine.network)
        sh("ip", "netns", "delete", self.tag)


def sh(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, timeout=60)
