"""Find, download and hash model folders, and probe autoencoders, without loading weights into memory."""

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from shards.base.durable import atomic_folder, canonical_json, locked, read_json, sha256_file
from shards.base.errors import RequestError, is_storage_error
from shards.format.towers import Weights

WEIGHT_FILES = ("diffusion_pytorch_model.safetensors", "model.safetensors")
TOKENIZER_FILES = ("vocab.json", "merges.txt", "special_tokens_map.json", "tokenizer_config.json")
FILES = ("config.json", *WEIGHT_FILES, *TOKENIZER_FILES)
INDEX_FILES = tuple(f"{file}.index.json" for file in WEIGHT_FILES)
"""Index files of sharded weights."""
OTHER_VOCABULARIES = ("tokenizer.json", "spiece.model", "tokenizer.model", "added_tokens.json")
"""Other files from which tokenizers are loaded; tokenizer.json takes precedence over vocab.json."""
DOWNLOAD_PATTERNS = (
    *FILES,
    *INDEX_FILES,
    *(file.replace(".safetensors", "-*-of-*.safetensors") for file in WEIGHT_FILES),
    *OTHER_VOCABULARIES,
    "preprocessor_config.json",
)
# Entries of a config.json that describe the model's origin and do not affect the computation.
NOT_CONTENT = {"architectures", "dtype", "torch_dtype", "transformers_version", "scaling_factor", "sample_size"}
NOT_CONTENT |= {"name_or_path", "tokenizer_file"}
# Entries that are ignored unless they are null, because the trainer applies shift and scale.
NORMALISATION = {"shift_factor", "latents_mean", "latents_std"}
TRAINED_GUIDANCE = "_trained_guidance"
"""Field of an exported network's config.json that holds the constant value of its guidance input in training."""
TRAINED_ARGUMENTS = "_trained_arguments"
"""Field of an exported network's config.json that holds the arguments of the pipeline's call with which it encodes
prompts as in training, where its defaults do not."""
DISABLED_OPTIONS = ("use_resolution_binning", "clean_caption")
"""Arguments of a pipeline's call that are true by default in some pipelines, and contradict training.
`use_resolution_binning` draws at the nearest of the pipeline's preset sizes and rescales the result. `clean_caption`
rewrites prompts, but stage 1 does not rewrite captions in this way."""
PROBE_SIDE = 256
"""Side in pixels of the image that is used to determine an autoencoder's latent shape."""


class ProbedAutoencoder(NamedTuple):
    """An autoencoder without weights, and the properties of its latents."""

    vae: Any
    has_posterior: bool
    channels: int
    downsampling: int
    """Side of an image relative to the side of its latents."""


