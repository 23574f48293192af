"""What a worker takes of a node, and whether there is a node that can give it: arithmetic, without Ray."""

import time

from pydantic import Field, field_validator

from shards.base.config import Config
from shards.base.errors import WorkError

Resources = dict[str, float]
"""By Ray's names: GPU, CPU, and any others."""
LOOK_SECONDS = 2.0
REMIND_SECONDS = 30.0
EPSILON = 1e-9


class ResourcesConfig(Config):
    """What one worker takes. Ray runs as many as the cluster holds."""

    num_gpus: float = Field(1.0, ge=0)
    """GPUs per worker; 0 works on the CPU, and 0.5 is two workers on each GPU."""
    num_cpus: float = Field(4.0, gt=0)
    """CPUs per worker, as Ray counts them; 4 keep a GPU of about 500 pictures a second in stage 1."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Further Ray resources per worker, by name: {encoder: 1} keeps to nodes that were started with such."""
    wait_for_resources: float = Field(3600.0, ge=0)
    """Seconds to wait for a node that can take a worker, before the job gives up; on a cluster only."""

    @field_validator("num_gpus")
    @classmethod
    def _whole_or_part(cls, num_gpus: float) -> float:
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError("a worker has whole GPUs, or a part of one: 0.5, 1 or 2")
        return num_gpus

    @property
    def needs(self) -> Resources:
        """What one worker takes of its node."""
        return {"GPU": self.num_gpus, "CPU": self.num_cpus, **self.resources}


def missing(has: Resources, needs: Resources) -> bool:
    """Whether a node with `has` in all could never take a worker that `needs` so much."""
    return any(has.get(name, 0) < amount for name, amount in needs.items())


def places(has: Resources, needs: Resources) -> dict[str, int]:
    """How many workers a node that `has` so much can hold at once, by each resource that one `needs`."""
    fit = {name: int(has.get(name, 0) / amount + EPSILON) for name, amount in needs.items() if amount}
    if 0 < needs.get("GPU", 0) < 1:  # a worker has a part of one GPU, never of two
        fit["GPU"] = int(has.get("GPU", 0)) * int(1 / needs["GPU"] + EPSILON)
    return fit


def shortage(has: Resources, needs: Resources) -> str | None:
    """`6 of 8 GPUs usable: CPUs`: which resources leave GPUs of a node unused, for people; None where none do."""
    fit = places(has, needs)
    usable, by_gpu = min(fit.values()), fit.get("GPU", 0)
    short = [f"{name}{'s' if name.isupper() else ''}" for name, count in fit.items() if count < by_gpu]
    return f"{has['GPU'] * usable / by_gpu:g} of {has['GPU']:g} GPUs usable: {', '.join(short)}" if short else None


def name_of(node: str, has: Resources) -> str:
    """A node's address, which Ray lists among its resources; its id where it does not."""
    addresses = (name.removeprefix("node:") for name in has if name.startswith("node:"))
    return next((address for address in addresses if not address.startswith("__")), node)


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
        self.places = 0
        """Workers that they hold at once."""
        self.names: dict[str, str] = {}
        """Id → address, of every node that was ever alive."""
        self.short: dict[str, str] = {}
        """Node → what was said of GPUs that it cannot use."""
        self.looked = self.reminded = -float("inf")
        self.able_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self.looked >= LOOK_SECONDS

    def name(self, node: str | None) -> str | None:
        """A node's address, for people; its id where it was never seen alive."""
        return None if node is None else self.names.get(node, node)

    def look(self, alive: dict[str, Resources]) -> str | None:
        """Take in which nodes are alive; returns what there is to say.

        Raises:
            WorkError: no node could take a worker for `wait_for_resources` seconds.
        """
        now = self.looked = time.monotonic()
        self.names |= {node: name_of(node, has) for node, has in alive.items()}
        self.able = {node for node, resources in alive.items() if not missing(resources, self.needs)}
        self.places = sum(min(places(alive[node], self.needs).values()) for node in self.able)
        if self.able:
            self.able_at, self.reminded = now, -float("inf")
            return self._new_shortages(alive)
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

    def _new_shortages(self, alive: dict[str, Resources]) -> str | None:
        before, found = self.short, {node: shortage(has, self.needs) for node, has in alive.items()}
        self.short = {node: text for node, text in found.items() if text}
        news = [node for node, text in self.short.items() if before.get(node) != text]
        return "\n".join(f"node {name_of(node, alive[node])}: {self.short[node]}" for node in sorted(news)) or None
