"""Upload a latents root or an exported pipeline to the Hugging Face Hub."""

import re
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from shards.base.errors import RequestError, WorkError

HIDDEN = [".*", "**/.*"]
"""Patterns of files that are not uploaded: attempts in progress, and other hidden files."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
COMMON_LICENSES = "cc0-1.0, cc-by-4.0, apache-2.0, openrail++, other"
TEMPORARY = (408, 409, 429)
"""HTTP statuses below 500 after which a request may succeed later."""
CARD_LICENSE = re.compile(r"^(# )?license:.*$", re.MULTILINE)


def push_folder(
    folder: Path,
    repo: str,
    kind: Literal["dataset", "model"],
    card: str,
    license: str | None,
    public: bool,
    last: tuple[str, ...] = (),
) -> str:
    """Upload a folder and its card to a repository on the Hub, which is created if it does not exist.

    An interrupted upload continues where it stopped when this is called again.

    Args:
        repo: `org/name`.
        card: content of README.md, whose line `license:` is filled in.
        license: identifier of the licence on the Hub; None is refused.
        public: whether a new repository is visible to everyone.
        last: files to upload after all others, because readers start from them. Other files in their folders are not
            uploaded, because a running job may have added them, and the files that they list may not be on the hub.

    Returns:
        Address of the repository.

    Raises:
        RequestError: there is no licence, the name is invalid, or the hub refuses the request.
        WorkError: the upload was interrupted.
    """
    if not license:
        raise RequestError(
            f"No licence was given. It depends on the images, the captions and the encoders, so there is no default. "
            f"Pass its identifier on the Hub with --license, such as {COMMON_LICENSES}."
        )
    if not REPOSITORY.fullmatch(repo):
        raise RequestError(f"{repo} is not the name of a repository on the Hub. Pass it as org/name.")
    card, filled_in = CARD_LICENSE.subn(lambda match: f"license: {license}", card, count=1)
    if not filled_in:
        raise RequestError("The card's header has no `license:` line. Generate the card again.")
    api, where = HfApi(), f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    common: dict[str, Any] = {"repo_id": repo, "repo_type": kind}
    try:
        api.create_repo(**common, private=not public, exist_ok=True)
        # first, because the hub checks it
        api.upload_file(**common, path_or_fileobj=card.encode(), path_in_repo="README.md", commit_message="Card")
        ignored = [*HIDDEN, "README.md", *{f"{Path(name).parent}/*" for name in last}]
        api.upload_folder(**common, folder_path=folder, ignore_patterns=ignored, commit_message="Upload")
        if last:
            api.upload_folder(
                **common, folder_path=folder, allow_patterns=list(last), ignore_patterns=HIDDEN, commit_message="Index"
            )
    except (ValueError, TypeError) as error:
        raise RequestError(f"The hub rejects the upload to {where}: {_line(error)}.") from error
    except Exception as error:  # the hub client's own errors, and those of its HTTP libraries
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403, 404):
            raise RequestError(
                f"The hub refuses to write to {where}: {_line(error)}. Log in with `hf auth login`, using a token "
                f"with write access to this repository."
            ) from error
        if status is not None and status < 500 and status not in TEMPORARY:
            raise RequestError(f"The hub rejects the upload to {where}: {_line(error)}.") from error
        raise WorkError(
            f"The upload to {where} was interrupted: {_line(error)}. Run the same command again to continue; files "
            f"that were already uploaded are not sent again."
        ) from error
    return where


def _line(error: Exception) -> str:
    return " ".join(str(error).split()).removesuffix(".")
