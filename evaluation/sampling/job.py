"""A sample set for every setting: which parts are missing, and a fleet of workers on them."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.fleet import FleetConfig
from cluster.start import precision_on_worker
from evaluation.parts import Receipt, read_receipts, read_sealed, write_once
from evaluation.sampling.model import Model, opened
from evaluation.sampling.pipeline import Sample, describe, has_guidance_input, load_scheduler, sampler_of
from evaluation.sampling.prompts import Prompt, prompts_sha256
from evaluation.sampling.settings import Drawing, SamplingConfig, Setting
from evaluation.sampling.worker import PICTURES, Part, Recipe, draw_on_worker
from evaluation.units import run_units
from shards.base.config import flatten
from shards.base.device import Precision, worker_device
from shards.base.errors import RequestError, WorkError
from shards.base.store import Store
from shards.open import open_store

RECORD = "sampling.json"
FIXED = ("model", "drawing", "part_size")


@dataclass(frozen=True)
class SampleSet:
    """Pictures of one model under one setting, as they are on disk once all are drawn."""

    place: Path | str
    drawing: dict[str, Any]
    drawing_id: str
    model: Model
    prompts: list[Prompt]
    parts: dict[str, Receipt]
    """Name → receipt, in the samples' order."""


def below(place: Path | str, name: str) -> Path | str:
    """A folder in a folder, or at an address."""
    return place / name if isinstance(place, Path) else f"{place}/{name}"


def draw_sets(
    model: Model,
    prompts: list[Prompt],
    config: SamplingConfig,
    output: Path | str,
    workers: FleetConfig,
    trust_remote_code: bool = False,
) -> list[Path | str]:
    """Draw what is missing of each setting's sample set; returns where they are.

    Raises:
        RequestError: a set was begun with other prompts or settings.
        WorkError: parts failed.
    """
    store = open_store(output)
    config = config.model_copy(update={"precision": resolved_precision(config, output, workers)})
    with opened(model, store) as folder:
        drawings = [describe_drawing(folder, prompts, config, setting) for setting in config.grid]
    units: list[tuple[str, Part]] = []
    places = []
    for drawing in drawings:
        places.append(place := below(output, str(drawing.setting)))
        units += begin_set(place, drawing, model, prompts, config)
    device = worker_device(workers.num_gpus)
    recipe = Recipe(model, output, config.batch_size, device, workers.num_cpus, trust_remote_code)
    run_units(units, partial(draw_on_worker, recipe=recipe), workers, "sample")
    return places


def resolved_precision(config: SamplingConfig, output: Path | str, workers: FleetConfig) -> Precision:
    """Return the precision given; or for `auto`, that of a sample set begun before, or what suits a worker's device."""
    asked = config.precision
    if asked == "auto":
        begun = (read_sealed(open_store(below(output, str(setting))), RECORD) for setting in config.grid)
        asked = next((record["drawing"]["precision"] for record in begun if record), asked)
    return precision_on_worker(asked, workers)


def describe_drawing(folder: Path, prompts: list[Prompt], config: SamplingConfig, setting: Setting) -> Drawing:
    """Describe everything that a setting's pictures depend on, except for the model.

    Raises:
        RequestError: a setting that this model does not have.
    """
    own = load_scheduler(folder)
    assert config.precision != "auto", "it must be resolved first"
    if config.guidance_input is not None and not has_guidance_input(folder):
        raise RequestError(
            f"sampling.guidance_input is {config.guidance_input:g}, but the network in {folder} takes no guidance "
            f"as an input, so it would have no effect. Leave it out; sampling.guidance sets classifier-free guidance."
        )
    return Drawing(
        prompts=prompts_sha256(prompts),
        seed=config.seed,
        images_per_prompt=config.images_per_prompt,
        num_samples=len(prompts) * config.images_per_prompt,
        size=config.size,
        setting=setting,
        scheduler=describe(sampler_of(own, setting.sampler)),
        negative_prompt=config.negative_prompt,
        guidance_input=config.guidance_input,
        precision=config.precision,
        codec=config.codec,
    )


def begin_set(
    place: Path | str, drawing: Drawing, model: Model, prompts: list[Prompt], config: SamplingConfig
) -> list[tuple[str, Part]]:
    """Write down what a set is, where it is new; returns the parts that are missing."""
    store = open_store(place)
    content = {
        "drawing": drawing.as_json(),
        "drawing_id": drawing.id,
        "model": asdict(model),
        "part_size": config.part_size,
        "prompts": [asdict(prompt) for prompt in prompts],
    }
    write_once(store, RECORD, content, lambda found: _another(store, found, content))
    samples = list_samples(prompts, config.images_per_prompt)
    parts = [Part(name, place, drawing, tuple(its)) for name, its in split(samples, config.part_size)]
    committed = read_receipts(store, PICTURES, [part.name for part in parts])
    return [(f"{drawing.setting} {part.name}", part) for part in parts if part.name not in committed]


def list_samples(prompts: list[Prompt], images_per_prompt: int) -> list[Sample]:
    """Every picture of a set, in order: each prompt's one after another."""
    pairs = [(prompt, index) for prompt in prompts for index in range(images_per_prompt)]
    return [Sample(number, prompt, index) for number, (prompt, index) in enumerate(pairs)]


def split(samples: list[Sample], part_size: int) -> list[tuple[str, list[Sample]]]:
    """Samples in parts, each with its name; the last may be shorter."""
    starts = range(0, len(samples), part_size)
    return [(f"{number:05d}", samples[start : start + part_size]) for number, start in enumerate(starts)]


def _another(store: Store, found: dict[str, Any], content: dict[str, Any]) -> RequestError:
    before, now = (flatten({name: record[name] for name in FIXED}) for record in (found, content))
    differ = ", ".join(name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name))
    return RequestError(
        f"{store.where()} was begun with other settings: {differ or 'its prompts'} differ. Give another --output, or "
        f"the settings that it was begun with."
    )


def read_set(place: Path | str) -> SampleSet:
    """A sample set of which every picture is there.

    Raises:
        RequestError: there is no sample set.
        WorkError: parts of it are missing.
    """
    store = open_store(place)
    if (content := read_sealed(store, RECORD)) is None:
        raise RequestError(f"{store.where()} is no sample set: it has no {RECORD}.")
    count, size = content["drawing"]["num_samples"], content["part_size"]
    names = [f"{number:05d}" for number in range(-(-count // size))]
    parts = read_receipts(store, PICTURES, names)
    drawn = sum(len(receipt["samples"]) for receipt in parts.values())
    if drawn != count:
        raise WorkError(
            f"{store.where()} has {drawn} of {count} pictures: a metric over these would be another one. The same "
            f"`sample` command draws the rest."
        )
    prompts = [Prompt(**prompt) for prompt in content["prompts"]]
    return SampleSet(place, content["drawing"], content["drawing_id"], Model(**content["model"]), prompts, parts)
