"""Sample sizes of the model families, and the rates at which a node of H200s would read them, from their plans."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from bench.kit.roots import encoding_record
from plan.arithmetic.work import NO_WEIGHTS, count_work, network_calls
from plan.config import Plan
from plan.measured import Rates
from plan.report import Inputs, phase_row
from shards.base.config import load_config
from shards.format.encoding import EncodingRecord
from shards.format.towers import ImageTower

CONFIGS = Path("configs")
FAMILIES = sorted(path.parent.name for path in CONFIGS.glob("*/plan.yaml"))
GPUS_OF_A_NODE = 8


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
    network: nn.Module
    """The network that is trained, without weights."""
    call: Callable[[], object]
    """Forward pass of the network for one sample, on the meta device."""


def read_family(name: str) -> Family:
    """Describe a family according to configs/NAME/plan.yaml, on H200s."""
    plan = load_config(Plan, CONFIGS / name / "plan.yaml", ["--gpu.kind", "H200"], "plan")
    phase, work = plan.phase1, count_work(plan.networks, [plan.phase1.bucket])
    inputs = Inputs(plan, work, Rates({}, []))
    posterior = plan.data.posterior if work.has_posterior else "deterministic"
    width = int(phase.bucket.partition("x")[0])
    image = ImageTower(
        class_name="none",
        weights=NO_WEIGHTS,
        posterior=posterior,
        channels=work.latent_channels,
        downsampling=width // work.latent_hw[phase.bucket][1],
        scale=(1.0,) * work.latent_channels,
        shift=(0.0,) * work.latent_channels,
        crop="",
        resampling="",
        decoder="",
        storage=plan.image.storage,
    )
    texts = dict(zip(work.texts, inputs.texts, strict=True))
    encoding = encoding_record(1, 1).model_copy(update={"image": image, "texts": texts})
    rate = phase_row(inputs, phase, GPUS_OF_A_NODE, online=False).images_per_second
    shapes = {phase.bucket: work.latent_hw[phase.bucket]}
    network, call = network_calls(plan.networks, shapes, image, encoding.texts)[phase.bucket]
    return Family(name, encoding, phase.bucket, round(plan.text.tokens), rate, network, call)
