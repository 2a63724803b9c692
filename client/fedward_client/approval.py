"""Bundles on this node: received, read by a person, approved. Only approved code meets the site's data.

A bundle's folder holds `bundle.fab` as it came, `tree/` unpacked for reading and running, and `approved` (JSON with
the time) once it is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import secrets
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedward_common.bundle import Bundle, missing
from fedward_common.errors import FedwardError
from fedward_common.files import owner_folder, sync_folder, write_atomic

from fedward_client.paths import NodePaths

_MIN_PREFIX = 4


class ApprovalError(FedwardError):
    """A bundle is not there, not unique by what was typed, or cannot be approved."""


@dataclass(frozen=True)
class Item:
    """One bundle on this node. state: "approved" or "pending". missing: dependencies that this node lacks.
    folder: the unpacked files."""

    sha256: str
    app: str
    state: str
    missing: tuple[str, ...]
    folder: Path


class Approvals:
    """The bundles of one node."""

    def __init__(self, paths: NodePaths) -> None:
        self._paths = paths

    def receive(self, data: bytes) -> Item:
        """Keep a bundle; one that is known already stays as it is.

        Raises `BundleError` or `ConfigError` if Fedward may not run it.
        """
        bundle = Bundle.open(data)
        bundle.check()
        if not self.known(bundle.sha256):
            owner_folder(self._paths.bundles)
            fresh = self._paths.bundles / f".{secrets.token_hex(8)}"
            try:
                bundle.unpack(fresh / "tree")
                write_atomic(fresh / "bundle.fab", data)
                fresh.chmod(0o700)
                fresh.rename(self._paths.bundle(bundle.sha256))
                sync_folder(self._paths.bundles)
            except OSError:
                # Another thread of the guard may have been first.
                if not self.known(bundle.sha256):
                    raise
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
        return self._item(bundle)

    def known(self, sha256: str) -> bool:
        """The bundle is here, approved or not."""
        return (self._paths.bundle(_checked(sha256)) / "bundle.fab").is_file()

    def approved(self, sha256: str) -> bool:
        """The bundle is here and may run."""
        return self.known(sha256) and self._marker(sha256).is_file()

    def list(self) -> Sequence[Item]:
        """All bundles: the pending ones first, then by app and hash."""
        items = [self._item(self._open(sha256)) for sha256 in self._hashes()]
        return sorted(items, key=lambda item: (item.state != "pending", item.app, item.sha256))

    def find(self, prefix: str) -> Item:
        """The bundle whose hash begins with `prefix`. Raises `ApprovalError` if there is none, or several."""
        text = prefix.strip().lower()
        if len(text) < _MIN_PREFIX:
            raise ApprovalError(f"bundle {prefix!r}: type at least the first {_MIN_PREFIX} characters of its hash.")
        found = [sha256 for sha256 in self._hashes() if sha256.startswith(text)]
        if not found:
            here = ", ".join(sha256[:12] for sha256 in self._hashes()) or "none"
            raise ApprovalError(f"bundle {prefix!r}: no bundle here begins so. Here are: {here}.")
        if len(found) > 1:
            several = ", ".join(sha256[: len(text) + 8] for sha256 in found)
            raise ApprovalError(f"bundle {prefix!r}: {len(found)} bundles begin so: {several}. Type more of it.")
        return self._item(self._open(found[0]))

    def approve(self, prefix: str) -> Item:
        """Let a bundle run here. Raises `ApprovalError`; also if this node lacks something that it needs."""
        item = self.find(prefix)
        if item.missing:
            raise ApprovalError(
                f"bundle {item.sha256[:12]} ({item.app}) needs what this node lacks: {', '.join(item.missing)}. "
                "Install it on this node, then approve the bundle."
            )
        if item.state == "approved":
            return item
        stamp = {"time": datetime.now(UTC).isoformat(timespec="microseconds"), "app": item.app}
        write_atomic(self._marker(item.sha256), json.dumps(stamp).encode())
        return self._item(self._open(item.sha256))

    def missing_dependencies(self, sha256: str) -> Sequence[str]:
        """What the bundle needs and this node lacks, each with what is installed instead."""
        return missing(self._open(sha256).dependencies)

    def unpacked(self, sha256: str) -> Path:
        """The folder to run the bundle from: exactly its files, whatever has been done to the folder since."""
        bundle = self._open(sha256)
        tree = self._tree(sha256)
        if _files_below(tree) != bundle.files:
            aside = tree.with_name(f".{secrets.token_hex(8)}")
            bundle.unpack(aside / "new")
            if tree.exists():
                tree.rename(aside / "old")
            (aside / "new").rename(tree)
            shutil.rmtree(aside, ignore_errors=True)
        return tree

    def difference(self, sha256: str) -> str:
        """A unified diff from the last approved bundle of the same app (from nothing if there is none); "" if equal.

        Control and invisible characters are shown as codes: what a person approves must be what would run.
        """
        new = self._open(sha256)
        old = self._last_approved(new)
        before: Mapping[str, bytes] = old.files if old is not None else {}
        names = sorted(before.keys() | new.files.keys())
        return "".join(_difference(name, before.get(name), new.files.get(name)) for name in names)

    def _last_approved(self, bundle: Bundle) -> Bundle | None:
        """The bundle of the same app that was approved last, other than `bundle` itself."""
        times = {}
        for sha256 in self._hashes():
            if sha256 != bundle.sha256 and self.approved(sha256):
                stamp = json.loads(self._marker(sha256).read_text(encoding="utf-8"))
                if stamp["app"] == bundle.name:
                    times[sha256] = str(stamp["time"])
        return self._open(max(times, key=lambda sha256: times[sha256])) if times else None

    def _item(self, bundle: Bundle) -> Item:
        state = "approved" if self.approved(bundle.sha256) else "pending"
        lacking = tuple(missing(bundle.dependencies))
        return Item(bundle.sha256, _visible(bundle.name), state, lacking, self._tree(bundle.sha256))

    def _hashes(self) -> Sequence[str]:
        if not self._paths.bundles.is_dir():
            return []
        return sorted(path.name for path in self._paths.bundles.iterdir() if not path.name.startswith("."))

    def _open(self, sha256: str) -> Bundle:
        path = self._paths.bundle(_checked(sha256)) / "bundle.fab"
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise ApprovalError(f"bundle {sha256[:12]}: not on this node.") from error
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ApprovalError(f"{path}: was changed, its hash is another one. Remove {path.parent}.")
        return Bundle.open(data)

    def _marker(self, sha256: str) -> Path:
        return self._paths.bundle(sha256) / "approved"

    def _tree(self, sha256: str) -> Path:
        return self._paths.bundle(sha256) / "tree"


def _checked(sha256: str) -> str:
    if len(sha256) != 64 or not set(sha256) <= set("0123456789abcdef"):
        raise ApprovalError(f"{sha256!r:.80} is not a SHA-256 in hex.")
    return sha256


def _files_below(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        return {}
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if not path.is_dir()
    }


def _difference(name: str, before: bytes | None, after: bytes | None) -> str:
    shown = _visible(name)
    lines = difflib.unified_diff(
        _lines(before), _lines(after),
        f"approved/{shown}" if before is not None else "/dev/null",
        f"offered/{shown}" if after is not None else "/dev/null",
        lineterm="",
    )  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


def _lines(content: bytes | None) -> list[str]:
    if content is None:
        return []
    # Not splitlines(): it breaks at characters that Python's own tokenizer does not take for a line's end.
    return [_visible(line) for line in content.decode("utf-8", "backslashreplace").split("\n")]


def _visible(text: str) -> str:
    return "".join(
        char if char == "\t" or unicodedata.category(char) not in ("Cc", "Cf", "Zl", "Zp") else f"<U+{ord(char):04X}>"
        for char in text
    )
