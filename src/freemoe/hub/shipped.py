"""What every artefact that was opened can do: be copied, and be pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freemoe.core.errors import ArtifactError
from freemoe.hub.push import copy_artefact, push_artefact


class ArtefactHubMixin:
    """Remembers the folder that it was opened from."""

    folder: Path | None = None  # The artefact's, on this machine; None of what was not opened from one

    def _require_folder(self) -> Path:
        """The folder whose files say what this is."""
        if self.folder is None:
            raise ArtifactError(
                f"This {type(self).__name__} was not opened from an artefact's folder, so there are no files to copy or push. Open "
                "the folder that a run wrote; of a plain model use its own save_pretrained or push_to_hub (.model)."
            )
        return self.folder

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Copy the artefact, byte for byte; its base is no part of it.

        Args:
            folder: A new or empty folder.
            overwrite: Replace an artefact that stands there.

        Raises:
            ArtifactError: This was not opened from an artefact, it was damaged since, or something stands at the target.
        """
        return copy_artefact(self._require_folder(), folder, overwrite=overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        overwrite: bool = False,
    ) -> dict[str, Any]:
        """Write the artefact to a repository of the hub; its base is no part of it.

        Args:
            repo_id: ``owner/name``; made if there is none.
            private: Whether a new repository is private.
            token: With the right to write; ``HF_TOKEN`` or what ``hf auth login`` kept if absent.
            revision: Branch, made if there is none.
            commit_message: Of the one commit.
            overwrite: Replace what stands there, where it is of another kind.

        Returns:
            Repository, url, files with their bytes, and the commit.

        Raises:
            ArtifactError, HubError: As `freemoe.hub.push.push_artefact`.
        """
        return push_artefact(
            self._require_folder(),
            repo_id,
            private=private,
            token=token,
            revision=revision,
            message=commit_message,
            overwrite=overwrite,
        )
