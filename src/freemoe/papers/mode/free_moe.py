"""Free-MoE's tables and figures: MoDE's system, with one ranking per matrix."""

from __future__ import annotations

from freemoe.papers.mode.figures import free_moe_figures
from freemoe.papers.mode.tables import MODE_TABLES, WHOLE, as_free_moe
from freemoe.papers.table import Table

TABLES: tuple[Table, ...] = (*(as_free_moe(table) for table in MODE_TABLES), *free_moe_figures(WHOLE))
