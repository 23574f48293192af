"""Encoders: independence from the rest of the batch, order of work on the device, and kernels."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import CLIPTokenizer, CLIPTokenizerFast

from examples.shapes.encoders.text import labelled_captions
from examples.shapes.encoders.vae import draw_pictures
from examples.shapes.models import MODELS
from precompute.describe import TextConfig, TextTowerConfig, describe_image, describe_text
from precompute.encode import networks
from precompute.encode.encoders import (
    ImageEncoder,
    TextEncoder,
    TowerCaption,
    attend_by_products,
)
from precompute.encode.networks import DeviceSettings, Network, Precision, autocast
from precompute.encode.recipe import WorkerConfig
from precompute.encode.towers import TextTowers, Towers
from precompute.encode.worker import compile_now
from shards.base.errors import RequestError, UnfitNode
from shards.format.buckets import Bucket
from tests.graphs import Graphs

CPU = torch.device("cpu")
BATCH = 8
LARGEST = {"float32": 3e-3, "bfloat16": 0.05}
"""Largest allowed difference in standard deviations of the latents. docs/evidence/encoding.md has measurements."""


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    """BATCH images of the demo, 64 px."""
    scaled = draw_pictures(BATCH, 64, seed=5)
    return list(((scaled + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy())


@pytest.fixture(scope="module")
def captions() -> list[str]:
    """BATCH captions of the demo."""
    return [caption or "nothing" for caption in labelled_captions(BATCH, np.random.default_rng(5))[0]]


def image_encoder(
    precision: Precision,
    folder: Path = MODELS / "vae",
    posterior: Literal["moments", "mean"] | None = None,
    **options: Any,
) -> ImageEncoder:
    how = dict.fromkeys(("crop", "resampling", "decoder", "resampler", "color"), "")
    tower = describe_image(str(folder), posterior, **how)
    return ImageEncoder(folder, tower, DeviceSettings(CPU, precision, **options))


def text_encoder(precision: Precision, models: Path = MODELS, **options: Any) -> TextEncoder:
    folder, tokenizer = models / "text_encoder", models / "tokenizer"
    asked = TextTowerConfig(model=str(folder), tokenizer=str(tokenizer), class_name="CLIPTextModel")
    tower = describe_text("text", asked, TextConfig())
    return TextEncoder(folder, tokenizer, tower, DeviceSettings(CPU, precision, **options))


def test_a_template_beyond_the_last_position_is_refused() -> None:
    asked = TextTowerConfig(
        model=str(MODELS / "text_encoder"),
        tokenizer=str(MODELS / "tokenizer"),
        class_name="CLIPTextModel",
        template="a photo of {}",
        beyond_template=True,
    )
    with pytest.raises(RequestError, match="tokens requested, including those of the template"):
        describe_text("text", asked, TextConfig())


def states(encoded: TowerCaption) -> Tensor:
    assert encoded.latents.states is not None
    return encoded.latents.states


def test_weights_are_not_rounded_to_the_data_type_of_their_config(tmp_path: Path, captions: list[str]) -> None:
    """encoding.json ignores this data type."""
    shutil.copytree(MODELS, tmp_path / "models")
    config = tmp_path / "models" / "text_encoder" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    found = text_encoder("float32", tmp_path / "models")(captions, BATCH)
    expected = text_encoder("float32")(captions, BATCH)
    assert all(states(one).equal(states(two)) for one, two in zip(found, expected, strict=True))


def share_of_deviation(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().std())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_neighbours_do_not_matter_beyond_rounding(
    pictures: list[np.ndarray], captions: list[str], precision: Precision
) -> None:
    """Each sample of a full batch equals the same sample alone, in a padded batch and in a batch of one."""
    image, text = image_encoder(precision), text_encoder(precision)
    together = list(zip(image(pictures, BATCH), text(captions, BATCH), strict=True))
    for number in (0, 3, BATCH - 1):
        image_latents, encoded = together[number]
        for batch_size in (BATCH, 1):
            assert share_of_deviation(image([pictures[number]], batch_size)[0], image_latents) < LARGEST[precision]
            alone = states(text([captions[number]], batch_size)[0])
            assert share_of_deviation(alone, states(encoded)) < LARGEST[precision]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_position_in_a_batch_does_not_matter_beyond_rounding(
    pictures: list[np.ndarray], captions: list[str], precision: Precision
) -> None:
    image, text = image_encoder(precision), text_encoder(precision)
    first = image([pictures[3], *pictures[4:]], BATCH)[0], states(text([captions[3], *captions[4:]], BATCH)[0])
    last = image(pictures[:4], BATCH)[-1], states(text(captions[:4], BATCH)[-1])  # padded with copies of the last one
    for one, other in zip(first, last, strict=True):
        assert share_of_deviation(one, other) < LARGEST[precision]


@pytest.mark.parametrize(("precision", "kept"), [("bfloat16", False), ("float16", True)])
def test_lowered_weights_equal_those_that_autocast_casts(
    pictures: list[np.ndarray],
    captions: list[str],
    precision: Precision,
    kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The float32 weights are kept only where samples may overflow."""
    image, text = image_encoder(precision), text_encoder(precision)
    assert (image.lowered is not image.model) == kept
    assert (image.model.get_submodule("encoder.conv_in").weight.dtype == torch.float32) == kept
    fast = image(pictures, BATCH), text(captions, BATCH)
    monkeypatch.setattr(networks, "lowered", lambda model, _: model)
    assert torch.equal(fast[0], image_encoder(precision)(pictures, BATCH))
    for one, other in zip(fast[1], text_encoder(precision)(captions, BATCH), strict=True):
        assert torch.equal(states(one), states(other))


