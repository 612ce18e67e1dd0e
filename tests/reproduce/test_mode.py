"""MoDE's and Free-MoE's tables run to their end at the smallest scale."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.running import Records
from reproduce.table import Table, find
from tests.reproduce.conftest import check_runs


@pytest.mark.parametrize("table", [t for t in find(["mode", "free-moe"]) if not t.absent], ids=lambda t: t.name)
def test_a_table_runs(table: Table, records: Records, tmp_path: Path) -> None:
    check_runs(table, records, 16, tmp_path)
