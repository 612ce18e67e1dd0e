"""Result files that were edited, and what is shown of them: tables for the terminal, the lines of a card, the page.

Accepted is a result that is what its schema says, and what is shown of it holds no escape codes and no markup of the file's.
"""

import importlib
import io
import json

from hypothesis import strategies as st
from pydantic import ValidationError
from rich.console import Console

from freemoe import results
from freemoe.artefacts import write_page
from freemoe.core.artifacts import MANIFEST
from freemoe.domain_experts.prove import card as expert_card
from freemoe.domain_experts.result import BuildResult
from freemoe.hookmoe.result import TrimResult
from freemoe.systems import SYSTEMS
from tests.hardening.fuzz.case import require
from tests.hardening.fuzz.drawing import byte_edits, json_edits, rarely
from tests.hardening.fuzz.editing import edited_copy
from tests.hardening.fuzz.material import write_again

RESULT = "result.json"
MARKUP = "<script>alert(1)</script>"


def strategy(material):
    """Which artefact's, the edits, and whether its page is written too, which takes a second."""

    def of(name):
        folder = material.folder / name
        edit = st.one_of(*[json_edits(folder, RESULT)] * 6, byte_edits(folder, RESULT))
        edits = st.lists(edit, min_size=1, max_size=2)
        return st.builds(lambda e, page: {"artefact": name, "edits": e, "page": page}, edits, rarely(30))

    return st.one_of(of("experts"), of("trimmed"))


def warm(material):
    importlib.import_module("matplotlib.pyplot")


def attempt(what, material, folder):
    """Read an edited result and show it."""
    own = edited_copy(material.folder / what["artefact"], folder / "artefact", what["edits"])
    write_again(own, json.loads((own / MANIFEST).read_text(encoding="utf-8")))
    found = results.read_result(own)
    experts = what["artefact"] == "experts"
    with results.wrap_display_errors(own):
        tables, lines = SYSTEMS.get(found.kind).part("report:tables")(found)
        parts = [*tables, *(expert_card.headlines(found) if experts else lines)]
    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    require("\x1b" not in shown.getvalue(), "an escape code of the file's reached the terminal")
    _require_valid(BuildResult if experts else TrimResult, own)
    if what["page"]:
        html = write_page(own).read_text(encoding="utf-8")
        require(MARKUP not in html, "markup of the file's reached the page")


def _require_valid(result, folder):
    """It was shown, so it must be what its schema says."""
    told = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    try:
        result.model_validate(told)
    except ValidationError as error:
        # A newer freemoe may write more keys.
        wrong = [fault for fault in error.errors() if fault["type"] != "extra_forbidden"]
        require(not wrong, f"a result that is none was shown: {str(wrong)[:300]}")
