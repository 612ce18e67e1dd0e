"""Artefacts to the hub, and copies of them to other folders: what the manifest vouches for, and nothing beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, FreeMoEError, HubError
from freemoe.core.files import CARD, MANIFEST, PAGES
from freemoe.core.run.folder import require_replaceable
from freemoe.core.untrusted import read_json
from freemoe.core.version import __version__
from freemoe.hub.cards import HERE, found_by_others
from freemoe.hub.fetch import is_name
from freemoe.hub.reach import LOGIN, hub_endpoint, hub_error, hub_session

# What a repository may hold besides an artefact.
_ANYWHERE = (".gitattributes", ".gitignore", CARD)


def artefact_files(folder: str | Path) -> dict[str, Path]:
    """Every file of an artefact by its name in it, after all of them were checked.

    Raises:
        ArtifactError: It is no artefact, or damaged.
    """
    root = Path(folder)
    names = [*read_manifest(root)["files"], MANIFEST, *PAGES]
    return {name: root / name for name in dict.fromkeys(names) if (root / name).is_file()}


def copy_artefact(folder: str | Path, target: str | Path, *, overwrite: bool = False) -> Path:
    """Copy an artefact; the bytes of its files stay the same.

    Raises:
        ArtifactError: It is no artefact or damaged, or something stands at the target.
    """
    files, there = artefact_files(folder), Path(target)
    if there.resolve() == Path(folder).resolve():
        return there
    require_replaceable(there, overwrite)
    if there.exists():
        shutil.rmtree(there)
    # The manifest goes last: a copy that was cut short is no artefact.
    for name, path in sorted(files.items(), key=lambda item: item[0] == MANIFEST):
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, there / name)
    return there


def push_artefact(
    folder: str | Path,
    repository: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    message: str | None = None,
    overwrite: bool = False,
    dry: bool = False,
) -> dict[str, Any]:
    """Write an artefact to a repository of the hub, which is made if there is none, in one commit.

    Args:
        folder: The artefact, of any kind.
        repository: ``owner/name``.
        private: Whether a new repository is private; the account's default if absent.
        token: With the right to write; ``HF_TOKEN`` or what ``hf auth login`` kept if absent.
        revision: Branch to write to, made if there is none; the main branch if absent.
        message: Of the commit.
        overwrite: Replace what the repository holds where it is of another kind or no artefact.
        dry: Ask nobody; say what would be written.

    Returns:
        ``repository``, ``url``, ``kind``, ``base``, ``files`` (name -> bytes), ``bytes``, ``note``, and ``commit``, None of a dry run.

    Raises:
        ArtifactError: The folder is no artefact or damaged; or the repository holds something else, or is public and was to be
            private.
        HubError: The name is none, there is no token or it has no right to write, or the hub is out of reach.
    """
    if not is_name(repository):
        raise HubError(f"{repository!r} is no name of a repository. Write owner/name; a branch goes to --revision.")
    manifest, content = read_manifest(folder, check=False), dict[str, Path | bytes](artefact_files(folder))
    kind = str(manifest["kind"])
    if isinstance(card := content.get(CARD), Path):
        content[CARD] = card.read_text(encoding="utf-8").replace(HERE, repository).encode()
    base = manifest.get("base_model_name_or_path")
    own = kind == "converted" or found_by_others(str(base))
    sizes = {name: len(held) if isinstance(held, bytes) else held.stat().st_size for name, held in content.items()}
    found = {
        "repository": repository,
        "url": f"{hub_endpoint()}/{repository}",
        "kind": kind,
        "base": base,
        "files": sizes,
        "bytes": sum(sizes.values()),
        "note": "" if own else f"its base is {base!r}, a place of this machine: others name theirs (--base, base=)",
        "commit": None,
    }
    if dry:
        return found
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    token = token or get_token()
    with hub_session(again=1) as closed:
        if closed:
            raise HubError(f"Nothing can be pushed to {repository!r}: {closed}.")
        if token is None:
            raise HubError(
                f"Pushing to {repository!r} needs a token with the right to write, and none was found: {LOGIN}."
            )
        try:
            api = HfApi(token=token)
            held, old = _open_branch(api, repository, kind, private, revision, overwrite)
            # Of an artefact of this kind only its own files go; of anything else, all that is not for people.
            gone = old["files"] if old is not None and old.get("kind") == kind else held
            operations = [
                *(CommitOperationAdd(name, d if isinstance(d, bytes) else str(d)) for name, d in content.items()),
                *(CommitOperationDelete(n) for n in held if n in gone and n not in content and n not in _ANYWHERE),
            ]
            said = message or f"Upload {kind} by freemoe {__version__}"
            found["commit"] = api.create_commit(repository, operations, commit_message=said, revision=revision).oid
        except FreeMoEError:
            raise
        except Exception as error:
            raise hub_error(f"repository {repository!r}", error, "", token) from error
    return found


def _open_branch(
    api: Any, repository: str, kind: str, private: bool | None, revision: str | None, overwrite: bool
) -> tuple[list[str], dict[str, Any] | None]:
    """The files and the manifest of a branch that may be written to; what is missing of repository and branch is made."""
    from huggingface_hub import errors

    try:
        info = api.model_info(repository)
        if private and not info.private:
            raise ArtifactError(
                f"The repository {repository!r} is there already and public, and --private was asked for. Make it private on its "
                "settings page first, or choose another name."
            )
        known = revision is None or revision in [branch.name for branch in api.list_repo_refs(repository).branches]
        start = revision if known else None
        held = api.list_repo_files(repository, revision=start)
        old = None if MANIFEST not in held else _manifest_there(api, repository, start)
        _require_same_kind(repository, held, old, kind, overwrite)
    except errors.RepositoryNotFoundError:
        api.create_repo(repository, private=private)
        known, held, old = revision is None, [], None
    if not known:
        api.create_branch(repository, branch=str(revision))
    return held, old


def _manifest_there(api: Any, repository: str, revision: str | None) -> dict[str, Any] | None:
    """The manifest that a repository holds; None where it is none that can be read."""
    path = api.hf_hub_download(repository, MANIFEST, revision=revision)
    try:
        found = read_json(Path(path), finite=False)
        return {**found, "files": dict(found["files"])}
    except (ValueError, KeyError, TypeError):
        return None


def _require_same_kind(
    repository: str, files: list[str], old: dict[str, Any] | None, kind: str, overwrite: bool
) -> None:
    """Raise where a repository holds something else than an artefact of a kind, unless that is to be replaced."""
    others = [name for name in files if name not in _ANYWHERE]
    if overwrite or not others or (old is not None and old.get("kind") == kind):
        return
    if old is not None:
        what = f"an artefact of kind {old.get('kind')!r}, and this is one of kind {kind!r}"
    elif "config.json" in others:
        what = "a model (config.json) that freemoe did not write"
    else:
        what = f"{len(others)} files that are no artefact of freemoe ({', '.join(others[:3])})"
    raise ArtifactError(
        f"The repository {repository!r} holds {what}. Choose another name, or --overwrite to replace it; its history keeps it."
    )
