"""Bundles: a task packed as a Flower App Bundle (a zip file); its SHA-256 is its name.

A bundle is read with suspicion: nothing is written or imported before every name and size has been checked.
"""

from __future__ import annotations

import hashlib
import io
import stat
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from fedward_common.errors import ConfigError, FedwardError

SERVERAPP = "fedward_server.app:app"
CLIENTAPP = "fedward_client.app:app"
RUN_KEYS: Mapping[str, str | int] = {"fedward-manifest": "", "fedward-epoch": 0}
"""Flower overrides a key only if the bundle's pyproject names it."""

MAX_BYTES = 10 * 1024 * 1024
"""Flower's own limit for a bundle; a file inside may not be larger either."""
MAX_UNPACKED = 4 * MAX_BYTES
MAX_FILES = 2000
SUFFIXES = frozenset({".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"})
PLAIN_NAMES = frozenset({"LICENSE", ".info/CONTENT"})
"""Files without a suffix that Flower puts into a bundle."""

_RESERVED = frozenset({"sitecustomize", "usercustomize", "__main__"})
"""Names that Python imports by itself."""


class BundleError(FedwardError):
    """A bundle cannot be built, read or unpacked."""


def build_bundle(project: Path) -> bytes:
    """Pack a task project (a folder with a pyproject.toml). Raises `BundleError`."""
    from flwr.cli.build import build_fab_from_disk

    if not (project / "pyproject.toml").is_file():
        raise BundleError(f"{project}: no pyproject.toml here. 'fedward new NAME' makes a project.")
    try:
        data = build_fab_from_disk(project)
    except (ValueError, OSError) as error:
        raise BundleError(f"{project}: cannot be packed: {error}") from error
    Bundle.open(data)
    return data


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. files: name -> bytes; every name is relative, without `..`, of an allowed kind."""

    data: bytes
    files: Mapping[str, bytes]

    @classmethod
    def open(cls, data: bytes) -> Bundle:
        """Read a bundle. Raises `BundleError`."""
        if len(data) > MAX_BYTES:
            raise BundleError(f"the bundle has {len(data)} bytes; at most {MAX_BYTES} are allowed.")
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                files = _read_all(archive)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, ValueError) as error:
            raise BundleError(f"the bundle is not a readable zip file: {error}") from error
        return cls(data, files)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of the bundle's bytes."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        """The parsed pyproject.toml. Raises `BundleError`."""
        content = self.files.get("pyproject.toml")
        if content is None:
            raise BundleError("the bundle has no pyproject.toml.")
        try:
            return tomllib.loads(content.decode("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BundleError(f"the bundle's pyproject.toml is not valid TOML: {error}") from error

    def _table(self, *keys: str) -> dict[str, Any]:
        table: Any = self.pyproject
        for key in keys:
            table = table.get(key, {})
            if not isinstance(table, dict):
                raise BundleError(f"[{'.'.join(keys)}] in the bundle's pyproject.toml is not a table.")
        found: dict[str, Any] = table
        return found

    @property
    def name(self) -> str:
        """The project's name, for people to read."""
        return str(self._table("project").get("name", ""))

    @property
    def dependencies(self) -> tuple[str, ...]:
        """[project].dependencies. Raises `BundleError`."""
        found = self._table("project").get("dependencies", [])
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            raise BundleError("[project].dependencies in the bundle's pyproject.toml is not a list of texts.")
        return tuple(found)

    @property
    def serverapp(self) -> str:
        """The server component, 'module:attribute'."""
        return str(self._table("tool", "flwr", "app", "components").get("serverapp", ""))

    @property
    def clientapp(self) -> str:
        """The client component, 'module:attribute'."""
        return str(self._table("tool", "flwr", "app", "components").get("clientapp", ""))

    @property
    def modules(self) -> tuple[str, ...]:
        """Top-level names that can be imported once the bundle's folder is on the path."""
        found = set()
        for name in self.files:
            path = PurePosixPath(name)
            if path.suffix == ".py":
                found.add(path.parts[0] if len(path.parts) > 1 else path.stem)
        return tuple(sorted(found))

    def unpack(self, folder: Path) -> None:
        """Write the files into `folder`, which must be new or empty. Raises `BundleError`."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BundleError(f"{folder}: not empty; a bundle is unpacked into a folder of its own.")
        for name, content in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(content)

    def check(self, project: Path | None = None) -> None:
        """Raises `ConfigError`, one line a problem, unless Fedward may run this bundle.

        project: the folder that the bundle was built from; its own modules do not count as shadowed.
        """
        problems = [*self._component_problems(), *self._key_problems(), *self._shadow_problems(project)]
        if problems:
            raise ConfigError("\n".join(problems))

    def _component_problems(self) -> Iterable[str]:
        for key, value, wanted in (
            ("serverapp", self.serverapp, SERVERAPP),
            ("clientapp", self.clientapp, CLIENTAPP),
        ):
            if value != wanted:
                yield (
                    f"[tool.flwr.app.components] {key} = {value!r}: must be {wanted!r}, since a task "
                    "brings nothing that runs outside the sandbox. Set it so in pyproject.toml."
                )

    def _key_problems(self) -> Iterable[str]:
        config = self._table("tool", "flwr", "app", "config")
        for key, value in RUN_KEYS.items():
            if type(config.get(key)) is not type(value):
                shown = '""' if value == "" else str(value)
                yield (
                    f"[tool.flwr.app.config] {key} = {config.get(key)!r}: must be there as {key} = {shown}, "
                    "since Flower overrides only keys that it finds. Add the line to pyproject.toml."
                )

    def _shadow_problems(self, project: Path | None) -> Iterable[str]:
        for name in self.modules:
            if name.startswith("fedward") or name in _RESERVED or _importable(name, project):
                yield (
                    f"module {name!r} in the bundle: would stand in for the installed module of that name. "
                    "Rename it (a package named after the task is a good place for its modules)."
                )


def _read_all(archive: zipfile.ZipFile) -> dict[str, bytes]:
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > MAX_FILES:
        raise BundleError(f"the bundle has {len(entries)} files; at most {MAX_FILES} are allowed.")
    files: dict[str, bytes] = {}
    total = 0
    for entry in archive.infolist():
        _check_name(entry.orig_filename.removesuffix("/") if entry.is_dir() else entry.orig_filename)
    for entry in entries:
        _check_entry(entry)
        if entry.filename in files:
            raise BundleError(f"{entry.filename!r} stands in the bundle twice.")
        with archive.open(entry) as file:
            # The size in the header may lie: read no more than is allowed.
            content = file.read(MAX_BYTES + 1)
        total += len(content)
        if len(content) > MAX_BYTES or total > MAX_UNPACKED:
            raise BundleError(
                f"{entry.filename!r}: a file may have {MAX_BYTES} bytes, all of a bundle's {MAX_UNPACKED}."
            )
        files[entry.filename] = content
    for name in files:
        if any(str(parent) in files for parent in PurePosixPath(name).parents):
            raise BundleError(f"{name!r}: a file of the bundle stands where a folder is needed.")
    return files


def _check_name(name: str) -> None:
    parts = name.split("/")
    if "\\" in name or "\0" in name or ":" in parts[0] or {"", ".", ".."} & set(parts):
        raise BundleError(f"{name!r}: file names in a bundle are relative, without '..' or backslashes.")


def _check_entry(entry: zipfile.ZipInfo) -> None:
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        raise BundleError(f"{entry.filename!r}: a bundle holds plain files only, no links or devices.")
    if entry.flag_bits & 0x1 or entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BundleError(f"{entry.filename!r}: a bundle is stored or deflated, and not encrypted.")
    if PurePosixPath(entry.filename).suffix not in SUFFIXES and entry.filename not in PLAIN_NAMES:
        raise BundleError(f"{entry.filename!r}: a bundle holds only {', '.join(sorted(SUFFIXES))} files.")


def _importable(name: str, project: Path | None) -> bool:
    if name in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    # Not importlib.util.find_spec: that one answers from sys.modules, where this very bundle may be loaded.
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, None) if find_spec is not None else None
        if spec is None:
            continue
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
        root = project.resolve() if project is not None else None
        return root is None or not places or not all(Path(place).is_relative_to(root) for place in places)
    return False


def missing(dependencies: Iterable[str]) -> list[str]:
    """Requirements that are not met here, each with what is installed. Extras are not followed."""
    problems = []
    for text in dependencies:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            problems.append(f"{text} (not a valid requirement)")
            continue
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{text} (not installed)")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(f"{text} ({installed} is installed)")
    return problems
