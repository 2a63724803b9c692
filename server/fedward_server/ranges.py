from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranges:
    of: Mapping[str, float]
    weight_scale: float = 1.0
    @classmethod
    def first(cls, groups, initial):
        return cls(dict.fromkeys(groups, initial))
    def next(self, mean, clipped, count):
        return Ranges(self.of, max(1e-3, mean.weight / count))
    def to_dict(self):
        return {"of": dict(self.of), "weight_scale": self.weight_scale}
    @classmethod
    def from_dict(cls, d):
        return cls(**d)
