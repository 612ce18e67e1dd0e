"""MoDE's tables and figures."""

from __future__ import annotations

from freemoe.papers.mode.figures import FIGURES
from freemoe.papers.mode.tables import MODE_TABLES
from freemoe.papers.table import Table

TABLES: tuple[Table, ...] = (*MODE_TABLES, *FIGURES)
