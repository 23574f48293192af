"""Sampling gives the same images for any number of workers, any batch size, and after any interruption."""

import functools
import inspect
import io
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    PixArtSigmaPipeline,
    PNDMScheduler,
    StableDiffusionPipeline,
    UniPCMultistepScheduler,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from evaluation.__main__ import run as command
from evaluation.sampling.job import begin_set, describe_drawing, draw_on_worker
from evaluation.sampling.model import hash_pipeline, prepare_model
from evaluation.sampling.noise import initial_noise
from evaluation.sampling.pipeline import SCHEDULERS, draw, load_pipeline, sampler_of, to_bytes
from evaluation.sampling.prompts import Prompt
from evaluation.sampling.sets import list_samples, read_set, split
from evaluation.sampling.settings import SamplerName, SamplingConfig
from shards.base.errors import RequestError, WorkError, exit_code_of
from shards.open import open_store
from tests import ranks
from tests.evaluation.sets import PROMPTS, draw_here, pictures, run_here, sampling
from tests.fake_hub import connect, fake_hub, keep_downloads_in
from tests.runs import run_module

LEVEL = 1 / 255
"""Distance between two pixel levels."""


@pytest.fixture(scope="module")
def loaded(pipeline: Path) -> Any:
    """The pipeline in memory. Tests must not modify it."""
    return load_pipeline(pipeline, "cpu", "float32")


def drawn(pipeline: Path, loaded: Any, batch_size: int, **changes: object) -> torch.Tensor:
    """Draw every image in batches of the given size, and return them before rounding."""
    config = sampling(**changes)
    (setting,) = config.grid
    drawing = describe_drawing(pipeline, PROMPTS, config, setting)
    samples = list_samples(PROMPTS, config.images_per_prompt)
    parts = [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]
    own = loaded.scheduler
    loaded.scheduler = sampler_of(own, setting.sampler)
    try:
        return torch.cat([draw(loaded, part, drawing) for part in parts])
    finally:
        loaded.scheduler = own


@pytest.mark.parametrize("sampler", ["own", "ddpm", "euler_ancestral"])
def test_the_batch_size_does_not_change_the_pictures(pipeline: Path, loaded: Any, sampler: SamplerName) -> None:
    """Up to a thousandth of a level before rounding, including samplers that add noise at each step."""
    changes = {"sampler": [sampler], "steps": [2], "images_per_prompt": 1}
    alone, together = (drawn(pipeline, loaded, size, **changes) for size in (1, 4))
    assert (alone - together).abs().max() <= 1e-3 * LEVEL
    assert alone.std(0).mean() > 5 * LEVEL  # samples differ from each other


def test_each_sampler_is_built_for_the_pipeline(loaded: Any) -> None:
    """`sampler_of` also takes a step with it."""
    for name, class_name in SCHEDULERS.items():
        assert type(sampler_of(loaded.scheduler, name)).__name__ == class_name


def test_pictures_match_those_of_the_bare_pipeline(pipeline: Path, loaded: Any) -> None:
    found = drawn(pipeline, loaded, 5, images_per_prompt=1, guidance=[3.0], steps=[3])
    noise = torch.stack([initial_noise(0, prompt.id, 0, (4, 8, 8)) for prompt in PROMPTS])
    bare = loaded(
        [prompt.text for prompt in PROMPTS],
        height=64,
        width=64,
        latents=noise,
        num_inference_steps=3,
        guidance_scale=3.0,
        output_type="pt",
    )
    assert torch.equal(found, bare.images)


class RewritesPrompts(StableDiffusionPipeline):
    """A pipeline that cleans prompts by default, as PixArtSigmaPipeline does if ftfy and bs4 are installed."""

    def __call__(self, prompt: list[str], clean_caption: bool = True, **options: Any) -> Any:
        return super().__call__([text.replace("blobs", "") if clean_caption else text for text in prompt], **options)


