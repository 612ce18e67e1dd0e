"""The folder of a run, which is ``OUTPUT.partial`` while it lasts.

It becomes ``OUTPUT`` in one rename when all is written, so that a folder named ``OUTPUT`` is always whole.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from freemoe.core.environment import DECIDING, package_versions
from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.files import (
    MANIFEST,
    PAGES,
    TEMPORARY,
    disk_error,
    json_digest,
    make_folder,
    notify_watchers,
    write_atomic,
)
from freemoe.core.run.journal import RunJournal
from freemoe.core.run.lock import acquire_lock, release_lock
from freemoe.core.run.unit_state import UnitState, delete_states

INPUTS = "inputs"
"""The unit that notes what a run reads. A run that has done no other did nothing."""

PREPARING = (INPUTS, "number format", "features")
"""What is before the bar of a unit that only looks at documents: nothing is lost with it where a run is refused."""

RUNNING = "running.pid"
"""In a working folder: the process that writes it, locked while that one lives."""


IDENTITY = "identity.json"
"""In a working folder: everything that decides the result."""

JOURNAL = "journal.jsonl"
"""In a working folder: the finished units of work."""

WORKING = ("units", "parts", "states")
"""Folders of a working folder that only a resumed run needs."""


def _partial_of(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _unit_file(partial: Path, name: str) -> Path:
    return partial / "units" / f"{json_digest(name)}.safetensors"


def _part_files(partial: Path, unit: str) -> list[Path]:
    """What several processes wrote down of a unit's work; of all units where it is empty."""
    return sorted((partial / "parts").glob(f"{json_digest(unit) if unit else '*'}-*.jsonl"))


def interrupted_message(output: str | Path) -> str:
    """What to tell someone who stopped a run."""
    partial = _partial_of(Path(output))
    with contextlib.suppress(OSError):
        if (partial / JOURNAL).exists():
            return f"Stopped. Finished work is kept in {str(partial)!r}; run the same command again to go on."
    return "Stopped before any unit of work was finished."


