"""From a folder or the name of a repository to a folder: artefacts, and the bases they are made for."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freemoe.core.errors import ArtifactError
from freemoe.core.files import MANIFEST
from freemoe.hub.reach import hub_endpoint, hub_error, hub_session, out_of_reach

log = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.-]+/[\w.-]+")

TOKENIZER = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken")
"""Everything of a model but its weights."""

WEIGHTS = ("*.safetensors",)

# Second copies of the weights, as they lie in many repositories.
_COPIES = ("consolidated*", "*/*.safetensors", "*.fp16.safetensors")


@dataclass(frozen=True)
class HubAccess:
    """How the hub is asked; the names are those of transformers' ``from_pretrained``."""

    revision: str | None = None  # Branch, tag or commit; the main branch if absent
    token: str | bool | None = None  # For what is private; None takes ``HF_TOKEN`` or what ``hf auth login`` kept
    cache_dir: str | Path | None = None  # Where what is fetched is kept; ``HF_HUB_CACHE`` if absent
    local_files_only: bool = False  # Look into the cache only

    def for_base(self) -> dict[str, Any]:
        """Arguments for whoever fetches an artefact's base: the revision is the artefact's own."""
        return {"token": self.token, "cache_dir": self.cache_dir, "local_files_only": self.local_files_only}


def is_repository(source: object) -> bool:
    """Whether something is the name of a repository, ``owner/name`` or ``owner/name@revision``, and no folder or file here.

    A `Path` always is a place here, and so is what begins with a dot or a slash.
    """
    return isinstance(source, str) and is_name(source.partition("@")[0]) and not Path(source).exists()


def is_name(text: str) -> bool:
    """Whether a text reads ``owner/name``, whatever lies here."""
    return not text.startswith(".") and _NAME.fullmatch(text) is not None


def _split_revision(source: str | Path, access: HubAccess | None) -> tuple[str, HubAccess]:
    """Repository, and how it is asked for the revision that stands behind its name."""
    name, at, revision = str(source).partition("@")
    access = access or HubAccess()
    return name, replace(access, revision=revision) if at else access


def require_in_reach(source: object) -> None:
    """Say at once, before anything heavy is loaded, that a repository is neither in the cache nor in reach.

    Nothing is asked of a source that is no ``owner/name``.

    Raises:
        HubError: It can be read from nowhere.
    """
    if not is_repository(source):
        return
    name, access = _split_revision(str(source), None)
    closed = "" if _cache_folder(name, access).is_dir() else out_of_reach()
    if closed:
        raise hub_error(f"repository {name!r}", FileNotFoundError(name), closed)


def fetch_artefact(source: str | Path, access: HubAccess | None = None, *, required: bool = False) -> Path:
    """The folder of an artefact, which is fetched where a repository is named.

    The manifest is asked for first: what has none is a plain model, and nothing of it is fetched.

    Args:
        source: A folder, or ``owner/name``.
        access: How the hub is asked.
        required: Anything but an artefact is an error. Otherwise what is none comes back as it is.

    Raises:
        HubError: There is no such repository, it is private, or it is neither in the cache nor in reach.
        ArtifactError: The repository holds no artefact, and one is required.
    """
    from huggingface_hub import errors, hf_hub_download

    if not is_repository(source):
        return Path(source)
    name, access = _split_revision(source, access)
    where = {"revision": access.revision, "cache_dir": access.cache_dir, "token": access.token}
    with hub_session(access.local_files_only) as closed:
        try:
            found = hf_hub_download(name, MANIFEST, **where, local_files_only=bool(closed))
        except errors.RemoteEntryNotFoundError:
            if required:
                raise ArtifactError(
                    f"The repository {name!r} is no artefact of freemoe: it has no {MANIFEST}."
                ) from None
            return Path(source)
        except Exception as error:
            # Out of reach it may still be a plain model that is in the cache, at least in part.
            if closed and not required and _cache_folder(name, access).is_dir():
                return Path(source)
            raise hub_error(f"repository {name!r}", error, closed, access.token) from error
    return _download_snapshot(name, replace(access, revision=Path(found).parent.name), None)


def fetch_model(source: str, access: HubAccess | None = None, *, weights: bool = True) -> Path:
    """The folder of a model of the hub, so that transformers finds all of it without asking again.

    Args:
        source: ``owner/name``, or one of the few names without an owner; ``@revision`` may follow.
        access: How the hub is asked.
        weights: Fetch its weights too, not only configuration and tokenizer.

    Raises:
        HubError: There is no such repository, it is private, or it is neither in the cache nor in reach.
    """
    name, access = _split_revision(source, access)
    folder = _download_snapshot(name, access, [*TOKENIZER, *(WEIGHTS if weights else ())])
    if weights and not any(folder.glob("*.safetensors")):
        folder = _download_snapshot(name, access, [*TOKENIZER, "pytorch_model*.bin"])
    return folder


def _download_snapshot(name: str, access: HubAccess, patterns: Sequence[str] | None) -> Path:
    """A repository's files at one revision, in the cache; fetched if they are not and the hub is in reach."""
    from huggingface_hub import errors, snapshot_download

    with hub_session(access.local_files_only) as closed:
        large = patterns is not None and not set(patterns).isdisjoint(WEIGHTS)
        if large and not closed and not any(_cache_folder(name, access).glob("snapshots/*/*.safetensors")):
            log.info("%s: its weights are not in the cache and come from %s", name, hub_endpoint())
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=access.revision,
                    token=access.token,
                    cache_dir=access.cache_dir,
                    local_files_only=bool(closed),
                    allow_patterns=None if patterns is None else list(patterns),
                    ignore_patterns=None if patterns is None else list(_COPIES),
                )
            )
        except errors.IncompleteSnapshotError as error:
            held = Path(error.snapshot_path)
            # What transformers itself has fetched is less than we ask for, and may do.
            known = patterns is not None and (held / "config.json").is_file()
            if known and (not large or any(held.glob("*.safetensors"))):
                return held
            raise hub_error(f"repository {name!r}", error, closed, access.token) from error
        except Exception as error:
            raise hub_error(f"repository {name!r}", error, closed, access.token) from error


def _cache_folder(name: str, access: HubAccess) -> Path:
    """Where the cache keeps a repository."""
    from huggingface_hub import constants

    return Path(access.cache_dir or constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
