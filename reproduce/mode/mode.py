"""MoDE's tables and figures."""

from __future__ import annotations

from reproduce.mode.figures import FIGURES
from reproduce.mode.tables import MODE_TABLES
from reproduce.table import Table

TABLES: tuple[Table, ...] = (*MODE_TABLES, *FIGURES)