class RunFolder:
    """The working folder of one run and its journal.

    A resumed run must have the same ``identity`` (the recipe), and the same versions of the packages that compute it.
    ``overwrite`` replaces a finished folder, and forgets an unfinished run of another identity.

    Raises:
        ArtifactError: When something is in the way, cannot be written to, or another process is writing there.
    """

    def __init__(
        self, output: str | Path, identity: dict[str, Any], overwrite: bool = False, resume: bool = True
    ) -> None:
        self.began = time.time()
        self.output = Path(output)
        if self.output.name in ("", ".."):
            raise ArtifactError(f"{str(output)!r} names no new folder. Choose another -o.")
        self.partial = _partial_of(self.output)
        self.overwrite = overwrite
        _restore_replaced(self.output)
        require_replaceable(self.output, overwrite)
        mark = self.partial / IDENTITY
        if self.partial.exists():
            held = {p.name for p in self.partial.iterdir()} if self.partial.is_dir() else {""}
            # Or one that was killed before its first file was whole.
            if not (mark.is_file() or held <= {IDENTITY + TEMPORARY, RUNNING}):
                raise ArtifactError(
                    f"{str(self.partial)!r} is not an unfinished run of freemoe (it has no identity.json). Move it away, or choose "
                    "another -o."
                )
        make_folder(self.partial, parents=True)
        self._claim = acquire_lock(self.partial / RUNNING, self.partial)
        try:
            self._begin_or_go_on(mark, _identity_with_versions(identity), overwrite, resume)
        except ArtifactError:
            if not mark.exists():
                (self.partial / RUNNING).unlink(missing_ok=True)
            self._release_claim()
            raise
        self.journal = RunJournal(self.partial / JOURNAL)
        self.merge_parts()
        self._remove_leftovers()

    def _begin_or_go_on(self, mark: Path, identity: dict[str, Any], overwrite: bool, resume: bool) -> None:
        """Note what decides the result, or see that the run which lies here has the same; one in nobody's way is removed."""
        try:
            known = json.loads(mark.read_text(encoding="utf-8")) if mark.exists() else None
        except ValueError:
            known = {}
        if known is not None and (known != identity or not resume):
            # A run that stopped before its first unit of work (a misspelt task, a missing file) is in nobody's way.
            idle = set(RunJournal(self.partial / JOURNAL).unit_names()) <= {INPUTS} and not self._state_files()
            if resume and not (overwrite or idle):
                raise ArtifactError(
                    f"{str(self.partial)!r} holds an unfinished run of another recipe or version (differs in: "
                    f"{', '.join(_differing_fields(known, identity))}). Finish it with its own, or choose another -o, or "
                    "--no-resume to discard it."
                )
            # All but the lock; the mark goes last, so that a kill in between leaves a run that is told apart.
            for path in sorted(self.partial.iterdir(), key=lambda path: path == mark):
                if path.name != RUNNING:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not mark.exists():
            write_atomic(mark, json.dumps(identity).encode())

    def _state_files(self) -> list[Path]:
        """States of units that were stopped in their middle."""
        return list((self.partial / "states").glob("*.state"))

    def _remove_leftovers(self) -> None:
        """Remove what a kill left behind that nobody will read: halves of files, states of units that were finished."""
        for folder in (self.partial, self.partial / "units", self.partial / "states"):
            for path in (*folder.glob(f"*{TEMPORARY}"), *folder.glob(".*.lock")):
                path.unlink(missing_ok=True)
        finished = {json_digest(name) for name in self.journal.unit_names()} if self._state_files() else set()
        for path in self._state_files():
            if path.name.partition("-")[0] in finished:
                path.unlink(missing_ok=True)

    def discard_if_idle(self, refused: bool = False) -> None:
        """Remove the working folder if no unit of work was finished: nothing is lost, and nothing lies about.

        A run that is ``refused`` cannot go on as it is, so that units that only prepare are of no use either.
        """
        nothing = PREPARING if refused else (INPUTS,)
        if not self._state_files() and all(name.partition("|")[0] in nothing for name in self.journal.unit_names()):
            shutil.rmtree(self.partial, ignore_errors=True)
        self._release_claim()

    def _release_claim(self) -> None:
        """Let other processes have the folder; ends by itself with this process."""
        release_lock(self._claim)
        self._claim = None

    def require_same_inputs(self, now: dict[str, Any]) -> None:
        """Write down what the run reads, by what it is; a resumed run must read the same."""
        then = self.journal.run_unit(INPUTS, lambda: now)
        for what, value in now.items():
            # A run that an older freemoe began knows less of them.
            if then.get(what, value) != value:
                raise DataError(
                    f"The unfinished run at {str(self.partial)!r} was started with another {what}. Put it back, or start over "
                    "with --no-resume."
                )

    def unit_state(self, name: str) -> UnitState:
        """Where a unit of work keeps how far it has come, until it is finished."""
        return UnitState(self.partial / "states", name)

    def run_unit(self, name: str, work: Callable[[], Any]) -> Any:
        """Like `RunJournal.run_unit`, for work that keeps a `state`: it goes when the unit is finished."""
        found = self.journal.run_unit(name, work)
        delete_states(self.partial / "states", name)
        return found

    def run_tensor_unit(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Like `RunJournal.run_unit` for a dict of tensors: kept in a safetensors file named in the journal."""
        from safetensors.torch import load_file, save

        path = _unit_file(self.partial, name)
        if name in self.journal and path.exists():
            expected = self.journal.run_unit(name, dict)
            if hashlib.sha256(path.read_bytes()).hexdigest() == expected["sha256"]:
                return load_file(path)
        make_folder(path.parent)
        blob = save({k: v.contiguous() for k, v in work().items()})
        write_atomic(path, blob, f"unit {name}")
        seen = self.run_unit(name, lambda: {"sha256": hashlib.sha256(blob).hexdigest()})
        if seen["sha256"] != hashlib.sha256(blob).hexdigest():
            raise ArtifactError(
                f"{path} is damaged, and doing the unit {name!r} again gives another result. Start over with --no-resume."
            )
        return load_file(path)

    def merge_parts(self, unit: str = "") -> None:
        """Take into the journal what other processes have done of a unit's work (`RunPart`), or of any."""
        for path in _part_files(self.partial, unit):
            self.journal.merge_file(path)
            path.unlink()

    @staticmethod
    def load_tensors(output: str | Path, name: str) -> dict[str, Any]:
        """The tensors of a unit of a run that another process keeps."""
        from safetensors.torch import load_file

        return load_file(_unit_file(_partial_of(Path(output)), name))

    def has_tensors(self, name: str) -> bool:
        """Whether the tensors of a unit are there, and not only remembered."""
        return name in self.journal and _unit_file(self.partial, name).exists()

    def delete_tensors(self, name: str) -> None:
        """Delete the tensors of a unit that a later one has replaced; nothing where there are none."""
        with contextlib.suppress(OSError):
            _unit_file(self.partial, name).unlink(missing_ok=True)

    def publish_folder(self) -> Path:
        """Make the finished folder appear under its name, in one step.

        What only a resumed run needs goes last: whoever is killed before that can still resume.

        Raises:
            ArtifactError: When a folder appeared under the name meanwhile, or the disk refuses.
        """
        old = None
        notify_watchers("begins", "publish")
        try:
            require_replaceable(self.output, self.overwrite)
            if self.output.exists():
                old = Path(tempfile.mkdtemp(prefix=f"{self.output.name}.old-", dir=self.output.parent))
                self.output.rename(old / "replaced")
                notify_watchers("half", "publish")
            self.partial.rename(self.output)
        except OSError as error:
            if old is not None and (old / "replaced").exists() and not self.output.exists():
                (old / "replaced").rename(self.output)
                old.rmdir()
            if isinstance(error, ArtifactError):
                raise
            raise disk_error(error, self.output) from error
        notify_watchers("done", "publish")
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        _remove_working_files(self.output)
        self._release_claim()
        return self.output


def strip_if_finished(output: str | Path, identity: dict[str, Any]) -> bool:
    """Whether a run of this identity was killed right after its folder had appeared; what it left there is removed now."""
    mark = Path(output) / IDENTITY
    try:
        same = json.loads(mark.read_text(encoding="utf-8")) == _identity_with_versions(identity)
    except (OSError, ValueError):
        return False
    if same and (Path(output) / MANIFEST).is_file():
        _remove_working_files(Path(output))
        return True
    return False


def _identity_with_versions(identity: dict[str, Any]) -> dict[str, Any]:
    """An identity as JSON gives it back, with the versions that decide results."""
    return json.loads(json.dumps({**identity, "versions": package_versions(DECIDING)}))


def _remove_working_files(output: Path) -> None:
    """Remove from a finished folder what only a resumed run needs; the identity last, so that a kill in between is seen."""
    for name in WORKING:
        shutil.rmtree(output / name, ignore_errors=True)
        notify_watchers("done", f"strip {name}")
    for name in (JOURNAL, RUNNING, IDENTITY):
        with contextlib.suppress(OSError):
            (output / name).unlink(missing_ok=True)


def _restore_replaced(output: Path) -> None:
    """Give a folder its name again that a run had moved aside to replace it, when it was killed."""
    for old in output.parent.glob(f"{glob.escape(output.name)}.old-*"):
        kept = old / "replaced"
        with contextlib.suppress(OSError):
            if [p.name for p in old.iterdir()] != ["replaced"] or not _files_of(kept):
                continue
            if output.exists():
                # Its successor is there.
                shutil.rmtree(old, ignore_errors=True)
            else:
                kept.rename(output)
                old.rmdir()


class RunPart(RunFolder):
    """The working folder of a run that another process keeps, for one that does a part of its work.

    It reads what is finished there. What it finishes itself lies beside that, until the other one joins it: nothing is lost
    whichever of them is killed.
    """

    def __init__(self, output: str | Path, unit: str) -> None:
        self.output = Path(output)
        self.partial = _partial_of(self.output)
        self.overwrite = False
        self._claim = None
        known = [*_part_files(self.partial, unit), self.partial / JOURNAL]
        # One file for every process: of two that do the same part, one may be dying.
        own = self.partial / "parts" / f"{json_digest(unit)}-{os.getpid()}.jsonl"
        own.parent.mkdir(exist_ok=True)
        self.journal = RunJournal(own, [path for path in known if path != own])

    def delete_tensors(self, name: str) -> None:
        """Leave it to the other process."""


def require_replaceable(output: Path, overwrite: bool) -> None:
    """Raise unless an artefact may be written to a place: nothing stands there, an empty folder, or one that may be replaced.

    Raises:
        ArtifactError: It is not to be replaced, is no artefact, or holds a file that its manifest does not name.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise ArtifactError(
            f"{str(output)!r} exists already. Choose another -o, or --overwrite to replace it; a finished run is never "
            "changed."
        )
    if not output.is_dir() or not _files_of(output):
        raise ArtifactError(
            f"{str(output)!r} is not an artefact of freemoe (it has no {MANIFEST} that says so) and is not replaced. Choose "
            "another -o, or move it away."
        )
    # Links are not followed.
    pages = {f".{page}.lock" for page in PAGES}.union(PAGES)
    ours = {MANIFEST, RUNNING, IDENTITY, JOURNAL, *pages, *_files_of(output)}
    paths = {path.relative_to(output) for path in output.rglob("*") if path.is_symlink() or not path.is_dir()}
    if others := sorted(str(path) for path in paths if str(path) not in ours and path.parts[0] not in WORKING):
        raise ArtifactError(
            f"{str(output)!r} holds {others[0]!r}{f' and {len(others) - 1:,} more' * (len(others) > 1)}, which its manifest does not "
            "name: freemoe did not write it, and it would be deleted. Move it away, or choose another -o."
        )


def _files_of(folder: Path) -> list[str]:
    """What an artefact's manifest lists, whatever has become of the rest; nothing where it is none."""
    try:
        said = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    known = isinstance(said, dict) and {"format", "kind"} <= said.keys() and isinstance(said.get("files"), dict)
    return list(said["files"]) if known else []


def _differing_fields(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        return [d for k in keys for d in _differing_fields(a.get(k), b.get(k), f"{path}.{k}" if path else k)]
    return [] if a == b else [path]
