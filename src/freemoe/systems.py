"""The systems, one row each. A further system is a folder of its own and a row here.

Every folder has the same five files, in which stands what the commands, `freemoe.load` and the page need:

* ``recipe.py``: its recipe, and ``result.py``: its typed result, by the names in the row, and `DOCUMENTS`;
* ``pipeline.py``: the function that runs a recipe, called as the command;
* ``artefact.py``: ``load_artefact`` (folder, base or None for the artefact's own, dtype, device, how the hub is asked -> something that
  answers) and ``inspect_artefact`` (folder, and a base to check it against or None -> what it holds, as plain data);
* ``report.py``: ``tables`` (result -> tables of `rich`, and lines below them) and ``page`` (result -> its report as HTML).

Nothing of a system is imported before it is needed, so that help stays quick.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freemoe.core.artifacts import MANIFEST, read_manifest
from freemoe.core.errors import ArtifactError
from freemoe.core.registry import Registry


@dataclass(frozen=True)
class ArtefactSystem:
    """One row.

    Attributes:
        package: Its folder, as a dotted path.
        command: That makes its artefacts.
        recipe: Name of its recipe, in ``recipe.py``.
        result: Name of its result, in ``result.py``.
        eval_target: ``module:function``: recipe of an evaluation -> what it is evaluated as.
        merge: ``module:function`` below the package: folder, name of an expert or several, output -> what was written, a plain
            checkpoint; ``dry=True`` only checks. None where there is no plain checkpoint of such an artefact.
        no_merge: Why there is none.
        own_text: ``module:function``: folder, base or None, dtype, device, threads, progress -> table and plain data of its own
            text's test part, measured again; None where an artefact has no text.
        own_text_plan: ``module:function``: folder, base or None -> what that would measure, as plain data.
    """

    package: str
    command: str
    recipe: str
    result: str
    merge: str | None = None
    no_merge: str = ""
    eval_target: str = "artefact:eval_target"
    own_text: str | None = None
    own_text_plan: str | None = None

    def part(self, path: str) -> Any:
        """What ``module:name`` below the package is; imported now."""
        return pkgutil.resolve_name(f"{self.package}.{path}")

    @property
    def recipe_type(self) -> type[Any]:
        """The class of its recipes."""
        return self.part(f"recipe:{self.recipe}")

    @property
    def result_type(self) -> type[Any]:
        """The class of its results."""
        return self.part(f"result:{self.result}")

    @property
    def documents(self) -> dict[str, Any]:
        """What its command prints as JSON, as classes: at ``""``, and of a dry run at ``"-plan"``."""
        return self.part("result:DOCUMENTS")


SYSTEMS: Registry[ArtefactSystem] = Registry("kind of artefact")
"""By the ``kind`` in an artefact's manifest."""


def system_of(folder: str | Path) -> ArtefactSystem | None:
    """The system that wrote a folder; None where there is no manifest: a plain model, or nothing.

    Raises:
        ArtifactError: When the manifest cannot be read, or is of a kind that no row knows.
    """
    if not (Path(folder) / MANIFEST).is_file():
        return None
    kind = str(read_manifest(folder, check=False).get("kind"))
    if kind not in SYSTEMS:
        raise ArtifactError(
            f"{str(folder)!r} is an artefact of kind {kind!r}, which this freemoe does not know; it knows "
            f"{', '.join(SYSTEMS.names())}. Install the freemoe that wrote it."
        )
    return SYSTEMS.get(kind)


SYSTEMS.add(
    "domain-experts",
    ArtefactSystem(
        "freemoe.domain_experts", "build", "BuildRecipe", "BuildResult",
        merge="hosting.merging:merge",
        eval_target="prove.evaluation:eval_target",
    ),
    "experts of domains behind a router, on a base (freemoe build, demo)",
)  # fmt: skip
SYSTEMS.add(
    "converted",
    ArtefactSystem(
        "freemoe.tomoe", "convert", "ConvertRecipe", "ConvertResult",
        no_merge="it is a whole model already. Load its folder with transformers' from_pretrained(trust_remote_code=True).",
    ),
    "a dense model made a token-level mixture (freemoe convert)",
)  # fmt: skip
SYSTEMS.add(
    "trimmed-moe",
    ArtefactSystem(
        "freemoe.hookmoe", "trim", "TrimRecipe", "TrimResult",
        no_merge="no plain checkpoint can say how many experts a layer runs, nor hold hooks. Use freemoe.load, generate or eval.",
        eval_target="evaluation:eval_target",
        own_text="evaluation:evaluate_own_text",
        own_text_plan="evaluation:plan_evaluation",
    ),
    "a mixture that runs fewer experts, with hooks (freemoe trim)",
)  # fmt: skip
