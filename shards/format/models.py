"""Where a model's folder is, and what it holds by content. Nothing is loaded into memory here."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RevisionNotFoundError

from shards.base.durable import canonical_json, sha256_file
from shards.base.errors import RequestError, is_storage_error
from shards.base.fetched import fetch_lock, fetch_folder, latest_copy
from shards.format.towers import Weights

WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
TOKENIZER_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json")
FILES = ("config.json", *WEIGHT_FILES, *TOKENIZER_FILES)
INDEX_FILES = tuple(f"{file}.index.json" for file in WEIGHT_FILES)
"""Of weights in several files, which it names."""
OTHER_VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "added_tokens.json")
"""Of tokenizers that have no vocab.json: T5's, Gemma's."""
TO_FETCH = (
    *FILES,
    *INDEX_FILES,
    *(file.replace(".safetensors", "-*-of-*.safetensors") for file in WEIGHT_FILES),
    *OTHER_VOCABULARIES,
    "preprocessor_config.json",
)
# Entries of a config.json that say where it came from, not what the model computes.
NOT_CONTENT = {"architectures", "dtype", "torch_dtype", "transformers_version", "scaling_factor", "sample_size"}
NOT_CONTENT |= {"name_or_path", "tokenizer_file"}
# The same, where they say anything: the trainer shifts and scales.
NORMALISATION = {"shift_factor", "latents_mean", "latents_std"}
PIPELINE_INDEX = "model_index.json"
"""File of a diffusers pipeline's folder that names its class and components."""
TRAINED_GUIDANCE = "_trained_guidance"
"""Field of an exported network's config.json: the constant that its guidance input had in training."""


def model_folder(name: str, files: Sequence[str] = TO_FETCH) -> Path:
    """The folder of a model: `name` itself where it is one; else a copy, in this machine's cache, of that at an address
    such as s3://bucket/vae, or of `org/repo[@revision][/sub/folder]` on the hub. One process of a machine fetches it.

    Raises:
        Outage: the object store, or the way to it, failed.
        RequestError: there is none, or the hub does not give it and its cache does not hold it.
        OSError: the disk does not take it.
    """
    if Path(name).is_dir():
        return Path(name)
    with fetch_lock(name, _cache()):
        return _fetch(name, files)


def recorded_folder(weights: Weights) -> Path:
    """The folder of the model that was recorded, with that content: what is in this machine's cache, where it is that;
    else one process of the machine fetches it, for all.

    Raises: as `model_folder`; and
        RequestError: what is found has other content.
    """
    before = _cached(weights.name)
    if before and _holds(before, weights):
        return before
    with fetch_lock(weights.name, _cache()):
        folder = _cached(weights.name)
        if folder is None or folder == before:  # no other process has fetched it meanwhile
            folder = _fetch(weights.name, TO_FETCH)
    if hash_weights(weights.name, folder).sha256 != weights.sha256:
        raise RequestError(f"{weights.name} ({folder}) has other content than encoding.json recorded.")
    return folder


def _cache() -> Path:
    return Path(constants.HF_HOME) / "latentmill"


def _holds(folder: Path, weights: Weights) -> bool:
    try:
        return hash_weights(weights.name, folder).sha256 == weights.sha256
    except RequestError:
        return False  # half of it was fetched


def _cached(name: str) -> Path | None:
    """What is on this machine, without asking anybody."""
    if Path(name).is_dir():
        return Path(name)
    if "://" in name:
        return latest_copy(name, _cache())
    try:
        repo, revision, folder = _parse(name)
        snapshot = Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):  # RequestError is one; so is what the hub's client says of what is not there
        return None
    return snapshot / folder if (snapshot / folder).is_dir() else None


def _parse(name: str) -> tuple[str, str, str]:
    """Repository, revision and folder of a hub name.

    Raises:
        RequestError: it is none.
    """
    parts = name.split("/")
    if len(parts) < 2 or not all(parts):
        raise RequestError(f"There is no model folder {name}, and it is no hub name (org/repo/folder) either.")
    repo, _, revision = "/".join(parts[:2]).partition("@")
    return repo, revision, "/".join(parts[2:])