def test_prompts_reach_the_text_encoder_unchanged(pipeline: Path, loaded: Any) -> None:
    """Stage 1 does not clean captions, so a pipeline must not clean prompts."""
    assert inspect.signature(PixArtSigmaPipeline.__call__).parameters["clean_caption"].default is True
    config = sampling(images_per_prompt=1)
    drawing = describe_drawing(pipeline, PROMPTS, config, config.grid[0])
    samples = list_samples(PROMPTS, 1)
    cleaning = RewritesPrompts.from_pretrained(pipeline, safety_checker=None)
    cleaning.set_progress_bar_config(disable=True)
    assert torch.equal(draw(cleaning, samples, drawing), draw(loaded, samples, drawing))
    prompts = [Prompt(prompt.id, prompt.text.replace("blobs", "")) for prompt in PROMPTS]
    shorter = list_samples(prompts, 1)
    assert not torch.equal(draw(loaded, shorter, drawing), draw(loaded, samples, drawing))


def test_pictures_are_rounded_and_stored_without_metadata(pipeline: Path, loaded: Any, tmp_path: Path) -> None:
    levels = torch.tensor([0.0, 0.4999, 0.5001, 1.2, 254.6, 255.0]) / 255
    assert to_bytes(levels.expand(1, 3, 1, 6))[0, 0, :, 0].tolist() == [0, 0, 1, 1, 255, 255]
    before = drawn(pipeline, loaded, 2)
    for codec in ("png", "webp"):
        found = pictures(draw_here(pipeline, tmp_path / codec, sampling(codec=codec)))
        assert len(found) == 10
        for number, name in enumerate(sorted(found)):
            assert name == f"{number:07d}.{codec}"
            picture = Image.open(io.BytesIO(found[name]))
            assert not set(picture.info) - {"loop", "background", "timestamp", "duration"} and not picture.getexif()
            assert np.array_equal(np.asarray(picture), to_bytes(before[number : number + 1])[0].numpy())


def test_the_part_size_does_not_change_the_files(pipeline: Path, tmp_path: Path) -> None:
    first = pictures(draw_here(pipeline, tmp_path / "a", sampling(part_size=4), PROMPTS[:3]))
    second = pictures(draw_here(pipeline, tmp_path / "b", sampling(part_size=6), PROMPTS[:3]))
    assert first == second and len(first) == len(set(first.values())) == 6  # images of a prompt differ


def test_a_sample_set_continues_only_with_the_same_settings(pipeline: Path, tmp_path: Path) -> None:
    place = draw_here(pipeline, tmp_path, sampling())
    assert draw_here(pipeline, tmp_path, sampling(batch_size=5)) == place
    for changes, prompts, message in (
        ({"guidance": [2.0]}, PROMPTS, r"different settings: drawing\.setting\.guidance: 3\.0 ≠ 2\.0; "),
        ({"seed": 4}, PROMPTS, r"different settings: drawing\.seed: 0 ≠ 4; "),
        ({"part_size": 5}, PROMPTS, r"different settings: part_size: 4 ≠ 5 \("),
        ({}, PROMPTS[:4], r"different settings: drawing\.num_samples: .*; prompts: a list of 5 ≠ a list of 4"),
    ):
        with pytest.raises(RequestError, match=message):
            draw_here(pipeline, tmp_path, sampling(**changes), prompts)


def test_a_part_that_another_job_has_drawn_needs_no_model(pipeline: Path, tmp_path: Path) -> None:
    """A watcher deletes the model once all parts are drawn, and a second watcher may be about to draw them, too."""
    drawing = describe_drawing(pipeline, PROMPTS, sampling(precision="float32"), sampling().grid[0])
    model = prepare_model(str(pipeline), None, "auto", open_store(tmp_path))
    parts = begin_set(tmp_path / "set", drawing, model, PROMPTS, sampling())
    draw_on = functools.partial(draw_on_worker, output=tmp_path, batch_size=2, device="cpu", trust_remote_code=False)
    for _, part in parts:
        receipt = draw_on(model, part=part, attempt=1, report=lambda count: None)
        deleted = replace(model, step=5)  # a run's checkpoint, whose export is not at `output`
        assert draw_on(deleted, part=part, attempt=1, report=lambda count: None) == receipt
    with pytest.raises(WorkError, match="does not contain the model to sample"):
        draw_on(deleted, part=replace(part, name="00009"), attempt=1, report=lambda count: None)


