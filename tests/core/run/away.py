"""Workers that do not see the run's folder, without any process: what they are sent and send back is all that passes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from freemoe.core.run.units import Unit


class SerialExecutor:
    """Does units in this process, one after the other."""

    def run(self, units: Sequence[Unit]) -> Generator[tuple[Unit, Any], None, None]:
        for unit in units:
            yield unit, unit.work()

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Held:
    blob: bytes

    def get(self) -> bytes:
        return self.blob


class SerialAway(SerialExecutor):
    """Does units here, as if it were elsewhere."""

    count = 1

    def __init__(self, *asked: Any, **more: Any) -> None:
        self.shared: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def share(self, blob: bytes) -> Held:
        self.shared.append(blob)
        return Held(blob)
