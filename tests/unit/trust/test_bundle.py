"""Bundles that must not be opened, unpacked or run; and Flower's own that must."""

from __future__ import annotations

import io
import stat
import struct
import zipfile
from pathlib import Path

import pytest
from fedward_common.bundle import MAX_BYTES, Bundle, BundleError, build_bundle, missing
from fedward_common.errors import ConfigError

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "digits"
version = "1.0.0"
description = ""
license = "Apache-2.0"
dependencies = ["torch>=2"]
[tool.flwr.app]
publisher = "someone"
fab-include = ["**/*.py"]
[tool.flwr.app.components]
serverapp = "fedward_server.app:app"
clientapp = "fedward_client.app:app"
[tool.flwr.app.config]
fedward-manifest = ""
fedward-epoch = 0
"""


def packed(files: dict[str, str | bytes], **changes: str) -> bytes:
    pyproject = PYPROJECT
    for old, new in changes.items():
        assert old in pyproject
        pyproject = pyproject.replace(old, new)
    return zipped({"pyproject.toml": pyproject, **files})


def zipped(files: dict[str, str | bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    (folder / "digits_task").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "digits_task" / "__init__.py").write_text("")
    (folder / "digits_task" / "task.py").write_text("x = 1\n")
    (folder / ".env").write_text("PASSWORD=1")
    (folder / "notes.txt").write_text("secret")
    return folder


def test_a_project_is_built_by_flower_and_opened(project: Path, tmp_path: Path) -> None:
    data = build_bundle(project)
    assert build_bundle(project) == data
    bundle = Bundle.open(data)
    assert set(bundle.files) == {"pyproject.toml", "digits_task/__init__.py", "digits_task/task.py", ".info/CONTENT"}
    assert (bundle.name, bundle.modules, bundle.dependencies) == ("digits", ("digits_task",), ("torch>=2",))
    bundle.check()
    bundle.unpack(tmp_path / "out")
    assert (tmp_path / "out" / "digits_task" / "task.py").read_text() == "x = 1\n"
    with pytest.raises(BundleError, match="not empty"):
        bundle.unpack(tmp_path / "out")


def test_no_project_here(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="fedward new"):
        build_bundle(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    with pytest.raises(BundleError, match="cannot be packed"):
        build_bundle(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.py", "a/../../x.py", "/x.py", "a//x.py", "./x.py", "a\\x.py", "C:/x.py", "..", "a/./x.py"],
)
def test_names_that_lead_elsewhere(name: str) -> None:
    with pytest.raises(BundleError, match=r"relative|not a readable"):
        Bundle.open(packed({name: ""}))


def test_a_name_that_ends_early() -> None:
    """The kind is checked on the whole name, the file is written under the part before the NUL."""
    data = packed({"x.pth_.py": ""}).replace(b"x.pth_.py", b"x.pth\0.py")
    with pytest.raises(BundleError, match=r"relative|not a readable"):
        Bundle.open(data)


@pytest.mark.parametrize("name", ["x.pth", "x.so", "x", "x.py.exe", "a/LICENSE", ".env", "x.PY"])
def test_kinds_of_files_that_a_bundle_does_not_hold(name: str) -> None:
    with pytest.raises(BundleError, match="holds only"):
        Bundle.open(packed({name: ""}))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices(kind: int) -> None:
    entry = zipfile.ZipInfo("x.py")
    entry.external_attr = (kind | 0o777) << 16
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(BundleError, match="no links"):
        Bundle.open(buffer.getvalue())


def test_a_name_twice() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, pytest.warns(UserWarning):
        archive.writestr("x.py", "good")
        archive.writestr("x.py", "bad")
    with pytest.raises(BundleError, match="twice"):
        Bundle.open(buffer.getvalue())


def test_a_file_where_a_folder_is_needed() -> None:
    with pytest.raises(BundleError, match="where a folder is needed"):
        Bundle.open(packed({"a.py": "", "a.py/b.py": ""}))


def test_a_file_that_grows() -> None:
    with pytest.raises(BundleError, match="a file may have"):
        Bundle.open(packed({"x.json": b"0" * (MAX_BYTES + 1)}))
    with pytest.raises(BundleError, match="all of a bundle's"):
        Bundle.open(packed({f"{number}.json": b"0" * (MAX_BYTES - 1) for number in range(5)}))


def test_a_header_that_lies_about_the_size() -> None:
    data = packed({"x.json": b"0" * (MAX_BYTES + 1)})
    # Said both before the file and in the central directory.
    real, lie = struct.pack("<I", MAX_BYTES + 1), struct.pack("<I", 10)
    assert data.count(real) == 2
    with pytest.raises(BundleError):
        Bundle.open(data.replace(real, lie))


@pytest.mark.parametrize("data", [b"", b"PK", b"x" * 100, b"0" * (MAX_BYTES + 1)])
def test_what_is_no_bundle(data: bytes) -> None:
    with pytest.raises(BundleError):
        Bundle.open(data)


def test_other_compressions_are_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.py", "x" * 1000)
    with pytest.raises(BundleError, match="stored or deflated"):
        Bundle.open(buffer.getvalue())


@pytest.mark.parametrize("content", [None, b"[", b"\xff", b"[tool]\nflwr = 3\n"])
def test_a_bad_pyproject(content: bytes | None) -> None:
    bundle = Bundle.open(zipped({"x.py": ""} if content is None else {"pyproject.toml": content}))
    with pytest.raises(BundleError, match=r"pyproject\.toml"):
        bundle.check()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("fedward_server.app:app", "digits.server:app", "serverapp = 'digits.server:app'"),
        ("fedward_client.app:app", "digits.client:app", "clientapp = 'digits.client:app'"),
        ('serverapp = "fedward_server.app:app"', "", "serverapp = ''"),
        ('fedward-manifest = ""', "", "fedward-manifest = None"),
        ("fedward-epoch = 0", "fedward-epoch = false", "fedward-epoch = False"),
    ],
)
def test_components_and_keys_must_be_ours(old: str, new: str, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Bundle.open(packed({"digits_task/task.py": ""}, **{old: new})).check()
    assert text in str(refused.value) and "pyproject.toml" in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "json.py", "torch/__init__.py", "fedward_common/signing.py", "fedward_new.py", "flwr/a.py", "sys.py",
        "sitecustomize.py", "usercustomize.py", "numpy.py", "__main__.py",
    ],
)  # fmt: skip
def test_no_module_stands_in_for_another(name: str) -> None:
    with pytest.raises(ConfigError, match=r"would stand in for the installed module.*Rename it"):
        Bundle.open(packed({name: "", "digits_task/task.py": ""})).check()


def test_a_project_does_not_shadow_itself(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(build_bundle(project))
    monkeypatch.syspath_prepend(str(project))
    bundle.check(project)
    with pytest.raises(ConfigError, match="digits_task"):
        bundle.check()


def test_missing_dependencies_are_named() -> None:
    wanted = ["numpy", "numpy>=999", "no-such-thing-here>=1", "x; python_version < '3'", "!", "PyYAML[extra]>=0"]
    found = missing(wanted)
    assert [line.partition(" (")[0] for line in found] == ["numpy>=999", "no-such-thing-here>=1", "!"]
    assert "is installed" in found[0] and "not installed" in found[1] and "not a valid" in found[2]
