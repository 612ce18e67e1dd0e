"""Free-MoE's tables and figures: MoDE's system, with one ranking per matrix."""

from __future__ import annotations

from reproduce.mode.figures import free_moe_figures
from reproduce.mode.tables import MODE_TABLES, WHOLE, as_free_moe
from reproduce.table import Table

TABLES: tuple[Table, ...] = (*(as_free_moe(table) for table in MODE_TABLES), *free_moe_figures(WHOLE))
