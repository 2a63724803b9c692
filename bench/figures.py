"""Figures: what a benchmark measured, what it should have been, and the command that measured it."""

from __future__ import annotations

import json
import operator
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fedward_common.files import write_atomic

RESULTS = Path(__file__).parent / "results"

_RULES = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


@dataclass(frozen=True)
class Figure:
    """One number. value: None if the measurement did not get that far. target: "<= 0.6" and the like, None if the
    figure is only reported. peer: the same quantity of what it is compared with, measured by the same command;
    ratio: of the two, named by the figure."""

    figure: str
    value: float | None
    unit: str
    target: str | None = None
    holds: bool | None = None
    peer: float | None = None
    ratio: float | None = None
    command: str = ""

    def judged(self) -> Figure:
        """With `holds` by `target`: what was not measured does not hold."""
        if self.target is None:
            return self
        rule, bound = self.target.split()
        return replace(self, holds=self.value is not None and _RULES[rule](self.value, float(bound)))


def command() -> str:
    """The command line that runs this benchmark, as one types it in the repository."""
    spec = sys.modules["__main__"].__spec__
    words = ["python", "-m", spec.name] if spec is not None else ["python", sys.argv[0]]
    return shlex.join([*words, *sys.argv[1:]])


def write(name: str, figures: Iterable[Figure], folder: Path = RESULTS) -> Path:
    """Judge the figures, print each and write them to `<folder>/<name>.json`."""
    line = command()
    judged = []
    for figure in figures:  # some take minutes: each is shown when it is there
        one = replace(figure.judged(), command=line)
        judged.append(one)
        word = {None: "", True: "ok", False: "MISSED"}[one.holds]
        value = "not reached" if one.value is None else f"{one.value:.4g}"
        print(f"{one.figure}: {value} {one.unit}  {one.target or ''} {word}".rstrip(), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    write_atomic(path, (json.dumps([asdict(f) for f in judged], indent=1, allow_nan=False) + "\n").encode(), 0o644)
    return path
