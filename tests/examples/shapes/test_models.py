"""The committed models: they load normally, are small, and are good enough for the demo. test_judge.py checks what the
VAE reconstructs."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import CLIPTextModel, CLIPTokenizer

from examples.shapes.captions import FACTS
from examples.shapes.encoders.text import NUM_TOKENS, labelled_captions, tokenize
from examples.shapes.encoders.vae import draw_pictures
from examples.shapes.models import MODELS
from examples.shapes.scenes import HELD_OUT, SEEN

MAX_BYTES = 2 * 2**20


@pytest.fixture(scope="module")
def tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer.from_pretrained(MODELS / "tokenizer")


@pytest.fixture(scope="module")
def text_encoder() -> CLIPTextModel:
    return CLIPTextModel.from_pretrained(MODELS / "text_encoder", use_safetensors=True).eval()


def test_the_models_are_small() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= MAX_BYTES


def test_scaled_latents_have_unit_deviation() -> None:
    vae = AutoencoderKL.from_pretrained(MODELS / "vae", use_safetensors=True)
    with torch.no_grad():
        moments = [vae.encode(draw_pictures(64, side, seed=12)).latent_dist for side in (64, 128)]
    latents = torch.cat([moment.sample().movedim(1, -1).flatten(0, -2) for moment in moments])
    assert vae.config.shift_factor is None
    assert latents.std() * vae.config.scaling_factor == pytest.approx(1, abs=0.1)
    assert abs(vae.config.scaling_factor - 1) > 0.5  # so that a missing scaling factor is noticed


def test_the_tokenizer_covers_the_vocabulary_and_handles_other_words(
    tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel
) -> None:
    captions, _ = labelled_captions(500, np.random.default_rng(0))
    assert tokenizer.model_max_length == NUM_TOKENS == text_encoder.config.max_position_embeddings
    assert max(len(tokenizer(caption).input_ids) for caption in captions) <= NUM_TOKENS
    assert all(len(tokenizer.tokenize(word)) == 1 for caption in captions for word in caption.replace(",", "").split())
    assert tokenizer.decode(tokenizer("zebra ñ 雪").input_ids, skip_special_tokens=True).strip() == "zebra ñ 雪"


def test_every_fact_is_linearly_readable_for_held_out_combinations(
    tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel
) -> None:
    """Fit least squares on the last token's state for seen combinations, and evaluate it on held-out ones."""
    rng = np.random.default_rng(1)
    states, labels = _last_states(tokenizer, text_encoder, *labelled_captions(1500, rng, SEEN))
    unseen_states, unseen_labels = _last_states(
        tokenizer, text_encoder, *labelled_captions(300, rng, tuple(sorted(HELD_OUT)))
    )
    for i, fact in enumerate(FACTS):
        weights = torch.linalg.lstsq(states, nn.functional.one_hot(labels[:, i]).float()).solution
        accuracy = ((unseen_states @ weights).argmax(1) == unseen_labels[:, i]).float().mean()
        assert accuracy > 0.95, fact


def _last_states(
    tokenizer: CLIPTokenizer, text_encoder: CLIPTextModel, captions: list[str], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last tokens' states with a constant appended, (captions, width + 1), and the labels."""
    with torch.no_grad():
        states = text_encoder(tokenize(tokenizer, captions)).last_hidden_state[:, -1]
    return torch.cat([states, torch.ones(len(states), 1)], dim=1), labels
