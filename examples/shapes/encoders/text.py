"""The demo's tokenizer and text encoder: a standard `CLIPTokenizer` and `CLIPTextModel` for the demo's vocabulary.

The encoder is trained so that a linear map can read a caption's five facts from the end-of-text token and from every
padding token after it. Only these tokens can attend to the whole caption, because attention is causal.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from examples.shapes.captions import FACTS, SYNONYMS, TEMPLATES, fill, stated_facts
from examples.shapes.scenes import BACKGROUNDS, COLOURS, OUTLINES, PLACES, SEEN, SIZES, sample_scene

NUM_TOKENS = 24
WIDTH = 64
EMPTY_FRACTION = 0.05
NAMES: dict[str, list[str]] = {
    "colour": ["unstated", *COLOURS],
    "shape": ["unstated", *OUTLINES],
    "background": ["unstated", *BACKGROUNDS],
    "size": ["unstated", *SIZES],
    "place": ["unstated", *PLACES],
}
START, END = "<|startoftext|>", "<|endoftext|>"


def build_tokenizer(folder: Path) -> CLIPTokenizer:
    """Build and save a byte-level BPE tokenizer with one token for each word in the demo; other words are split into
    bytes."""
    words = sorted({word for text in _all_texts() for word in text.replace(",", " , ").split()})
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=10_000, end_of_word_suffix="</w>", min_frequency=1))
    merges = [tuple(pair) for pair in json.loads(bpe.to_str())["model"]["merges"]]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*symbols, *(f"{symbol}</w>" for symbol in symbols), *dict.fromkeys(a + b for a, b in merges), START, END]
    with tempfile.TemporaryDirectory() as scratch:
        vocab_file, merges_file = Path(scratch, "vocab.json"), Path(scratch, "merges.txt")
        vocab_file.write_text(json.dumps({token: place for place, token in enumerate(tokens)}))
        merges_file.write_text("\n".join(["#version: 0.2", *(f"{a} {b}" for a, b in merges), ""]))
        tokenizer = CLIPTokenizer(str(vocab_file), str(merges_file), model_max_length=NUM_TOKENS)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _all_texts() -> list[str]:
    """Return texts that together contain every word that captions use."""
    names = [name for table in NAMES.values() for name in table[1:]]
    synonyms = [word for words in SYNONYMS.values() for word in words]
    return [*names, *synonyms, "a", "an", *(template.format_map(dict.fromkeys(FACTS, "")) for template in TEMPLATES)]


def labelled_captions(
    num_captions: int, rng: np.random.Generator, combinations: tuple[tuple[str, str], ...] = SEEN
) -> tuple[list[str], torch.Tensor]:
    """Write captions with their labels: (num_captions, 5) indices into NAMES, with 0 for facts that are not stated."""
    captions, labels = [], []
    for _ in range(num_captions):
        scene, template = sample_scene(rng, combinations), TEMPLATES[rng.integers(len(TEMPLATES))]
        if rng.random() < EMPTY_FRACTION:
            template = ""
        captions.append(fill(template, scene, rng))
        stated = stated_facts(template)
        labels.append([NAMES[fact].index(getattr(scene, fact)) if fact in stated else 0 for fact in FACTS])
    return captions, torch.tensor(labels)


def train_text_encoder(
    tokenizer: CLIPTokenizer, seed: int, num_steps: int, batch_size: int = 128, peak_lr: float = 2e-3
) -> CLIPTextModel:
    """Train a text encoder on captions of seen combinations, with a linear head for each fact."""
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, NUM_TOKENS])
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=NUM_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config)
    heads = nn.ModuleList(nn.Linear(WIDTH, len(NAMES[fact])) for fact in FACTS)
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=peak_lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=num_steps, pct_start=0.1)
    for step in range(num_steps):
        captions, labels = labelled_captions(batch_size, rng)
        token_ids = tokenize(tokenizer, captions)
        states = encoder(token_ids).last_hidden_state
        loss = _loss([head(states) for head in heads], labels, ends=token_ids == tokenizer.eos_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"text encoder step {step}: loss {loss.item():.4f}", flush=True)
    return encoder.eval()


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """Return token ids, (captions, NUM_TOKENS). As in Stable Diffusion, they are padded with the end-of-text token."""
    return tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids


def _loss(logits: list[torch.Tensor], labels: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy over the tokens marked in `ends`, (batch, tokens), summed over the facts."""
    labels = labels[:, None].expand(-1, ends.shape[1], -1)  # (batch, tokens, facts)
    losses = [F.cross_entropy(fact_logits[ends], labels[..., i][ends]) for i, fact_logits in enumerate(logits)]
    return torch.stack(losses).sum()
