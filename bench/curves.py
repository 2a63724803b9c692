"""Test accuracy against rounds and against bytes, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "results"


@dataclass(frozen=True)
class Curve:
    """accuracies: in percent. at: of each, the round and the bytes moved so far, up and down."""

    name: str
    accuracies: tuple[float, ...]
    at: tuple[tuple[int, int], ...]


def draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write an SVG with both pictures side by side."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # No date and no random ids: the same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "fedward"
    figure, (rounds, traffic) = pyplot.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for curve in curves:
        rounds.plot([round_ for round_, _ in curve.at], curve.accuracies, label=curve.name)
        traffic.plot([moved / 1e6 for _, moved in curve.at], curve.accuracies, label=curve.name)
    rounds.set(xlabel="round", ylabel="test accuracy, %")
    traffic.set(xlabel="MB moved, all nodes, up and down")
    for axes in (rounds, traffic):
        axes.grid(alpha=0.3)
    traffic.legend(frameon=False, fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
