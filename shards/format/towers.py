"""The frozen networks (towers) that produced a root's numbers, identified by content, and how their outputs are
stored."""

import base64
import re
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
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
"""transformers classes in which a token's state does not depend on later tokens."""
ONLY_TEXT = "text"
"""Name of the text tower in a plan whose config does not name its towers."""


class Weights(Config):
    """Reference to a model: a display name, and a content hash that is verified."""

    name: str
    """Hub name or folder, as given in the config."""
    sha256: str
    """SHA-256 over the hashes of the model's files: weights, vocabulary, and the config entries that affect the
    computation."""


class ImageTower(Config):
    """Encoding of images to image latents. Stored latents are neither shifted nor scaled; the trainer does both."""

    class_name: str
    """Class of the diffusers autoencoder."""
    weights: Weights
    posterior: Posterior
    """`moments`: mean and log-variance (2 × channels planes); `mean`: the mean alone (channels planes);
    `deterministic`: latents of an autoencoder without a posterior (channels planes)."""
    channels: int
    downsampling: int
    """Ratio of the image's side to the latents' side."""
    scale: tuple[float, ...]
    """(channels,) Normalisation: models are trained on (latents - shift) × scale."""
    shift: tuple[float, ...]
    """(channels,) Normalisation offset; see `scale`."""
    crop: str
    resampling: str
    decoder: str
    resampler: str = "pillow"
    """Library whose resampling filter was used."""
    color: str = "as_stored"
    """`srgb`: embedded colour profiles were applied; `as_stored`: they were ignored."""
    storage: ImageStorage = "float16"

    @property
    def num_planes(self) -> int:
        """Number of stored latent channels: 8 for SD's moments, 4 for its means."""
        return self.channels * (2 if self.posterior == "moments" else 1)


class Projection(Config):
    """Linear map from a text tower's hidden states to the stored vectors, `states @ matrix`.

    The columns are the principal directions of the states of the calibration captions, in decreasing order of energy
    (sum of squares), so the first k columns are the projection onto k dimensions.
    """

    matrix: str
    """(input_width, width) float16 in C order, base64. `array` decodes it."""
    input_width: int
    """Dimension of the tower's hidden states."""
    energy_shares: tuple[float, ...]
    """(width,) Fraction of the energy of the calibration captions' states that each column holds. For a joint
    projection, of the average over the inner tuples, each scaled to the same energy."""
    joint: tuple[tuple[str, ...], ...] = ()
    """Towers that are projected jointly, with one matrix: concatenated along the width within an inner tuple, and along
    the tokens across tuples. `matrix` is this tower's block of the joint matrix, and the stored states of the towers in
    an inner tuple must be summed. Empty: the tower has its own projection."""
    calibration_captions: int
    """Number of calibration captions, including copies of the empty caption."""
    calibration_sha256: str
    """SHA-256 of the calibration captions' keys."""

    @property
    def array(self) -> np.ndarray:
        """The matrix, (input_width, width) float16."""
        return _decoded(self.matrix, self.input_width)

    @property
    def energy_kept(self) -> float:
        """Fraction of the energy of the calibration captions' states that the stored states keep."""
        return sum(self.energy_shares)

    def first(self, width: int) -> "Projection":
        """Return the projection onto the first `width` columns."""
        changes = {"matrix": encode_matrix(self.array[:, :width]), "energy_shares": self.energy_shares[:width]}
        return self.model_copy(update=changes)


def encode_matrix(matrix: np.ndarray) -> str:
    """Encode a matrix as `Projection.matrix`, rounding it to float16."""
    return base64.b64encode(np.ascontiguousarray(matrix, np.float16).tobytes()).decode()


@lru_cache(maxsize=16)
def _decoded(matrix: str, rows: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(matrix), np.float16).reshape(rows, -1)


