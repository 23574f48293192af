"""What a worker takes of a node, and whether there is a node that can give it: arithmetic, without Ray."""

import time

from pydantic import Field

from shards.base.config import Config
from shards.base.errors import WorkError

Resources = dict[str, float]
"""By Ray's names: GPU, CPU, and any others."""
LOOK_SECONDS = 2.0
REMIND_SECONDS = 30.0


class ResourcesConfig(Config):
    """What one worker takes. Ray runs as many as the cluster holds."""

    num_gpus: float = Field(1.0, ge=0)
    """GPUs per worker; 0 works on the CPU."""
    num_cpus: float = Field(8.0, gt=0)
    """CPUs per worker, as Ray counts them."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources per worker, by name: {encoder: 1} keeps to nodes that were started with such."""
    wait_for_resources: float = Field(3600.0, ge=0)
    """Seconds to wait for a node that can take a worker, before the job gives up; on a cluster only."""

    @property
    def needs(self) -> Resources:
        """What one worker takes of its node."""
        return {"GPU": self.num_gpus, "CPU": self.num_cpus, **self.resources}


def missing(has: Resources, needs: Resources) -> bool:
    """Whether a node with `has` in all could never take a worker that `needs` so much."""
    return any(has.get(name, 0) < amount for name, amount in needs.items())


def describe(resources: Resources, wanted: Resources | None = None) -> str:
    """`1 GPUs and 8 CPUs`: the resources that are wanted, for people."""
    named = [f"{resources.get(name, 0):g} {name}{'s' if name.isupper() else ''}" for name in wanted or resources]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


class Watch:
    """Knows which nodes can take a worker, and says how long there has been none."""

    def __init__(self, config: ResourcesConfig):
        self.needs, self.limit = config.needs, config.wait_for_resources
        self.able: set[str] = set()
        """Ids of the nodes that are alive and large enough."""
        self.looked = self.reminded = -float("inf")
        self.able_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self.looked >= LOOK_SECONDS

    def look(self, alive: dict[str, Resources]) -> str | None:
        """Take in which nodes are alive; returns what there is to say.

        Raises:
            WorkError: no node could take a worker for `wait_for_resources` seconds.
        """
        now = self.looked = time.monotonic()
        self.able = {node for node, resources in alive.items() if not missing(resources, self.needs)}
        if self.able:
            self.able_at, self.reminded = now, -float("inf")
            return None
        waited = now - self.able_at
        largest = "; ".join(sorted({describe(resources, self.needs) for resources in alive.values()})) or "none"
        what = f"No node of the cluster can take a worker of {describe(self.needs)} (alive: {largest})"
        if waited > self.limit:
            raise WorkError(
                f"{what}, and none joined within {self.limit:g} s (workers.wait_for_resources). Add such a node, or "
                f"lower workers.num_gpus, workers.num_cpus or workers.resources. What was committed stays."
            )
        if now - self.reminded < REMIND_SECONDS:
            return None
        self.reminded = now
        return f"{what}: waiting for one to join, for {self.limit - waited:.0f} s more"
