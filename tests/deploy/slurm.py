"""A Slurm cluster of Debian's daemons with munge, on simulated machines (tests/deploy/machines.py)."""

import os
import re
import time
from pathlib import Path

from tests.deploy.machines import Machines
from tests.runs import wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
NODES = ("node1", "node2")
CONF = """
ClusterName=latentmill
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=/mnt/munge.socket
StateSaveLocation=/mnt/state
SlurmdSpoolDir=/mnt/spool
SlurmctldPidFile=/mnt/slurmctld.pid
SlurmdPidFile=/mnt/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=30
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName=node[1-2] CPUs=64 RealMemory=65536 Gres=gpu:8 State=UNKNOWN
PartitionName=gpu Nodes=node[1-2] Default=YES MaxTime=INFINITE OverSubscribe=NO
"""
MUNGE = """
mkdir /mnt/state /mnt/spool
munged --force --key-file {folder}/munge.key --socket /mnt/munge.socket --pid-file /mnt/munge.pid \\
  --log-file /mnt/munge.log --seed-file /mnt/munge.seed
"""


class Slurm(Machines):
    """A controller, `login`, and two nodes, `node1` and `node2`."""

    def __init__(self, folder: Path, repository: Path, environment: dict[str, str]):
        """Prepare the cluster. `environment` is that of submitted jobs."""
        self.setup = MUNGE.format(folder=folder)
        own = {"SLURM_CONF": str(folder / "slurm.conf")}
        super().__init__(folder, repository, environment | own, ["login", *NODES])

    def start(self) -> None:
        """Start all machines and their daemons."""
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder))
        (self.folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/tty[0-7]\n")
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        super().start()
        self.login = self.machines["login"]
        self.login.run("slurmctld")
        for name in NODES:
            self.slurmd(name)
        wait_until(lambda: self.login.run("sinfo", "-ho", "%D %t", check=False).stdout.split() == ["2", "idle"], 60)

    def slurmd(self, name: str) -> None:
        """Start a node's daemon, which detaches by itself."""
        self.machines[name].run("slurmd", "-N", name)

    def submit(self, *words: str, **variables: str) -> int:
        """Run `sbatch` from the clone, and return the job's number."""
        said = self.login.run("sbatch", "--parsable", *words, variables=variables).stdout
        return int(re.match(r"\d+", said)[0])  # type: ignore[index]

    def state(self, job: int | str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        said = self.login.run("scontrol", "--oneliner", "show", "job", str(job)).stdout
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def start_now(self, job: int) -> None:
        """Start a requeued job now instead of after two minutes."""
        wait_until(lambda: self.state(job)["JobState"] == "PENDING", 90)
        time.sleep(2)  # nodes refuse credentials from the second in which the job was revoked
        self.login.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until(lambda: self.state(job)["JobState"] == "RUNNING", 60)

    def finish(self, job: int | str, seconds: float = 300) -> dict[str, str]:
        """Wait for a job to end."""
        wait_until(lambda: self.state(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), seconds)
        return self.state(job)