class TextTower(Config):
    """Encoding of captions to text latents."""

    class_name: str
    """Class of the transformers model."""
    weights: Weights
    tokenizer: Weights
    template: str = "{}"
    """Prompt template; `{}` stands for the caption."""
    lower: bool = False
    """Whether captions were converted to lower case."""
    empty: str | None = None
    """Complete prompt for a dropped caption. If None, the template is filled with an empty caption."""
    max_tokens: int
    """Input length of the tower in tokens, including padding. Longer captions were truncated."""
    masked: bool = False
    """Whether padding was masked out in the tower. If so, the trained model must mask it as well."""
    layer: Literal["last"] | int = "last"
    """Layer of the stored hidden states: `last_hidden_state`, or an index into `hidden_states`, such as -2."""
    states: bool = True
    """Whether hidden states are stored."""
    keep: tuple[Slice, ...] = ((None, None),)
    """Slices of the tower's tokens that are stored, as (start, stop) bounds of Python slices, concatenated in this
    order."""
    length: int
    """Number of stored tokens of an untrimmed caption, including padding."""
    width: int
    """Number of values stored per token: the dimension of the tower's hidden states, or less if they are projected."""
    pooled: int = 0
    """Dimension of the pooled output, which represents the whole caption, or 0 if it is not stored."""
    storage: TextStorage
    trim: bool
    quantised: Quantised | None = None
    """Data type to which the weights of the linear layers were quantised, with one scale per output, or None if they
    were not. With float8, the layers' inputs were quantised too, with one scale per token."""
    projection: Projection | None = None
    """Projection of the hidden states onto `width` dimensions, or None if they are stored in full width."""

    @property
    def input_width(self) -> int:
        """Dimension of the tower's hidden states."""
        return self.width if self.projection is None else self.projection.input_width

    def with_projection(self, projection: Projection) -> "TextTower":
        """Return this tower with its states projected."""
        return self.model_copy(update={"width": len(projection.energy_shares), "projection": projection})

    def unprojected(self) -> "TextTower":
        """Return this tower with its states stored in full width."""
        return self.model_copy(update={"width": self.input_width, "projection": None})

    @property
    def kept(self) -> list[int]:
        """Indices of the stored tokens among the tower's tokens."""
        return [index for bounds in self.keep for index in range(self.max_tokens)[slice(*bounds)]]

    @property
    def hides_padding(self) -> bool:
        """Whether a trained model needs an attention mask over this tower's tokens."""
        return self.masked or self.trim

    def prompt(self, caption: str) -> str:
        """Return the tower's input text for a caption. For an empty caption, this is the prompt for dropped
        captions."""
        if not caption and self.empty is not None:
            return self.empty
        return self.template.replace("{}", caption.lower() if self.lower else caption)


class FeatureTower(Config):
    """Encoding of images to the features of a frozen vision model, used as targets for representation alignment."""

    class_name: str
    """Class of the transformers model."""
    weights: Weights
    resize: float
    """Ratio of the tower's input side to the bucket's side."""
    mean: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]
    std: Annotated[tuple[float, ...], Field(min_length=3, max_length=3)]
    """Normalisation per RGB channel in [0, 1]: the tower's input was (pixels - mean) / std."""
    patch: int
    """Side of a patch in pixels. Each patch produces one token."""
    width: int
    """Dimension of a token's features."""
    storage: TextStorage

    def grid(self, bucket: Bucket) -> tuple[int, int]:
        """Return the (h, w) token grid of a bucket; tokens are stored row by row. Raises ValueError if the bucket,
        resized for the tower, is not a whole number of patches."""
        sides = []
        for side in (bucket.height, bucket.width):
            patches = side * self.resize / self.patch
            if patches != int(patches):
                raise ValueError(
                    f"a side of bucket {bucket}, resized by a factor of {self.resize:g}, is not a multiple of the "
                    f"patch size, {self.patch}"
                )
            sides.append(int(patches))
        return sides[0], sides[1]
