"""Experts on a base as an artefact: a copy of the one they came from, or a new one of what has been put together since."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from freemoe.core.artifacts import read_manifest, write_manifest
from freemoe.core.errors import ArtifactError
from freemoe.core.files import CARD, write_atomic
from freemoe.core.run.folder import require_replaceable
from freemoe.core.version import __version__
from freemoe.domain_experts.expert import EXPERTS, DomainExpert, read_experts, require_accepted, require_zeros_say
from freemoe.domain_experts.hosting.host import ExpertHost
from freemoe.domain_experts.hosting.standing import expert_stack_of
from freemoe.domain_experts.prove.card import unmeasured_card
from freemoe.domain_experts.result import KIND
from freemoe.domain_experts.route.reading import ROUTER, read_router
from freemoe.domain_experts.route.router import DomainRouter
from freemoe.evals.engine.answering import BASE, LoadedArtifact
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.identity import IDENTITY, identify_base
from freemoe.models.checkpoints.saving import require_free, save_checkpoint, whole_or_nothing
from freemoe.models.gates import left_out
from freemoe.models.switching import switched_off
from freemoe.recipes.expert_names import ExpertRef


@dataclass(frozen=True, eq=False)
class ArtefactSnapshot:
    """What an artefact held when it was opened."""

    manifest: Mapping[str, Any]
    experts: Mapping[str, DomainExpert]
    router: DomainRouter | None


class SavedExperts(ExpertHost, LoadedArtifact):
    """Experts on a base that can be saved, whatever has become of them since they were opened."""

    router: DomainRouter | None = None
    origin: ArtefactSnapshot | None = None

    def save_pretrained(self, folder: str | Path, *, base: str | None = None, overwrite: bool = False) -> Path:
        """Write the experts and their router as an artefact; the base is no part of it.

        While they are those of the artefact that they were opened from, it is copied byte for byte, with its evidence. Otherwise (they
        were made by hand, loaded from several artefacts, combined, deleted) a new one is written, which has none: its card says that
        nothing was measured. A subdomain of the router whose expert is not here any more is the base's in it.

        Args:
            folder: A new or empty folder.
            base: Where the base can be loaded from: a folder, a file or a repository of the hub. If absent, what the opened artefact
                says, or else the model itself; if given, a new artefact is written.
            overwrite: Replace an artefact that stands there.

        Raises:
            ArtifactError: There are no experts, something stands at the target, nothing says where the base is, an expert has nothing
                off, or the disk refuses.
        """
        if base is None and self._as_opened():
            return super().save_pretrained(folder, overwrite=overwrite)
        if not self.experts:
            raise ArtifactError("There are no experts to save; save the base with its own save_pretrained (.model).")
        target = Path(folder)
        with self.expert(BASE):
            require_replaceable(target, overwrite)
            experts = self._experts_to_save()
            body = self._make_manifest(base, experts)
            with whole_or_nothing(target) as partial:
                self._write_artefact(partial, body, experts)
        return target

    def _require_folder(self) -> Path:
        """The artefact's folder, while it still says which experts there are."""
        folder = super()._require_folder()
        if not self._as_opened():
            raise ArtifactError(
                f"This mixture has other experts ({', '.join(self.experts) or 'none'}) than the artefact it was opened from. Write them "
                "as a new one with save_pretrained(folder) and push that: freemoe push FOLDER OWNER/NAME."
            )
        return folder

    def _as_opened(self) -> bool:
        then = self.origin
        return then is not None and then.experts == self._experts and then.router is self.router

    def _make_manifest(self, base: str | None, experts: Sequence[DomainExpert]) -> dict[str, Any]:
        then: Mapping[str, Any] = {} if self.origin is None else self.origin.manifest
        name = base or then.get("base_model_name_or_path") or getattr(self.model, "name_or_path", None)
        if not name:
            raise ArtifactError(
                "This base does not say where it was loaded from, so nobody could find it again. Name it: save_pretrained(folder, "
                "base='folder or owner/name')."
            )
        return {
            "kind": KIND,
            "freemoe_version": __version__,
            "base_model_name_or_path": name,
            "revision": None if base else then.get("revision"),
            "base_fingerprint": fingerprint_model(self.model),
            # The base was held against it when the artefact was opened, perhaps with a tokenizer that is not here.
            IDENTITY: then.get(IDENTITY) or identify_base(self.model, self.tokenizer),
            "experts": [e.manifest_entry() for e in experts],
            "router": None if self.router is None else self.router.describe(),
            "chat": bool(then.get("chat")),
        }

    def _experts_to_save(self) -> Sequence[DomainExpert]:
        """Those that are here, and the base in the place of those that the router knows besides."""
        known = [] if self.router is None else [s for level in self.router.subdomain.values() for s in level.classes]
        return [*self._experts.values(), *(DomainExpert(name) for name in known if name not in self._experts)]

    def _write_artefact(self, folder: Path, body: Mapping[str, Any], experts: Sequence[DomainExpert]) -> None:
        folder.mkdir(parents=True)
        # Two that were loaded from one artefact may share tensors, which the format has no way to say.
        write_atomic(folder / EXPERTS, save({k: v.clone() for e in experts for k, v in e.to_tensors().items()}))
        if self.router is not None:
            write_atomic(folder / ROUTER, save(self.router.to_tensors()))
        base, own = body["base_model_name_or_path"], body["base_fingerprint"]
        (folder / CARD).write_text(unmeasured_card(base, own, [e.name for e in experts]), encoding="utf-8")
        write_manifest(folder, body)
        # What could not be read again is refused here.
        manifest = read_manifest(folder)
        read_router(folder, manifest, read_experts(folder, manifest))

    def merge_and_save(
        self,
        name: str,
        folder: str | Path,
        max_shard_size: int | str = "5GB",
        *,
        also: Callable[[Path], None] | None = None,
        overwrite: bool = False,
        allow_rejected: bool = False,
    ) -> Path:
        """Write one expert as a plain Hugging Face checkpoint that needs no freemoe; the base is bit-equal afterwards.

        The expert is switched in while the shards are written one by one: the model is never copied.

        Args:
            name: Of the expert, a combination of several (``a+b``), or ``"base"``.
            folder: Where the checkpoint shall stand; nothing may stand there yet.
            max_shard_size: Of a weight file: bytes, or digits and a unit.
            also: Writes more into the folder that it is given, while the expert is still switched in.
            overwrite: Replace a model folder that stands there.
            allow_rejected: Write the base for an expert that was rejected.

        Raises:
            ArtifactError: When the folder exists already, or cannot be written; when zeros do not say what the expert is, or it was
                rejected.
        """
        target = Path(folder)
        require_free(target, overwrite)
        self._require_accepted(name, allow_rejected)
        if name != BASE:
            require_zeros_say(name, self.described(name).unit)
        with whole_or_nothing(target) as partial:
            with self.expert(name):
                save_checkpoint(self.model, partial, max_shard_size)
                if also is not None:
                    also(partial)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
        return target

    def _require_accepted(self, name: str, allow_rejected: bool) -> None:
        self.require(name)
        if name != BASE and not allow_rejected:
            require_accepted({part: self._experts[part].kind for part in ExpertRef.parse(name).names})

    def merge_and_unload(self, name: str | None = None, *, allow_rejected: bool = False) -> Any:
        """Write an expert's zeros into the base for good, and return the plain transformers model.

        The experts are gone afterwards, as what they were chosen on is gone.

        Args:
            name: Of the expert, or a combination; the one that is switched in if absent.
            allow_rejected: Return the base for an expert that was rejected.

        Raises:
            ArtifactError: Zeros do not say what the expert is, it was rejected, or weights are not in memory.
        """
        with self.turn():
            wanted = name or self.active
            self._require_accepted(wanted, allow_rejected)
            mask = self.expert_mask(wanted)
            if wanted != BASE:
                require_zeros_say(wanted, self.described(wanted).unit)
            if left_out(self._weights, mask):
                require_zeros_say(wanted, "expert")
            if stored := [w.name for w in self._weights if w.stored is not None and w.name in mask]:
                raise ArtifactError(
                    f"{len(stored)} weights that expert {wanted!r} has off are not in memory (the first is {stored[0]!r}), so "
                    "that zeros cannot be written into them. Use merge_and_save, which writes a checkpoint."
                )
            expert_stack_of(self.model).drop_experts(self, lambda _: True)
            with self.expert(BASE):
                switched_off(self._weights, mask)  # For good: nobody keeps the way back
                self._experts, self._measurements = {}, {}
                self._on_board()
        return self.model
