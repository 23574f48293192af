"""Sample sizes of the model families, and the rates at which a node of H200s would read them, from their plans."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import yaml

from bench.kit.roots import encoding_record
from plan.arithmetic.counted import cached_work
from plan.arithmetic.work import build_towers
from plan.config import Plan
from plan.measured import Rates
from plan.report import Inputs, phase_row, stored_texts
from shards.base.config import load_config
from shards.format.encoding import EncodingRecord
from shards.format.towers import TextTower

CONFIGS = Path("configs")
FAMILIES = sorted(path.parent.name for path in CONFIGS.glob("*/plan.yaml"))
GPUS_OF_A_NODE = 8
AS_ENCODED = ("layer", "lower", "template", "empty", "keep")
"""Fields of stage 1's text towers that do not change the size of samples, but that the family's pipeline expects."""


@dataclass(frozen=True)
class Family:
    """A family in its first phase, whose samples are the smallest and read the fastest."""

    name: str
    plan: Plan
    """Plan of both phases on H200s."""
    encoding: EncodingRecord

    @property
    def bucket(self) -> str:
        """Bucket of the first phase."""
        return self.plan.phase1.bucket

    @property
    def num_tokens(self) -> int:
        """Number of tokens of a trimmed caption."""
        return round(self.plan.text.tokens)

    @cached_property
    def node_rate(self) -> float:
        """Samples per second that the planner expects from a node. Counting the FLOPs takes seconds, unless a plan has
        counted them before."""
        work = cached_work(self.plan.networks, [self.bucket])
        inputs = Inputs(self.plan, work, Rates({}, []))
        return phase_row(inputs, self.plan.phase1, GPUS_OF_A_NODE, online=False).images_per_second


def read_family(name: str) -> Family:
    """Describe a family according to configs/NAME/plan.yaml, on H200s."""
    plan = load_config(Plan, CONFIGS / name / "plan.yaml", ["--gpu.kind", "H200"], "plan")
    _, image, encoders = build_towers(plan.networks)
    posterior = "deterministic" if image.posterior == "deterministic" else plan.data.posterior
    image = image.model_copy(update={"storage": plan.image.storage, "posterior": posterior})
    # not as a PrecomputeConfig, whose module imports Ray, which the GPU check does without
    configured = yaml.safe_load((CONFIGS / name / "precompute.yaml").read_text()).get("texts", {})
    stored_towers = stored_texts(plan, {name: record for name, (_, record) in encoders.items()})
    texts = {}
    for tower, stored in stored_towers.items():
        recorded = {field: value for field, value in configured.get(tower, {}).items() if field in AS_ENCODED}
        texts[tower] = TextTower.model_validate(stored.model_dump() | recorded)
    return Family(name, plan, encoding_record(1, 1).model_copy(update={"image": image, "texts": texts}))
