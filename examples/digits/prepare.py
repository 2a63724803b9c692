"""Split scikit-learn's digits over sites by Dirichlet over the classes, one file a site, and say who got what.

    python prepare.py --out data --sites 5 --alpha 0.3 --seed 0

Writes site-1.npz … (arrays train_x, train_y, test_x, test_y), heldout.npz (x, y: digits that no site has),
pooled.npz (all sites' training digits), split.json (the indices, so that whatever is compared shares the split)
and nodes.toml for `fedward simulate --data`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

HELD_OUT = 360
FEWEST = 40
"""A draw that leaves a site with fewer digits is drawn again."""


def prepare(out: Path, sites: int = 5, alpha: float = 0.3, seed: int = 0) -> list[Path]:
    """Write the split into `out`; returns the sites' files."""
    out.mkdir(parents=True, exist_ok=True)
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    heldout, rest = order[:HELD_OUT], order[HELD_OUT:]
    parts = [rng.permutation(part) for part in dirichlet(y, rest, sites, alpha, rng)]
    split = {"seed": seed, "alpha": alpha, "heldout": heldout.tolist(), "sites": {}}
    files = []
    for number, part in enumerate(parts, start=1):
        cut = len(part) // 5
        test, train = part[:cut], part[cut:]
        files.append(out / f"site-{number}.npz")
        np.savez(files[-1], train_x=x[train], train_y=y[train], test_x=x[test], test_y=y[test])
        split["sites"][f"site-{number}"] = {"train": train.tolist(), "test": test.tolist()}
    trained = np.concatenate([part[len(part) // 5 :] for part in parts])
    np.savez(out / "heldout.npz", x=x[heldout], y=y[heldout])
    np.savez(out / "pooled.npz", train_x=x[trained], train_y=y[trained], test_x=x[heldout], test_y=y[heldout])
    (out / "split.json").write_text(json.dumps(split), encoding="utf-8")
    tables = [f"[{file.stem}]\npath = {json.dumps(str(file.resolve()))}\n" for file in files]
    (out / "nodes.toml").write_text("\n".join(tables), encoding="utf-8")
    return files


def dirichlet(
    y: np.ndarray, indices: np.ndarray, sites: int, alpha: float, rng: np.random.Generator
) -> list[np.ndarray]:
    """`indices` in `sites` parts: each class shared out by its own Dirichlet(alpha) draw."""
    while True:
        owner = np.empty(len(indices), dtype=np.int64)
        for label in np.unique(y):
            of_label = y[indices] == label
            owner[of_label] = rng.choice(sites, size=of_label.sum(), p=rng.dirichlet([alpha] * sites))
        parts = [indices[owner == site] for site in range(sites)]
        if min(map(len, parts)) >= FEWEST:
            return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Split the digits over sites.")
    parser.add_argument("--out", type=Path, default=Path("data"))
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for file in prepare(arguments.out, arguments.sites, arguments.alpha, arguments.seed):
        print(file)