def test_an_incomplete_sample_set(pipeline: Path, tmp_path: Path) -> None:
    place = draw_here(pipeline, tmp_path, sampling())
    assert [len(receipt["samples"]) for receipt in read_set(place).parts.values()] == [4, 4, 2]
    (place / "receipts" / "pictures" / "00001.json").unlink()
    with pytest.raises(WorkError, match="has only 6 of 10 images"):
        read_set(place)
    draw_here(pipeline, tmp_path, sampling())
    assert read_set(place).prompts == PROMPTS
    with pytest.raises(RequestError, match="is not a sample set"):
        read_set(tmp_path)


def test_settings_that_the_model_does_not_support_are_refused(pipeline: Path) -> None:
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    assert sampler_of(scheduler, "own") is scheduler
    with pytest.raises(RequestError, match="flow matching, which the sampler ddim does not support"):
        sampler_of(scheduler, "ddim")
    config = sampling(guidance_input=3.5)
    with pytest.raises(RequestError, match=r"guidance_input is 3\.5, but the network in .* takes no"):
        describe_drawing(pipeline, PROMPTS, config, config.grid[0])


@pytest.mark.parametrize(
    "scheduler_class",
    [DPMSolverMultistepScheduler, EulerDiscreteScheduler, PNDMScheduler, UniPCMultistepScheduler],
)
@pytest.mark.parametrize("name", ["ddim", "ddpm"])
def test_a_named_sampler_clips_latents_only_if_the_pipeline_does(scheduler_class: Any, name: SamplerName) -> None:
    """These classes have no such setting, but it is true by default in DDIM and DDPM."""
    assert sampler_of(scheduler_class(), name).config.clip_sample is False
    for clips in (False, True):
        assert sampler_of(DDIMScheduler(clip_sample=clips), name).config.clip_sample is clips


@pytest.mark.parametrize(
    ("scheduler", "name", "message"),
    [
        (
            DDIMScheduler(
                prediction_type="v_prediction",
                beta_schedule="scaled_linear",
                beta_start=0.00085,
                beta_end=0.012,
                rescale_betas_zero_snr=True,
            ),
            "heun",
            "The sampler heun cannot use the noise schedule of the pipeline's DDIMScheduler",
        ),
        (EDMEulerScheduler(), "ddim", "The sampler ddim cannot use the noise schedule of the pipeline's EDMEuler"),
        (EDMEulerScheduler(), "euler", "The sampler euler cannot use the noise schedule of the pipeline's EDMEuler"),
        (DDIMScheduler(prediction_type="sample"), "euler_ancestral", "prediction_type not implemented yet: sample"),
        (DDPMScheduler(beta_schedule="sigmoid"), "dpm_solver", "sigmoid is not implemented"),
    ],
)
def test_a_sampler_that_would_sample_wrongly_is_refused(scheduler: Any, name: SamplerName, message: str) -> None:
    with pytest.raises(RequestError, match=rf"{message}.* Set sampling\.sampler to `own`"):
        sampler_of(scheduler, name)


def test_building_a_sampler_does_not_change_the_random_state() -> None:
    before = torch.random.get_rng_state()
    for name in ("ddpm", "euler_ancestral"):
        sampler_of(DDIMScheduler(), name)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_empty_and_a_missing_negative_prompt_are_different_settings(pipeline: Path) -> None:
    ids = {
        describe_drawing(pipeline, PROMPTS, config, config.grid[0]).id
        for config in (sampling(), sampling(negative_prompt=""), sampling(negative_prompt="blurry"))
    }
    assert len(ids) == 3


def arguments(pipeline: Path, output: Path, *more: str) -> list[str]:
    """Return arguments of `evaluation sample` that match the settings of `sampling`, on the CPU."""
    prompts = output.parent / "prompts.json"
    prompts.write_text("{" + ", ".join(f'"{p.id}": {{"prompt": "{p.text}"}}' for p in PROMPTS) + "}")
    words = ["sample", "--model", str(pipeline), "--output", str(output), "--prompts.file", str(prompts)]
    words += ["--sampling.size", "64x64", "--sampling.images_per_prompt", "2", "--sampling.steps", "2"]
    words += ["--sampling.batch_size", "2", "--sampling.part_size", "2"]
    return [*words, "--workers.num_gpus", "0", "--workers.num_cpus", "1", *more]


