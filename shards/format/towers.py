"""The frozen networks, or towers, that made a root's numbers: each by content, and how its numbers are stored."""

import re
from typing import Annotated, Literal

from pydantic import Field

from shards.base.config import Config
from shards.format.buckets import Bucket

TextStorage = Literal["float16", "float8"]
ImageStorage = Literal["float16", "int8"]
Quantised = Literal["int8", "float8"]
Posterior = Literal["moments", "mean", "deterministic"]
Slice = tuple[int | None, int | None]
CAUSAL = re.compile(
    r"CLIPTextModel(WithProjection)?|(Gemma2?|Gemma3Text|Llama|Mistral|Phi3|Qwen[23])Model"
    r"|(Gemma[23]?|Llama|Mistral|Phi3|Qwen[23])ForCausalLM"
)
"""Classes of transformers in which a token's state does not depend on those behind it."""
ONLY_TEXT = "text"
"""The name of the text tower of a config that names none."""


class Weights(Config):
    """A model by name, for people, and by content, for machines."""

    name: str
    """Hub name or folder, as the run was told."""
    sha256: str
    """Over its files' own SHA-256s: weights, vocabulary, and what its config says of the computation."""


class ImageTower(Config):
    """How a picture becomes image latents. Stored latents are neither shifted nor scaled; the trainer does both."""

    class_name: str
    """Of the diffusers autoencoder."""
    weights: Weights
    posterior: Posterior
    """`moments`: mean and log-variance, 2 × channels planes; `mean`: channels planes; `deterministic`: the same, of an
    autoencoder that has no posterior."""
    channels: int
    downsampling: int
    """Picture side / latent side."""
    scale: tuple[float, ...]
    """(channels,): a model is trained on (latents - shift) × scale."""
    shift: tuple[float, ...]
    """(channels,)."""
    crop: str
    resampling: str
    decoder: str
    resampler: str = "pillow"
    """Whose implementation of the filter."""
    color: str = "as_stored"
    """`srgb`: embedded profiles were applied; `as_stored`: they were not."""
    storage: ImageStorage = "float16"

    @property
    def num_planes(self) -> int:
        """Channels of stored image latents: 8 for SD's moments, 4 for its means."""
        return self.channels * (2 if self.posterior == "moments" else 1)


class TextTower(Config):
    """How a caption becomes text latents."""

    class_name: str
    """Of the transformers model."""
    weights: Weights
    tokenizer: Weights
    template: str = "{}"
    """What the tower was given, with the caption in place of `{}`."""
    lower: bool = False
    """Whether the caption was put into small letters first."""
    empty: str | None = None
    """What the tower was given for a dropped caption, template and all; None: the template without a caption."""
    max_tokens: int
    """Tokens that the tower was given, padding included; longer captions were cut."""
    masked: bool = False
    """Whether padding was hidden from the tower; a model is then not shown it either."""
    layer: Literal["last"] | int = "last"
    """Which hidden states: the `last_hidden_state`, or an index into `hidden_states`, such as -2."""
    states: bool = True
    """Whether hidden states are stored."""
    keep: tuple[Slice, ...] = ((None, None),)
    """Which of the tower's tokens are stored: slices, as Python counts, one after the other."""
    length: int
    """Stored tokens of an untrimmed caption, padding included."""
    width: int
    """Numbers in a token's state."""
    pooled: int = 0
    """Numbers in the pooled output, which stands for a whole caption; 0: it is not stored."""
    storage: TextStorage
    trim: bool
    quantised: Quantised | None = None
    """What the weights of the tower's linear layers were rounded to, with a scale for each row; None: they were not."""

    @property
    def kept(self) -> list[int]:
        """Places among the tower's tokens of those that are stored."""
        return [place for bounds in self.keep for place in range(self.max_tokens)[slice(*bounds)]]

    @property
    def hides_padding(self) -> bool:
        """Whether a model needs a mask over this tower's tokens."""
        return self.masked or self.trim

    def prompt(self, caption: str) -> str:
        """What the tower is given for a caption; for the empty one, what stands for dropped captions."""
        if not caption and self.empty is not None:
            return self.empty
        return self.template.replace("{}", caption.lower() if self.lower else caption)


class FeatureTower(Config):
    """How a picture becomes the features of a frozen vision model, with which a model in training can be aligned."""

    class_name: str
    """Of the transformers model."""
    weights: Weights
    resize: float
    """Side of the picture that the tower was given / side of the bucket."""
    mean: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]
    std: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]
    """Of red, green and blue, in [0, 1]: the tower was given (pixels - mean) / std."""
    patch: int
    """Side of the square of pixels of which a token is made."""
    width: int
    """Numbers in a token's features."""
    storage: TextStorage

    def grid(self, bucket: Bucket) -> tuple[int, int]:
        """(h, w) of a bucket's tokens, which are stored row by row.

        Raises:
            ValueError: the bucket, resized, is no whole number of patches.
        """
        sides = []
        for side in (bucket.height, bucket.width):
            patches = side * self.resize / self.patch
            if patches != int(patches):
                raise ValueError(f"bucket {bucket}, resized to {self.resize:g} of it, is no multiple of {self.patch}")
            sides.append(int(patches))
        return sides[0], sides[1]