def test_batches_in_flight_do_not_mix(pictures: list[np.ndarray], captions: list[str]) -> None:
    """Several batches are started before the first is waited for, and waited for in any order."""
    image, text = image_encoder("bfloat16"), text_encoder("bfloat16")
    begun = [image.start_batch(image.stack(pictures[i : i + 2], 4), 2) for i in (0, 2, 4)]
    begun_texts = [text.start_batch(captions[i : i + 2], 4) for i in (0, 2, 4)]
    for place, i in ((2, 4), (0, 0), (1, 2)):
        assert torch.equal(begun[place](), image(pictures[i : i + 2], 4))
        for one, other in zip(begun_texts[place](), text(captions[i : i + 2], 4), strict=True):
            assert torch.equal(states(one), states(other))
            assert one.latents.num_tokens == other.latents.num_tokens


def test_rows_that_overflow_are_encoded_again_in_float32(
    pictures: list[np.ndarray], captions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(run: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        def overflow(inputs: list[Tensor], precision: Precision) -> tuple[Tensor, ...]:
            assert len(inputs[0]) == 4, "a batch that is not filled"
            (latents,) = run(inputs, precision)
            if precision == "float16":
                latents[1] = 1e6  # beyond float16
            return (latents,)

        return overflow

    image, text = image_encoder("float16"), text_encoder("float16")
    monkeypatch.setattr(image, "_run", overflowing(image._run))
    monkeypatch.setattr(text, "_run", overflowing(text._run))
    second = image(pictures[:3], 4)[1], states(text(captions[:3], 4)[1])
    exact = image_encoder("float32")(pictures[:3], 4)[1], states(text_encoder("float32")(captions[:3], 4)[1])
    for found, expected in zip(second, exact, strict=True):
        assert found.isfinite().all() and share_of_deviation(found, expected) < LARGEST["float32"]


def test_rows_that_overflow_in_float32_too_stay_infinite(pictures: list[np.ndarray]) -> None:
    encoder = image_encoder("float16")
    encoder._run = lambda inputs, precision: (torch.full((len(inputs[0]), 8, 8, 8), 1e6),)  # type: ignore[method-assign]
    assert encoder(pictures, BATCH).isinf().all()


def test_rows_that_overflow_in_bfloat16_are_not_encoded_again(
    pictures: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 has float32's range, so encoding them again would not help."""
    encoder, ran = image_encoder("bfloat16"), []
    run = encoder._run

    def overflow(inputs: list[Tensor], precision: Precision) -> tuple[Tensor, ...]:
        ran.append(precision)
        (latents,) = run(inputs, precision)
        latents[1] = 1e6
        return (latents,)

    monkeypatch.setattr(encoder, "_run", overflow)
    found = encoder(pictures[:3], 4)
    assert ran == ["bfloat16"]
    assert found[0].isfinite().all() and found[1].isinf().all() and found[2].isfinite().all()


def test_the_mean_is_that_of_diffusers(pictures: list[np.ndarray], models: Path) -> None:
    scaled = torch.tensor(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        mean = AutoencoderKL.from_pretrained(models / "vae").encode(scaled).latent_dist.mean
    found = image_encoder("float32", models / "vae", "mean")(pictures, BATCH)
    torch.testing.assert_close(found.float(), mean, rtol=2e-3, atol=2e-3)


def test_captions_are_truncated_and_padded_as_by_the_tokenizer(models: Path) -> None:
    """The tiny tokenizer has one token per character and a maximum of 16."""
    encoder = text_encoder("float32", models)
    tokenizer = CLIPTokenizer.from_pretrained(models / "tokenizer")
    captions = ["", "a", "x" * 13, "x" * 14, "x" * 15, "x" * 40]
    expected = tokenizer(captions, padding="max_length", max_length=16, truncation=True).input_ids
    fed: list[Tensor] = []
    start = encoder.start
    encoder.start = lambda inputs, count: fed.append(inputs[0]) or start(inputs, count)  # type: ignore
    encoded = encoder(captions, 8)
    assert fed[0][:6].tolist() == expected
    assert [(row.latents.num_tokens, row.truncated) for row in encoded] == [
        *[(2, False), (3, False), (15, False), (16, False), (16, True), (16, True)]
    ]


def odd_captions(number: int) -> list[str]:
    """Captions of arbitrary characters: scripts, emoji, control characters, long runs, or empty."""
    random = np.random.default_rng(7)
    ranges = [(32, 127), (0, 0x250), (0x370, 0x600), (0x900, 0xE00), (0x3040, 0xD7A4), (0x1F300, 0x1FAFF), (32, 34)]
    captions = []
    for _ in range(number):
        first, last = ranges[random.integers(len(ranges))]
        captions.append("".join(map(chr, random.integers(first, last, random.integers(0, 60)))))
    return captions


def test_ids_are_the_tokenizers_own_on_odd_captions() -> None:
    encoder, captions = text_encoder("float32"), odd_captions(500)
    # transformers 4 also has one in Python, which splits odd captions differently
    tokenizer = CLIPTokenizerFast.from_pretrained(MODELS / "tokenizer")
    length = encoder.tower.max_tokens
    for first in range(0, len(captions), 64):
        batch = captions[first : first + 64]
        expected = tokenizer(batch, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        ids, mask, truncated = encoder.tokenize(batch, 64)
        assert torch.equal(ids[: len(batch)], expected.input_ids)
        assert torch.equal(mask[: len(batch)], expected.attention_mask)
        assert truncated == [len(row) > length for row in tokenizer(batch, verbose=False).input_ids]


def test_a_compiled_encoder_gives_the_same(
    pictures: list[np.ndarray], captions: list[str], models: Path, tmp_path: Path, graphs: Graphs
) -> None:
    """The graph can be traced, and the compiled one is used."""
    vae, small = attending_vae(tmp_path, 8) / "vae", [picture[::4, ::4] for picture in pictures]
    image, text = image_encoder("float32", vae, compiled=True), text_encoder("float32", models, compiled=True)
    assert torch.equal(image(small, BATCH), image_encoder("float32", vae)(small, BATCH))
    num_image_graphs = len(graphs.captured)
    for one, other in zip(text(captions, BATCH), text_encoder("float32", models)(captions, BATCH), strict=True):
        assert torch.equal(states(one), states(other))
    assert 0 < num_image_graphs < len(graphs.captured)


def attending_vae(folder: Path, channels: int) -> Path:
    """A VAE whose middle block attends with one head over all channels, like Stable Diffusion's."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=[channels], norm_num_groups=4, layers_per_block=1, mid_block_add_attention=True
    )
    vae.save_pretrained(folder / "vae")
    return folder


def test_attention_takes_the_fused_kernel(models: Path, captions: list[str], tmp_path: Path) -> None:
    """In CLIP, and in the middle block of a VAE."""
    attending_vae(tmp_path, 8)
    image = image_encoder("bfloat16", tmp_path / "vae")
    text = text_encoder("bfloat16", models)
    for encode in (lambda: image([np.zeros((16, 16, 3), np.uint8)], 1), lambda: text(captions, BATCH)):
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            encode()
        kernels = {event.name for event in profiler.events()}
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in kernels, kernels
        assert not kernels & {"aten::baddbmm", "aten::_scaled_dot_product_attention_math"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_wide_heads_attend_by_products_within_rounding(
    pictures: list[np.ndarray], precision: Precision, tmp_path: Path
) -> None:
    """As on a GPU, whose fused kernels support up to 256 channels. Stable Diffusion's VAE has 512 in its middle."""
    vae = attending_vae(tmp_path, 264) / "vae"
    fused, products = image_encoder(precision, vae), image_encoder(precision, vae)
    attend_by_products(products.model)
    attend_by_products(products.lowered)
    small = [picture[::4, ::4] for picture in pictures[:2]]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        found = products(small, 2)
    kernels = {event.name for event in profiler.events()}
    assert "aten::baddbmm" in kernels and not any("scaled_dot_product" in name for name in kernels)
    assert share_of_deviation(found, fused(small, 2)) < LARGEST[precision]


def test_narrow_heads_keep_the_fused_kernel_and_a_cpu_every_head(tmp_path: Path) -> None:
    narrow = Attention(8, heads=2, dim_head=256)
    attend_by_products(narrow)
    assert type(narrow.processor) is AttnProcessor2_0
    wide = image_encoder("float32", attending_vae(tmp_path / "wide", 264) / "vae")
    assert {type(module.processor) for module in wide.model.modules() if isinstance(module, Attention)} == {
        AttnProcessor2_0
    }


class Doubled(torch.nn.Module):
    """A network that torch 2.11 compiles; it does not compile a bare layer of torch.nn."""

    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


def test_a_network_is_compiled_for_every_shape(graphs: Graphs) -> None:
    """By default torch.compile gives up after eight shapes, and only logs it."""
    settings = DeviceSettings(CPU, "float32", compiled=True)
    network = Network(Doubled(), lambda model, values: (model(values),), settings)
    for length in range(1, 13):
        network.start((torch.zeros(1, length, 2),), 1)()
    assert len(graphs.captured) == 12


def test_towers_are_warmed_up_once_for_every_bucket_and_for_captions(models: Path) -> None:
    image, text = image_encoder("float32", models / "vae"), text_encoder("float32", models)
    towers, started = Towers({"text": text}, 2, image=image, features={}), []
    for network in (image, text):
        start = network.start
        network.start = lambda inputs, count, start=start: started.append(inputs[0].shape) or start(inputs, count)  # type: ignore
    buckets = [Bucket(8, 8), Bucket(16, 8)]
    for _ in range(2):
        towers.warm_up(buckets)
    assert [tuple(shape) for shape in started] == [(2, 16), (2, 8, 8, 3), (2, 8, 16, 3)]


def test_a_node_that_cannot_compile_says_what_it_lacks(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    text = text_encoder("float32", models, compiled=True)
    with pytest.raises(
        UnfitNode, match=r"torch\.compile failed on the node .*Failed to find C compiler.*workers\.compile to"
    ):
        compile_now(TextTowers({"text": text}, batch_size=2))


def test_towers_are_compiled_on_gpus_by_default() -> None:
    cuda = torch.device("cuda")
    assert [WorkerConfig(compile=said).compiles(cuda) for said in (None, True, False)] == [True, True, False]
    assert [WorkerConfig(compile=said).compiles(CPU) for said in (None, True, False)] == [False, True, False]


def test_convolutions_in_float32_are_not_rounded_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    image_encoder("float32")
    assert not torch.backends.cudnn.allow_tf32


def test_autocast_is_off_in_float32() -> None:
    with autocast(CPU, "float32"):
        assert not torch.is_autocast_enabled("cpu")
