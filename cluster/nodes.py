"""Resources that a worker needs, and the nodes that can take a worker. Pure logic, without Ray."""

import time

from pydantic import Field, field_validator

from shards.base.config import Config
from shards.base.errors import WorkError

Resources = dict[str, float]
"""Ray's resource name → amount, for GPU, CPU, and any custom resources."""
LOOK_SECONDS = 2.0
"""Interval between checks of the cluster's nodes."""
REMIND_SECONDS = 30.0
"""Interval between messages while no node can take a worker."""
EPSILON = 1e-9


class ResourcesConfig(Config):
    """Resources of one worker. Ray runs as many workers as fit on the cluster."""

    num_gpus: float = Field(1.0, ge=0)
    """GPUs per worker; 0 computes on the CPU, and 0.5 puts two workers on each GPU."""
    num_cpus: float = Field(4.0, gt=0)
    """CPUs per worker, as Ray counts them. In stage 1, 4 CPUs keep up with a GPU that encodes 500 images a second."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources per worker: {encoder: 1} restricts workers to nodes that were started with this
    resource."""
    wait_for_resources: float = Field(3600.0, ge=0)
    """Seconds to wait for a node that can take a worker before the job gives up. Used only on a cluster."""

    @field_validator("num_gpus")
    @classmethod
    def _whole_or_fraction(cls, num_gpus: float) -> float:
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError("must be a whole number of GPUs or a fraction of one, such as 0.5, 1 or 2")
        return num_gpus

    @property
    def needs(self) -> Resources:
        """Resources of one worker, by name."""
        return {"GPU": self.num_gpus, "CPU": self.num_cpus, **self.resources}


def places(has: Resources, needs: Resources) -> dict[str, int]:
    """Return, for each resource, how many workers it allows on a node at once. The smallest number is the node's
    limit."""
    fit = {name: int(has.get(name, 0) / amount + EPSILON) for name, amount in needs.items() if amount}
    if 0 < needs.get("GPU", 0) < 1:  # a fraction is part of one GPU and never spans two
        fit["GPU"] = int(has.get("GPU", 0)) * int(1 / needs["GPU"] + EPSILON)
    return fit


def shortage(has: Resources, needs: Resources) -> str | None:
    """Return a message such as `only 6 of 8 GPUs are usable, because …`, or None if workers can use all of a node's
    GPUs."""
    fit = places(has, needs)
    usable, by_gpu = min(fit.values()), fit.get("GPU", 0)
    short = [plural(name) for name, count in fit.items() if count < by_gpu]
    if not short:
        return None
    gpus = has["GPU"] * usable / by_gpu
    return f"only {gpus:g} of {has['GPU']:g} GPUs are usable, because the node has too few {' and '.join(short)}"


def address_of(node: str, has: Resources) -> str:
    """Return a node's address, which Ray lists among the node's resources, or its id if no address is listed."""
    addresses = (name.removeprefix("node:") for name in has if name.startswith("node:"))
    return next((address for address in addresses if not address.startswith("__")), node)


def describe(resources: Resources, wanted: Resources | None = None) -> str:
    """Format amounts for messages, such as `1 GPU and 8 CPUs`. With `wanted`, include only the resources named
    there."""
    amounts = {name: resources.get(name, 0) for name in wanted or resources}
    named = [f"{amount:g} {name if amount == 1 else plural(name)}" for name, amount in amounts.items()]
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)


def plural(name: str) -> str:
    """Add an s to the names of Ray's own resources (GPU, CPU), but not to custom names."""
    return f"{name}s" if name.isupper() else name


class NodeWatch:
    """Record of the nodes that can take a worker, and of how long no such node has existed."""

    def __init__(self, config: ResourcesConfig):
        self.needs, self.limit = config.needs, config.wait_for_resources
        self.able: set[str] = set()
        """Ids of live nodes that are large enough for a worker."""
        self.places = 0
        """Number of workers that fit on these nodes at once."""
        self.addresses: dict[str, str] = {}
        """Node id → address, for every node that was ever alive."""
        self.shortages: dict[str, str] = {}
        """Node id → message about GPUs that workers cannot use."""
        self.looked_at = self.reminded_at = -float("inf")
        self.able_at = time.monotonic()
        """Last time at which a node was able to take a worker, by `time.monotonic`."""

    @property
    def is_due(self) -> bool:
        """Whether the list of live nodes should be refreshed."""
        return time.monotonic() - self.looked_at >= LOOK_SECONDS

    def address(self, node: str | None) -> str | None:
        """Return a node's address, or its id if it was never seen alive."""
        return None if node is None else self.addresses.get(node, node)

    def look(self, alive: dict[str, Resources]) -> str | None:
        """Update this object from the total resources of all live nodes. Return a message for the user, or None; raise
        WorkError if no node could take a worker for `wait_for_resources` seconds."""
        now = self.looked_at = time.monotonic()
        self.addresses |= {node: address_of(node, has) for node, has in alive.items()}
        counts = {node: min(places(has, self.needs).values()) for node, has in alive.items()}
        self.able = {node for node, count in counts.items() if count}
        self.places = sum(counts.values())
        if self.able:
            self.able_at, self.reminded_at = now, -float("inf")
            return self._new_shortages(alive)
        waited = now - self.able_at
        sizes = "; ".join(sorted({describe(has, self.needs) for has in alive.values()})) or "none"
        problem = f"No node in the cluster can take a worker that needs {describe(self.needs)} (live nodes: {sizes})"
        if waited > self.limit:
            raise WorkError(
                f"{problem}, and no such node joined within {self.limit:g} s (workers.wait_for_resources). Add such a "
                f"node, or lower workers.num_gpus, workers.num_cpus or workers.resources. Committed work is kept."
            )
        if now - self.reminded_at < REMIND_SECONDS:
            return None
        self.reminded_at = now
        return f"{problem}. Waiting up to {self.limit - waited:.0f} s for such a node to join."

    def _new_shortages(self, alive: dict[str, Resources]) -> str | None:
        before = self.shortages
        self.shortages = {node: text for node, has in alive.items() if (text := shortage(has, self.needs))}
        changed = sorted(node for node, text in self.shortages.items() if before.get(node) != text)
        lines = [f"node {address_of(node, alive[node])}: {self.shortages[node]}" for node in changed]
        return "\n".join(lines) or None
