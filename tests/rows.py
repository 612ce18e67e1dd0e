"""Files of rows for tests: JSON, one row a line."""

import json


def write_rows(path, rows):
    """Write rows, making the folders above them; a text stands as it is, all else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
