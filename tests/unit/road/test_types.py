"""A wrong order of steps is an error to mypy: each line marked so, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

CODE = '''
from fedward_common.pipeline import Bounded, Clip, Flat, Mask, Masked, Quantize, Quantized, Road, build
from fedward_common.summand import Shape, Words
from fedward_common.update import Update


def send(payload: Masked) -> None: ...


def right(clip: Clip, quantize: Quantize, mask: Mask, update: Update) -> None:
    road: Road[Flat, Masked] = Road.of(clip).then(quantize).then(mask)
    send(road(Flat(update)))
    send(mask(quantize(clip(Flat(update)))))
    rest: Road[Bounded, Masked] = Road.of(quantize).then(mask)
    send(rest(clip(Flat(update))))


class Noise:
    """A step that is not there yet: it fits between clipping and quantising, and nowhere else."""

    name = "noise"

    def __call__(self, value: Bounded, /) -> Bounded:
        return value


class Sneak:
    name = "sneak"

    def __call__(self, value: Quantized, /) -> bytes:
        return bytes(value)


def with_noise(clip: Clip, quantize: Quantize, mask: Mask, noise: Noise) -> None:
    road: Road[Flat, Masked] = Road.of(clip).then(noise).then(noise).then(quantize).then(mask)
    Road.of(noise).then(clip)  # wrong
    Road.of(clip).then(quantize).then(noise)  # wrong
    Road.of(clip).then(quantize).then(mask).then(noise)  # wrong


def orders(clip: Clip, quantize: Quantize, mask: Mask) -> None:
    Road.of(clip).then(clip)  # wrong
    Road.of(clip).then(mask)  # wrong
    Road.of(quantize).then(clip)  # wrong
    Road.of(quantize).then(quantize)  # wrong
    Road.of(mask).then(clip)  # wrong
    Road.of(mask).then(quantize)  # wrong
    Road.of(mask).then(mask)  # wrong
    Road.of(clip).then(quantize).then(clip)  # wrong
    Road.of(clip).then(quantize).then(quantize)  # wrong
    Road.of(clip).then(quantize).then(mask).then(mask)  # wrong


def ends(clip: Clip, quantize: Quantize, mask: Mask, update: Update, words: Words) -> None:
    Road.of(clip)(update)  # wrong
    Road.of(quantize)(Flat(update))  # wrong
    mask(words)  # wrong
    unmasked: Road[Flat, Masked] = Road.of(clip).then(quantize)  # wrong
    unclipped: Road[Flat, Masked] = Road.of(quantize).then(mask)  # wrong
    send(Road.of(clip).then(quantize)(Flat(update)))  # wrong
    send(Road.of(clip).then(quantize).then(Sneak())(Flat(update)))  # wrong
    send(words.tobytes())  # wrong
'''

# torch is not part of the question, and reading its annotations takes a minute.
CONFIG = """
[mypy]
strict = true
explicit_package_bases = true
mypy_path = {path}
[mypy-torch.*]
follow_imports = skip
follow_imports_for_stubs = true
[mypy-fedward_common.update]
ignore_errors = true
"""


def test_wrong_orders_are_type_errors(tmp_path):
    code, config = tmp_path / "orders.py", tmp_path / "mypy.ini"
    code.write_text(CODE)
    config.write_text(CONFIG.format(path=ROOT / "common"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache", "--no-error-summary",
         "--hide-error-context", code],
        capture_output=True, text=True, cwd=tmp_path, timeout=250,
    )  # fmt: skip
    found = set()
    for line in done.stdout.splitlines():
        place = re.fullmatch(r"orders\.py:(\d+): (error|note): .*", line)
        assert place, done.stdout + done.stderr
        if place[2] == "error":
            found.add(int(place[1]))
    wrong = {number for number, line in enumerate(CODE.splitlines(), 1) if line.endswith("# wrong")}
    assert len(wrong) == 21
    assert found == wrong, done.stdout
