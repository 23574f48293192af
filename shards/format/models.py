"""Where a model's folder is, and what it holds by content. Nothing is loaded into memory here."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from shards.base.errors import RequestError
from shards.base.files import canonical_json, sha256_file
from shards.format.encoding import Weights

WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
TOKENIZER_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json")
FILES = ("config.json", *WEIGHT_FILES, *TOKENIZER_FILES)
# Entries of a config.json that say where it came from, not what the model computes.
NOT_CONTENT = {"architectures", "dtype", "torch_dtype", "transformers_version", "scaling_factor", "sample_size"}
NOT_CONTENT |= {"name_or_path", "tokenizer_file"}


def model_folder(name: str, files: Sequence[str] = FILES) -> Path:
    """The folder of a model: `name` itself where it is one, else `org/repo[@revision][/sub/folder]` from the hub.

    Raises:
        RequestError: neither, or the hub cannot be reached and its cache does not hold the model.
    """
    if Path(name).is_dir():
        return Path(name)
    parts = name.split("/")
    if len(parts) < 2 or not all(parts):
        raise RequestError(f"There is no model folder {name}, and it is no hub name (org/repo/folder) either.")
    repo, _, revision = "/".join(parts[:2]).partition("@")
    folder = "/".join(parts[2:])
    patterns = [f"{folder}/{file}" if folder else file for file in files]
    try:
        snapshot = snapshot_download(repo, revision=revision or None, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise RequestError(
            f"The model {name} is no local folder and could not be had from the hub ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}). Give a local folder, or download it once where the hub can be reached."
        ) from error
    if not (Path(snapshot) / folder).is_dir():
        raise RequestError(f"The hub's {repo} has no folder {folder} with safetensors weights.")
    return Path(snapshot) / folder


def read_model_config(folder: Path) -> dict[str, Any]:
    """The model's config.json.

    Raises:
        RequestError: there is none, or it is not JSON.
    """
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"{folder} is not a model folder: config.json cannot be read ({error}).") from error


def hash_weights(name: str, folder: Path) -> Weights:
    """The content of a model or tokenizer folder: weights, vocabulary, and what its config says of the computation.

    Raises:
        RequestError: a model without safetensors weights; pickled ones are never loaded.
    """
    files = [file for file in FILES if (folder / file).is_file()]
    if "config.json" in files and not set(WEIGHT_FILES) & set(files):
        raise RequestError(f"{folder} has no {' or '.join(WEIGHT_FILES)}; other formats are not loaded.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file} {_content_hash(folder / file)}\n".encode())
    return Weights(name=name, sha256=digest.hexdigest())


def _content_hash(path: Path) -> str:
    if path.name not in ("config.json", "tokenizer_config.json"):
        return sha256_file(path)
    fields = json.loads(path.read_text())
    content = {key: value for key, value in fields.items() if key not in NOT_CONTENT and not key.startswith("_")}
    return hashlib.sha256(canonical_json(content)).hexdigest()
