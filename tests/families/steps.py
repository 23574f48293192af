"""The trainer's predictions equal those of the family's diffusers pipeline.

The pipeline runs a few steps from noise, on prompts that are the captions of the stored samples. The input, time and
output of each step are recorded, and the trainer makes the same prediction from the latents root alone.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluation.sampling.job import describe_drawing
from evaluation.sampling.pipeline import PlannedImage, draw, load_pipeline
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.settings import SamplingConfig
from tests.families.calls import arguments
from tests.families.small import Small, stir
from tests.tiny import read_tar
from train.config import TrainConfig
from train.data.loader import Loader
from train.export.scheduler import scheduler_of
from train.model.backbone import pack, unpack
from train.objective.loss import DiffusionLoss
from train.prepare import prepare
from train.trainer import Trainer

STEPS = 3
CPU = torch.device("cpu")


@dataclass
class Taken:
    """Record of one step of a pipeline."""

    time: float
    """Time in the scheduler's units."""
    sample: Tensor
    """Latents before the step."""
    outputs: list[Tensor] = field(default_factory=list)
    """Outputs of the network's calls, in order."""


@dataclass
class Scheduled:
    """Records the inputs of a pipeline's scheduler: (output, time, latents) of each step."""

    calls: list[tuple[Tensor, float, Tensor]] = field(default_factory=list)

    def attach(self, scheduler: Any) -> None:
        step = scheduler.step

        def recorded(output: Tensor, time: Any, sample: Tensor, *rest: Any, **options: Any) -> Any:
            self.heard(output.clone(), float(time), sample.clone())
            return step(output, time, sample, *rest, **options)

        scheduler.step = recorded

    def heard(self, output: Tensor, time: float, sample: Tensor) -> None:
        self.calls.append((output, time, sample))


@dataclass
class Recorder(Scheduled):
    """Also records the inputs of a pipeline's network."""

    steps: list[Taken] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)

    def watch(self, network: torch.nn.Module) -> None:
        network.register_forward_hook(lambda module, inputs, output: self.outputs.append(output[0].clone()))

    def heard(self, output: Tensor, time: float, sample: Tensor) -> None:
        self.steps.append(Taken(time, sample, self.outputs))
        self.outputs = []


@dataclass
class Case:
    """A trainer batch, and the pipeline's steps on its captions."""

    name: str
    config: TrainConfig
    unet: Any
    loss: DiffusionLoss
    batch: Any
    steps: list[Taken]


def make_case(made: Small) -> Case:
    """Run the family's pipeline on the captions of its stored samples."""
    name = made.family.name
    batch_size = 4
    changes = {"global_batch_size": batch_size, "data": {"shuffle": False, "num_canonical_nodes": 1}}
    config = TrainConfig.model_validate(made.train_fields(made.folder / "steps", **changes))
    prepared = prepare(config)
    stir(prepared.network)
    batch = next(iter(Loader(config.data, prepared.spec, batch_size, 0, 0, torch.arange(batch_size))))
    captions = captions_of(made)
    batch.columns["size"][:] = torch.tensor([64, 64, 0, 0])  # pipelines pass on the size that they generate
    scheduler, recorder = scheduler_of(config.backbone.pipeline, config.objective), Recorder()
    pipeline = made.pipeline(prepared.network, scheduler)
    recorder.attach(scheduler)
    recorder.watch(prepared.network)
    pipeline(**arguments(name, [captions[key] for key in batch.keys], STEPS), output_type="latent")
    prepared.network._forward_hooks.clear()
    loss = DiffusionLoss(config.objective, prepared.spec, CPU, prepared.backbone)
    return Case(name, config, prepared.network, loss, batch, recorder.steps)


def exported_case(made: Small, config: TrainConfig, trainer: Trainer, folder: Path, trained: Any = None) -> Case:
    """Run a run's exported pipeline as evaluation does, on the captions of its samples.

    Args:
        folder: the export.
        trained: the network whose predictions to compare; None: the exported one.
    """
    name = made.family.name
    pipeline = load_pipeline(folder, "cpu", "float32")
    recorder, network = Recorder(), getattr(pipeline, "unet", None) or pipeline.transformer
    recorder.attach(pipeline.scheduler)
    recorder.watch(network)
    # PRXPipeline guides one prompt at a time: it gives the network two times, whatever the batch
    count = 1 if name == "prx" else 4
    batch = next(iter(Loader(config.data, prepare(config).spec, count, 0, 0, torch.arange(count))))
    batch.columns["size"][:] = torch.tensor([64, 64, 0, 0])  # pipelines pass on the size that they generate
    captions = captions_of(made)
    samples = [PlannedImage(i, Prompt(key, captions[key]), 0) for i, key in enumerate(batch.keys)]
    sampling = SamplingConfig(size="64x64", guidance=[2.0], steps=[STEPS])
    draw(pipeline, samples, describe_drawing(folder, [], sampling, sampling.grid[0]))
    return Case(name, config, network if trained is None else trained, trainer.train_step.loss, batch, recorder.steps)


def captions_of(small: Small) -> dict[str, str]:
    """Return key → caption from the tar."""
    return {key: members["txt"].decode() for key, members in read_tar(small.tar).items()}


def halves(case: Case, step: Taken) -> tuple[Tensor, Tensor]:
    """Return the network's outputs with and without the prompts, from two calls or from one call on both."""
    if len(step.outputs) == 2:
        return step.outputs[0], step.outputs[1]
    without, within = step.outputs[0].chunk(2)
    return within, without


def latents_of(case: Case, step: Taken) -> Tensor:
    """Return the step's latents, (N, C, h, w)."""
    side = case.config.backbone.pack
    return step.sample if side == 1 else unpack(step.sample, side, (8 // side, 8 // side))


def like_network(case: Case, prediction: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Bring a prediction and the network's output to the same shape."""
    side = case.config.backbone.pack
    return (prediction, output[:, : prediction.shape[1]]) if side == 1 else (pack(prediction, side), output)


def check_steps(case: Case) -> None:
    """Check the trainer's predictions with and without a prompt."""
    assert len(case.steps) == STEPS
    for step in case.steps:
        noisy = latents_of(case, step)
        times = torch.full((len(noisy),), step.time)
        errors, pair = [], []
        for dropped, output in zip((False, True), halves(case, step), strict=True):
            given = case.loss.latents.conditioning(case.batch, torch.full((len(noisy),), dropped))
            with torch.no_grad():
                prediction = case.loss.backbone.predict(case.unet, noisy, times, given)
            ours, theirs = like_network(case, prediction, output)
            errors.append(float((ours - theirs).norm()))
            pair.append(theirs)
        # relative to the captions' effect, because float16 storage changes captions by about 2^-11
        effect = float((pair[0] - pair[1]).norm())
        print(
            f"{case.name} at {step.time:g}: {max(errors) / effect:.1e} of what captions change, "
            f"{max(errors) / float(pair[0].norm()):.1e} of the prediction"
        )
        assert max(errors) < 5e-3 * effect