def test_a_hub_pipeline_gives_the_same_pictures_as_its_folder(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command downloads the pipeline, and workers load it by its name."""
    monkeypatch.setattr("evaluation.sampling.job.run_units", run_here)
    keep_downloads_in(monkeypatch, tmp_path / "cache")
    words = arguments(pipeline, tmp_path / "out", "--model", "someone/a-pipeline", "--sampling.guidance", "1,4")
    with fake_hub(pipeline) as hub:
        connect(monkeypatch, hub)
        command(words)
    printed = capsys.readouterr().out
    assert "g1-s2-own: 10 images" in printed and "g4-s2-own: 10 images" in printed
    found = read_set(tmp_path / "out" / "g1-s2-own")
    assert (found.model.name, found.model.content) == ("someone/a-pipeline", hash_pipeline(pipeline))
    drawn = [pictures(tmp_path / "out" / f"g{guidance}-s2-own") for guidance in (1, 4)]
    here = [
        pictures(draw_here(pipeline, tmp_path / str(guidance), sampling(part_size=2, guidance=[guidance])))
        for guidance in (1.0, 4.0)
    ]
    assert drawn == here and drawn[0].keys() == drawn[1].keys() and drawn[0] != drawn[1]


@pytest.mark.slow
def test_killed_at_random_times_with_one_two_and_four_workers(pipeline: Path, tmp_path: Path) -> None:
    """Jobs are killed while they start, or after they have committed one more of the ten parts.

    Each worker has one thread. With two, sums are rounded differently, so a few pixels may differ by one level.
    """
    expected = pictures(draw_here(pipeline, tmp_path / "here", sampling(part_size=2, guidance=[1.0])))
    out = tmp_path / "out"
    words = arguments(pipeline, out, "--sampling.guidance", "1,4")

    def count_parts() -> int:
        return len(list(out.glob("*/receipts/pictures/*.json")))

    rng, kills = random.Random(0), 0
    for num, num_cpus in enumerate(("0.5", "1", "1.5") * 2):  # 4, 2 and 1 workers at once on two cores
        flags, before = [*words, "--workers.num_cpus", num_cpus], count_parts()
        (job,) = ranks.start(tmp_path / "log", flags, program="evaluation.__main__:run")
        if num % 2:
            job.join(rng.uniform(1, 5))
        while num % 2 == 0 and job.exitcode is None and count_parts() == before:
            time.sleep(0.02)
        if job.exitcode is None:
            assert job.pid is not None
            os.killpg(job.pid, signal.SIGKILL)
            kills += 1
        job.join()
    assert kills >= 4
    done = run_module("evaluation", *words)
    assert done.returncode == 0, done.stderr
    assert pictures(tmp_path / "out" / "g1-s2-own") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "/absent"], "The model /absent is neither an existing folder nor a hub name"),
        (["--sampling.sampler", "magic"], "sampling.sampler"),
        (["--sampling.size", "64"], "is not a bucket: write WIDTHxHEIGHT"),
        (["--prompts.file", "/absent.txt"], "The prompt file /absent.txt does not exist"),
    ],
)
def test_invalid_requests_write_nothing(
    pipeline: Path, tmp_path: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of(lambda: command(arguments(pipeline, tmp_path / "out", *change))) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not list((tmp_path / "out").rglob("*.png"))


def test_the_grid_has_each_combination_once() -> None:
    config = SamplingConfig(guidance=[1, 7.5, 1], steps=[10, 50], sampler=["own", "ddim"])
    assert [str(setting) for setting in config.grid][:3] == ["g1-s10-own", "g1-s10-ddim", "g1-s50-own"]
    assert len(config.grid) == 8


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 50))
@example(30_000, 1, 256)  # MLPerf's prompts
def test_each_sample_is_in_exactly_one_part(count: int, per_prompt: int, part_size: int) -> None:
    """For any part size, there is no padding and no duplicate."""
    prompts = [Prompt(str(i), "x") for i in range(count)]
    samples = list_samples(prompts, per_prompt)
    parts = [part for _, part in split(samples, part_size)]
    drawn = [(sample.prompt.id, sample.index) for part in parts for sample in part]
    assert drawn == [(str(i), index) for i in range(count) for index in range(per_prompt)]
    assert [sample.number for part in parts for sample in part] == list(range(len(drawn)))
    assert max(map(len, parts)) <= part_size
