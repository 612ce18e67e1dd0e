"""HookMoE's tables run to their end at the smallest scale, and measure what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reproduce.running import Records
from reproduce.table import Table, find
from tests.reproduce.conftest import check_runs


@pytest.mark.parametrize("table", [t for t in find(["hookmoe"]) if not t.absent], ids=lambda t: t.name)
def test_a_table_runs(table: Table, records: Records, tmp_path: Path) -> None:
    check_runs(table, records, 12, tmp_path)


def rows_of(name: str, records: Records, folder: Path) -> dict[str, dict[str, Any]]:
    """Label -> our figures."""
    (table,) = find([name])
    return {row["label"]: row["ours"] for row in check_runs(table, records, 12, folder)["rows"]}


def test_the_mixtures_own_k_is_the_mixture(records: Records, tmp_path: Path) -> None:
    rows = rows_of("hookmoe/figure04", records, tmp_path)
    own = rows["k = 2"]
    assert own["KL"]["value"] == pytest.approx(0, abs=1e-6)
    assert (own["Average"]["gain"], own["Average"]["low"], own["Average"]["high"]) == (0, 0, 0)
    assert rows["k = 1"]["KL"]["value"] > 0.01


def test_rules_run_as_many_experts_as_they_say(records: Records, tmp_path: Path) -> None:
    rows = rows_of("hookmoe/table05", records, tmp_path)
    assert [rows["TLNLE (2, 2)"][f"layer {n}"]["value"] for n in range(4)] == [2, 2, 1, 1]
    for label in ("MoED (p = 0.52)", "D2D (tau = 0.9)"):
        layers = [rows[label][f"layer {n}"]["value"] for n in range(4)]
        assert all(1 <= act <= 2 for act in layers)
        assert rows[label]["Act"]["value"] == pytest.approx(sum(layers) / 4)
    routes = rows_of("hookmoe/table04", records, tmp_path)
    assert routes["MoED (p = 0.52)"]["Act"]["value"] < routes["MoED (p = 0.6)"]["Act"]["value"]
    assert routes["D2D (tau = 0.9)"]["Act"]["value"] < routes["D2D (tau = 0.5)"]["Act"]["value"]
    assert routes["NAEE"]["Act"]["value"] == pytest.approx(1.5, abs=0.05), "a median on other text"
    assert routes["MoED + TLNLE"]["Act"]["value"] < routes["MoED (p = 0.7)"]["Act"]["value"]


def test_groups_of_layers_are_shares_of_the_depth(records: Records, tmp_path: Path) -> None:
    rows = rows_of("hookmoe/table08", records, tmp_path)
    assert rows["0 to 7"]["Act"]["value"] == 1.0
    assert rows["0 to 3"]["Act"]["value"] == rows["4 to 7"]["Act"]["value"] == 1.5
    assert rows["7 to 7"]["Act"]["value"] == rows["6 to 7"]["Act"]["value"] == 1.75, "one layer of four is two groups"