def probe_autoencoder(class_name: str, config: dict[str, Any]) -> ProbedAutoencoder:
    """Build a diffusers autoencoder on the meta device, and encode one image to determine the shape of its latents.
    Raises the exceptions of diffusers and torch if the config does not describe an image autoencoder."""
    import diffusers
    import torch

    with torch.device("meta"), torch.no_grad():
        vae: Any = getattr(diffusers, class_name).from_config(config)
        encoded = vae.encode(torch.empty(1, 3, PROBE_SIDE, PROBE_SIDE))
    has_posterior = hasattr(encoded, "latent_dist")
    latents = encoded.latent_dist.mode() if has_posterior else encoded.latent
    return ProbedAutoencoder(vae, has_posterior, int(latents.shape[1]), PROBE_SIDE // int(latents.shape[-1]))


def model_folder(name: str, files: Sequence[str] = DOWNLOAD_PATTERNS) -> Path:
    """Return the local folder of a model, downloading the model if necessary; only one process per machine downloads.

    `name` is a local folder, a URL such as s3://bucket/vae, or a hub name, `org/repo[@revision][/sub/folder]`. Raises
    Outage if the object store cannot be reached, RequestError if neither the hub nor the local cache has the model, and
    OSError if writing to the disk failed.
    """
    if Path(name).is_dir():
        return Path(name)
    with _fetch_lock(name):
        return _fetch(name, files)


def recorded_folder(weights: Weights) -> Path:
    """Return the local folder of a model whose content matches its record in encoding.json.

    The cached copy is used if it matches. Otherwise, one process per machine downloads the model. Raises the same
    errors as `model_folder`, and RequestError if the downloaded content differs from the record.
    """
    cached = _cached(weights.name)
    if cached and _matches(cached, weights):
        return cached
    with _fetch_lock(weights.name):
        folder = _cached(weights.name)
        if folder is None or folder == cached:  # no other process has downloaded it in the meantime
            folder = _fetch(weights.name, DOWNLOAD_PATTERNS)
    if hash_weights(weights.name, folder).sha256 != weights.sha256:
        raise RequestError(
            f"The model {weights.name} in {folder} differs from the model recorded in encoding.json. Provide the "
            f"recorded model under this name."
        )
    return folder


def _cache() -> Path:
    return Path(constants.HF_HOME) / "latentmill"


def _id(text: str) -> str:
    return hashlib.sha256(text.rstrip("/").encode()).hexdigest()[:16]


@contextmanager
def _fetch_lock(name: str) -> Iterator[None]:
    """Keep other processes on this machine from fetching `name`."""
    cache = _cache()
    if not os.access(next(folder for folder in (cache, *cache.parents) if folder.exists()), os.W_OK):
        yield  # a read-only cache was filled beforehand, so nothing is fetched into it
        return
    with locked(cache / f"{_id(name)}.lock"):
        yield


def _matches(folder: Path, weights: Weights) -> bool:
    try:
        return hash_weights(weights.name, folder).sha256 == weights.sha256
    except RequestError:
        return False  # incomplete download


def _cached(name: str) -> Path | None:
    """Return the local copy of a model without network access, or None if there is no copy."""
    if Path(name).is_dir():
        return Path(name)
    if "://" in name:
        copies = [copy for copy in (_cache() / _id(name)).glob("*") if not copy.name.startswith(".")]
        return max(copies, key=lambda copy: copy.stat().st_mtime, default=None)
    try:
        repo, revision, folder = _parse(name)
        snapshot = Path(snapshot_download(repo, revision=revision or None, local_files_only=True))
    except (OSError, ValueError):  # includes RequestError, and the hub client's errors for missing files
        return None
    return snapshot / folder if (snapshot / folder).is_dir() else None


def _parse(name: str) -> tuple[str, str, str]:
    """Split a hub name into repository, revision and folder. Raises RequestError if `name` is not a hub name."""
    parts = name.split("/")
    if len(parts) < 2 or not all(parts):
        raise RequestError(
            f"The model {name} is neither an existing folder nor a hub name (org/repo[/folder]). Use an existing "
            f"folder, a URL or a hub name."
        )
    repo, _, revision = "/".join(parts[:2]).partition("@")
    return repo, revision, "/".join(parts[2:])


def _fetch(name: str, files: Sequence[str]) -> Path:
    if Path(name).is_dir():
        return Path(name)
    if "://" in name:
        return _fetch_folder(name, files)
    repo, revision, folder = _parse(name)
    patterns = [f"{folder}/{file}" if folder else file for file in files]
    try:
        snapshot = Path(snapshot_download(repo, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # the hub client's own errors, and those of its HTTP libraries
        if is_storage_error(error):
            raise
        # some versions of the hub client say only that nothing is in the cache, and chain what went wrong
        reason = (error.__cause__ or error) if isinstance(error, LocalEntryNotFoundError) else error
        said = " ".join(str(reason).split()).rstrip(".") or type(reason).__name__
        raise RequestError(
            f"The model {name} is not a local folder, and downloading it from the hub at {constants.ENDPOINT} failed: "
            f"{said}. Check the name at {constants.ENDPOINT}/{repo}, your network connection and HF_HUB_OFFLINE. If "
            f"the model is private or gated, or the hub limits your requests, log in with `hf auth login`. Then run "
            f"the command again. Alternatively, pass a local folder created with `hf download {repo} --local-dir DIR` "
            f"on a machine that can reach the hub."
        ) from error
    if not (snapshot / folder).is_dir():
        raise RequestError(
            f"{repo} on the Hub has no folder {folder} with safetensors weights, or its download to {snapshot} is "
            f"incomplete. Check the folder name at {constants.ENDPOINT}/{repo}, and run the command again."
        )
    return snapshot / folder


def _fetch_folder(address: str, patterns: Sequence[str]) -> Path:
    """Download the files at the top level of `address` that match `patterns`, and return their local folder.

    The caller must hold `_fetch_lock`. The complete copy is renamed into place. Its name is derived from the sizes and
    ETags that the store reports, so a changed folder is downloaded again.
    """
    from shards.base.remote import RemoteStore  # imported late, because it imports fsspec

    store = RemoteStore(address)
    entries = store.listing()
    found = {name: entry for name, entry in entries.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    if not found:
        raise RequestError(
            f"{address} is not a model folder: it contains none of these files: {', '.join(patterns)}. Check the URL."
        )
    top = _cache() / _id(address)
    copy = top / _id(canonical_json({name: [entry.bytes, entry.etag] for name, entry in found.items()}).decode())
    if copy.is_dir():
        return copy
    for abandoned in top.glob(".*"):  # left by killed processes
        shutil.rmtree(abandoned)
    with atomic_folder(copy) as fetching:
        for name in found:
            store.get(name, fetching / name)
    return copy


def hash_weights(name: str, folder: Path) -> Weights:
    """Hash the content of a model or tokenizer folder: weights, vocabulary, and the config entries that affect the
    computation. Raises RequestError if a model has no safetensors weights; pickled weights are never loaded."""
    files = [file for file in FILES if (folder / file).is_file()]
    shards = sorted({shard for file in INDEX_FILES for shard in _weight_shards(folder / file)})
    if "config.json" in files and not (set(WEIGHT_FILES) & set(files) or shards):
        raise RequestError(
            f"{folder} has no {' or '.join(WEIGHT_FILES)}, and other formats are not supported. If the download is "
            f"incomplete, run the command again on a machine that can reach the hub."
        )
    if "tokenizer_config.json" in files:
        files += [file for file in OTHER_VOCABULARIES if (folder / file).is_file()]
    digest = hashlib.sha256()
    for file in (*files, *shards):
        digest.update(f"{file} {_content_hash(folder / file)}\n".encode())
    return Weights(name=name, sha256=digest.hexdigest())


def _weight_shards(index: Path) -> set[str]:
    """Return the files that an index of sharded weights refers to. Raises RequestError if one of them is missing."""
    if not index.is_file():
        return set()
    shards = set(read_json(index)["weight_map"].values())
    if missing := sorted(shard for shard in shards if not (index.parent / shard).is_file()):
        raise RequestError(f"{index} refers to missing files: {', '.join(missing)}. Download the model again.")
    return shards


def _content_hash(path: Path) -> str:
    if path.name not in ("config.json", "tokenizer_config.json"):
        return sha256_file(path)
    fields = read_json(path)
    ignored = {key for key in fields if key in NOT_CONTENT or key.startswith("_")}
    ignored |= {key for key in NORMALISATION if fields.get(key) is not None}
    content = {key: value for key, value in fields.items() if key not in ignored}
    return hashlib.sha256(canonical_json(content)).hexdigest()
