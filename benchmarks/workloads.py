"""What is timed: shapes by name, the same for every benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One call of attention."""

    batch: int
    heads: int
    length: int
    width: int
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([f"{self.batch}x{self.heads}x{self.length}x{self.width}", *words])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.width


CAUSAL = {"causal": True}
CPU = (
    Workload(1, 8, 1024, 64),
    Workload(1, 8, 4096, 64),
    Workload(1, 4, 4096, 128),
    Workload(1, 8, 4096, 64, CAUSAL),
    Workload(32, 12, 128, 64),
)
LONG = Workload(1, 1, 1 << 20, 64, {"window": (512, 0)})
QUICK = (Workload(1, 4, 1024, 64), Workload(1, 4, 1024, 64, CAUSAL))
GPU = (
    Workload(4, 16, 2048, 64),
    Workload(4, 16, 2048, 64, CAUSAL),
    Workload(1, 16, 8192, 128),
    Workload(1, 16, 8192, 128, CAUSAL),
)
