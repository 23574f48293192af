"""Sample sizes of the model families, and the rates at which a node of H200s would read them, from their plans."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from bench.kit.roots import encoding_record
from plan.arithmetic.work import build_towers, count_work
from plan.config import Plan
from plan.measured import Rates
from plan.report import Inputs, phase_row
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
    encoding: EncodingRecord
    bucket: str
    num_tokens: int
    """Number of tokens of a trimmed caption."""
    node_rate: float
    """Samples per second that the planner expects from a node."""


def read_family(name: str) -> Family:
    """Describe a family according to configs/NAME/plan.yaml, on H200s."""
    plan = load_config(Plan, CONFIGS / name / "plan.yaml", ["--gpu.kind", "H200"], "plan")
    phase, work = plan.phase1, count_work(plan.networks, [plan.phase1.bucket])
    inputs = Inputs(plan, work, Rates({}, []))
    posterior = plan.data.posterior if work.has_posterior else "deterministic"
    _, image, _ = build_towers(plan.networks)
    image = image.model_copy(update={"storage": plan.image.storage, "posterior": posterior})
    # not as a PrecomputeConfig, whose module imports Ray, which the GPU check does without
    encoders = yaml.safe_load((CONFIGS / name / "precompute.yaml").read_text()).get("texts", {})
    texts = {}
    for tower, stored in zip(work.texts, inputs.texts, strict=True):
        recorded = {name: value for name, value in encoders.get(tower, {}).items() if name in AS_ENCODED}
        texts[tower] = TextTower.model_validate(stored.model_dump() | recorded)
    encoding = encoding_record(1, 1).model_copy(update={"image": image, "texts": texts})
    rate = phase_row(inputs, phase, GPUS_OF_A_NODE, online=False).images_per_second
    return Family(name, encoding, phase.bucket, round(plan.text.tokens), rate)
