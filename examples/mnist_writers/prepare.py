"""Write nodes.toml: one node for each group of writers, and one with writers that nobody trains on.

python prepare.py mnist_writers.npz --nodes 20
"""

import argparse
import json
from pathlib import Path


def prepare(data: Path, nodes: int, out: Path) -> None:
    """Write `out` for `nodes` nodes that read the file `data`."""
    path = json.dumps(str(data.resolve()))
    tables = [
        f"[group-{index + 1:02}]\npath = {path}\npartition = {index}\npartitions = {nodes}\n" for index in range(nodes)
    ]
    tables.append(f'[other-writers]\npath = {path}\npartition = 0\npartitions = 1\nsplit = "test"\n')
    out.write_text("\n".join(tables), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write nodes.toml for groups of writers.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("nodes.toml"))
    arguments = parser.parse_args()
    prepare(arguments.data, arguments.nodes, arguments.out)
