"""A text encoder of CLIP-L's width trained on English, for benchmarks that need states with a realistic spectrum.

No pretrained encoder is part of this project. This one is trained here, as a language model on WordNet's definitions
(Debian's wordnet-base), so its states encode what is needed to predict the next word of an English sentence.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from examples.shapes.encoders.text import save_tokenizer
from shards.base.device import resolve_precision
from shards.base.errors import RequestError

WORDNET = Path("/usr/share/wordnet")
WORDS = ("noun", "verb", "adj", "adv")
VOCABULARY, LENGTH, WIDTH, LAYERS = 8192, 77, 768, 4
BATCH, LEARNING_RATE, WARMUP = 16, 5e-4, 100


def definitions(folder: Path = WORDNET) -> list[str]:
    """Return the definitions and examples of WordNet's entries. Raises RequestError if WordNet is not installed."""
    found = []
    for word in WORDS:
        path = folder / f"data.{word}"
        if not path.is_file():
            raise RequestError(f"{path} does not exist. Install WordNet: apt-get install wordnet-base.")
        for line in path.read_text(errors="replace").splitlines():
            if not line.startswith(" ") and "|" in line:
                found.append(line.partition("|")[2].strip().replace('"', ""))
    return found


def build_tokenizer(texts: Sequence[str], folder: Path) -> CLIPTokenizer:
    """Train a byte-level BPE tokenizer on `texts`, and save it in `folder`."""
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ascii_only = [re.sub(r"[^ -~]", " ", text) for text in texts]
    size = VOCABULARY - 2 * 256 - 2
    bpe.train_from_iterator(ascii_only, trainers.BpeTrainer(vocab_size=size, end_of_word_suffix="</w>"))
    return save_tokenizer(bpe, LENGTH, folder)


def make_encoder(folder: Path, steps: int, seed: int = 0) -> None:
    """Train a causal language model on WordNet's definitions for `steps` steps of BATCH × LENGTH tokens, and save it
    and its tokenizer in `folder`/text_encoder and `folder`/tokenizer."""
    texts = definitions()
    tokenizer = build_tokenizer(texts, folder / "tokenizer")
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        max_position_embeddings=LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = CLIPTextModel(config)
    shuffled = [texts[place] for place in torch.randperm(len(texts)).tolist()]
    ids = torch.tensor([token for row in tokenizer(shuffled, verbose=False).input_ids for token in row])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, max(0.05, 1 - step / steps))
    )
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    in_bfloat16 = resolve_precision("auto", "cpu") == "bfloat16"
    for step in range(steps):
        batch = rows[torch.arange(step * BATCH, (step + 1) * BATCH) % len(rows)]
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            states = model(batch).last_hidden_state
            logits = (states @ model.get_input_embeddings().weight.T).float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"language model, step {step}: {loss.item():.3f} nats per token", flush=True)
    model.eval().save_pretrained(folder / "text_encoder")