def _fetch(name: str, files: Sequence[str]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if "://" in name:
        return fetch_folder(name, files, _cache())
    repo, revision, folder = _parse(name)
    patterns = [f"{folder}/{file}" if folder else file for file in files]
    try:
        snapshot = Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub's own, and those of whichever libraries fetch for it
        if is_storage_error(error):
            raise
        raise RequestError(
            f"The model {name} is no local folder, and {_why_not(repo, revision, error)}. Or give the path of a local "
            f"folder: where the hub can be reached, `hf download {repo} --local-dir DIR` makes one."
        ) from error
    if not (snapshot / folder).is_dir():
        raise RequestError(
            f"The hub's {repo} has no folder {folder} with safetensors weights, or they were never fetched whole "
            f"({snapshot}). Look at {constants.ENDPOINT}/{repo} for the folder's name."
        )
    return snapshot / folder


def _why_not(repo: str, revision: str, error: BaseException | None) -> str:
    """What kept the hub from giving a model, what it means and what to do, from its error and that one's causes."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else '-'}"
    errors: list[Any] = []
    while error is not None:
        errors.append(error)
        error = error.__cause__ or error.__context__
    status = next((e.response.status_code for e in errors if getattr(e, "response", None) is not None), 0)
    if any(isinstance(e, OfflineModeIsEnabled) for e in errors):
        return (
            f"the hub's cache here ({constants.HF_HUB_CACHE}) does not hold it, while HF_HUB_OFFLINE forbids to ask "
            f"the hub. Unset HF_HUB_OFFLINE"
        )
    if any(isinstance(e, RevisionNotFoundError) for e in errors):
        return f"the hub's {repo} has no revision {revision}. Its commits are at {constants.ENDPOINT}/{repo}/commits"
    if status in (401, 403, 404):
        return (
            f"the hub has no {repo} that you may read (it answered {status}): it was withdrawn or renamed, or it is "
            f"private or gated. Look for it at {constants.ENDPOINT}/{repo}, and `hf auth login` where it asks for it"
        )
    if status == 429:
        return (
            "the hub answered 429, too many requests from this address or account; the name may be right. Give the "
            "same command again in some minutes, with HF_TOKEN set, which allows more"
        )
    if status:
        return f"the hub answered {status}: it has a fault of its own. Give the same command again later"
    if isinstance(errors[0], LocalEntryNotFoundError):
        return (
            f"the hub at {constants.ENDPOINT} cannot be reached ({text}). See whether this machine has a network, and "
            f"what HF_ENDPOINT and HTTPS_PROXY are set to"
        )
    return f"its download broke off ({text}). The same command again fetches what is missing"


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
    shards = sorted({shard for file in INDEX_FILES for shard in _weight_shards(folder / file)})
    if "config.json" in files and not (set(WEIGHT_FILES) & set(files) or shards):
        raise RequestError(
            f"{folder} has no {' or '.join(WEIGHT_FILES)}; other formats are not loaded. If the hub's cache holds half "
            f"of the model, the same command fetches the rest where the hub can be reached."
        )
    if "tokenizer_config.json" in files and "vocab.json" not in files:
        files += [file for file in OTHER_VOCABULARIES if (folder / file).is_file()]
    digest = hashlib.sha256()
    for file in (*files, *shards):
        digest.update(f"{file} {_content_hash(folder / file)}\n".encode())
    return Weights(name=name, sha256=digest.hexdigest())


def _weight_shards(index: Path) -> set[str]:
    """The files that an index of weights names, all of them there.

    Raises:
        RequestError: one is missing.
    """
    if not index.is_file():
        return set()
    shards = set(json.loads(index.read_text())["weight_map"].values())
    if missing := sorted(shard for shard in shards if not (index.parent / shard).is_file()):
        raise RequestError(f"{index} names {', '.join(missing)}, which the folder has not. Fetch the model again.")
    return shards


def _content_hash(path: Path) -> str:
    if path.name not in ("config.json", "tokenizer_config.json"):
        return sha256_file(path)
    fields = json.loads(path.read_text())
    content = {key: value for key, value in fields.items() if _is_content(key, value)}
    return hashlib.sha256(canonical_json(content)).hexdigest()


def _is_content(key: str, value: Any) -> bool:
    return not (key in NOT_CONTENT or key.startswith("_") or (key in NORMALISATION and value is not None))
