"""An image from a model update: gradient inversion of a first linear layer, and how to show it.

With one step of SGD on one image x, a row of the first layer moves by ΔW = −η·g·x and its bias by Δb = −η·g, so
x = ΔW/Δb, exactly but for rounding (Phong et al. 2018; Geiping et al. 2020, section 3.1).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits.task import Digits
from fedward_common.config import RunConfig
from fedward_common.local import LocalRunner
from fedward_common.secagg.packing import unpack
from fedward_common.summand import Shape
from fedward_common.update import Kind, Layout, Vectors
from fedward_common.work import Done, Work

SIDE = 8
_BLOCKS = " ░▒▓█"


def invert(layout: Layout, delta: Any) -> Any:
    """The image (8, 8) in [0, 1] behind an update, a flat vector of `layout`'s trainable tensors."""
    moved = Digits().model()
    layout.load(moved, np.asarray(delta, layout.dtype(Kind.TRAINABLE)), Kind.TRAINABLE)
    weight, bias = (p.detach().double().numpy() for p in (moved[0].weight, moved[0].bias))
    row = int(np.abs(bias).argmax())
    return (weight[row] / bias[row]).clip(0, 1).reshape(SIDE, SIDE)


def as_if_in_the_open(shape: Shape, packed: Any) -> Any:
    """A masked vector read as a summand that nobody masked: the update in it, if it were one."""
    words = unpack(packed, shape.length, shape.bits)
    [(group, part)] = shape.parts(words)
    return (part - shape.levels / 2) * (2 * group.range / shape.levels)


class _Seen(Digits):
    """Remembers what it trained on."""

    def __init__(self) -> None:
        self.images: list[Any] = []

    def loss(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        self.images.append(batch[0][0].reshape(SIDE, SIDE).double().numpy().copy())
        return super().loss(model, batch)


def trained(config: RunConfig, site: str, data: Path, model: Vectors, round_: int = 1) -> tuple[Done, Any]:
    """What a site's node computes in a round, computed once more from its data (which the demo has), and the first
    image that it took."""
    task = _Seen()
    done = LocalRunner(config, task, site, {"path": str(data)}).do(Work("train", round_, model))
    return done, task.images[0]


def mse(one: Any, other: Any) -> float:
    """Mean squared error."""
    return float(np.mean((one - other) ** 2))


def show(images: Mapping[str, Any], gap: str = "    ") -> None:
    """Images (8, 8) side by side in block characters, two a pixel, each under its name."""
    width = max(2 * SIDE, *map(len, images))
    print("  " + gap.join(f"{name:{width}}" for name in images))
    for y in range(SIDE):
        # Pixels are sixteenths: no noise of rounding is to decide a tie.
        rows = ("".join(2 * _BLOCKS[int(4 * pixel + 0.51)] for pixel in image[y]) for image in images.values())
        print("  " + gap.join(f"{row:{width}}" for row in rows))


def write_png(path: Path, images: Mapping[str, Any], scale: int = 24) -> None:
    """The same as an 8-bit grey PNG, each pixel a square."""
    edge = np.full((SIDE, 1), 0.5)
    joined = np.hstack([part for image in images.values() for part in (edge, image)][1:])
    grey = np.kron((255 * joined).round().astype(np.uint8), np.ones((scale, scale), np.uint8))
    lines = b"".join(b"\0" + row.tobytes() for row in grey)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", grey.shape[1], grey.shape[0], 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    )
