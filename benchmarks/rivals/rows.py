"""The rows that are built in, as ``rows.yaml`` has them; importing this module registers them."""

from __future__ import annotations

from pathlib import Path

import yaml

from benchmarks.rivals.rival import Rival, add

for _row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")):
    _tuples = {name: tuple(_row[name]) for name in ("groups", "bases", "rates") if name in _row}
    add(Rival(**{**_row, **_tuples, "fit": f"benchmarks.rivals.fits.{_row['fit']}"}))
