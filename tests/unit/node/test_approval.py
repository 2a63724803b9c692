"""Bundles on a node: received, shown, approved, and run exactly as approved."""

from __future__ import annotations

import hashlib
import io
import threading
import zipfile

import pytest
from fedward_client.approval import ApprovalError, Approvals
from fedward_client.paths import NodePaths
from fedward_common.bundle import BundleError
from fedward_common.errors import ConfigError

PROJECT = """
[project]
name = "{name}"
version = "1.0.0"
dependencies = [{dependencies}]
[tool.flwr.app.components]
serverapp = "{serverapp}"
clientapp = "fedward_client.app:app"
[tool.flwr.app.config]
fedward-manifest = ""
fedward-epoch = 0
"""


def pack(text="x = 1\n", name="digits", dependencies="", serverapp="fedward_server.app:app", **files: str) -> bytes:
    project = PROJECT.format(name=name, dependencies=dependencies, serverapp=serverapp)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, content in {"pyproject.toml": project, "digits_task/task.py": text, **files}.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return buffer.getvalue()


@pytest.fixture
def paths(tmp_path) -> NodePaths:
    return NodePaths(tmp_path / "state")


@pytest.fixture
def approvals(paths) -> Approvals:
    return Approvals(paths)


def test_a_bundle_waits_until_it_is_approved(approvals, paths) -> None:
    data = pack()
    sha256 = hashlib.sha256(data).hexdigest()
    assert not approvals.known(sha256) and not approvals.approved(sha256) and approvals.list() == []
    item = approvals.receive(data)
    assert (item.sha256, item.app, item.state, item.missing) == (sha256, "digits", "pending", ())
    assert (item.folder / "digits_task" / "task.py").read_text() == "x = 1\n"
    assert approvals.known(sha256) and not approvals.approved(sha256)
    assert approvals.approve(sha256[:8]).state == "approved"
    # As the guard sees it, which is another process.
    assert Approvals(paths).approved(sha256)
    assert approvals.receive(data).state == "approved"
    assert approvals.approve(sha256).state == "approved"
    assert paths.bundles.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in paths.bundles.iterdir()] == [sha256]


def test_one_byte_more_is_another_bundle(approvals) -> None:
    approvals.approve(approvals.receive(pack("x = 1\n")).sha256)
    other = approvals.receive(pack("x = 2\n"))
    assert other.state == "pending" and not approvals.approved(other.sha256)
    assert [item.state for item in approvals.list()] == ["pending", "approved"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"not a zip", BundleError),
        (pack(serverapp="evil:app"), ConfigError),
        (pack(**{"torch.py": "import os"}), ConfigError),
    ],
)
def test_what_fedward_would_not_run_is_not_kept(approvals, data, error) -> None:
    with pytest.raises(error):
        approvals.receive(data)
    assert approvals.list() == []


def test_missing_dependencies_are_named(approvals) -> None:
    item = approvals.receive(pack(dependencies='"numpy>=1", "no-such-package>=2", "torch>=99"'))
    assert len(item.missing) == 2
    assert "no-such-package" in item.missing[0] and "torch>=99" in item.missing[1]
    assert approvals.missing_dependencies(item.sha256) == list(item.missing)
    with pytest.raises(ApprovalError, match="no-such-package"):
        approvals.approve(item.sha256)
    assert not approvals.approved(item.sha256)


def test_what_was_typed_must_name_one_bundle(approvals, monkeypatch) -> None:
    with pytest.raises(ApprovalError, match="Here are: none"):
        approvals.approve("abcdef")
    # Among 200 bundles two share their first three characters, almost surely; those are found by looking.
    hashes: dict[str, str] = {}
    twins = None
    for number in range(400):
        sha256 = hashlib.sha256(pack(f"x = {number}\n")).hexdigest()
        if sha256[:2] in hashes:
            twins = (hashes[sha256[:2]], pack(f"x = {number}\n"))
            break
        hashes[sha256[:2]] = f"x = {number}\n"
    assert twins is not None
    first = approvals.receive(pack(twins[0]))
    approvals.receive(twins[1])
    with pytest.raises(ApprovalError, match="at least the first 4"):
        approvals.find(first.sha256[:2])
    monkeypatch.setattr("fedward_client.approval._MIN_PREFIX", 2)
    with pytest.raises(ApprovalError, match="2 bundles begin so"):
        approvals.find(first.sha256[:2])
    assert approvals.find(first.sha256[:40].upper()).sha256 == first.sha256
    with pytest.raises(ApprovalError, match=first.sha256[:12]):
        approvals.find("0000" if not first.sha256.startswith("0000") else "1111")


@pytest.mark.parametrize("name", ["../../etc", "", "A" * 64, "a" * 63])
def test_a_hash_is_never_a_path(approvals, name) -> None:
    for method in (approvals.known, approvals.approved, approvals.unpacked, approvals.missing_dependencies):
        with pytest.raises(ApprovalError):
            method(name)


def test_the_difference_to_the_last_approved_bundle_of_the_app(approvals) -> None:
    first = approvals.receive(pack("a = 1\nb = 2\n"))
    assert "+a = 1" in approvals.difference(first.sha256)
    assert "/dev/null" in approvals.difference(first.sha256)
    approvals.approve(first.sha256)
    other_app = approvals.receive(pack("c = 3\n", name="other"))
    approvals.approve(other_app.sha256)
    pending = approvals.receive(pack("a = 1\nb = 9\n"))
    second = approvals.receive(pack("a = 1\nb = 3\n", **{"digits_task/more.py": "y = 1\n"}))
    text = approvals.difference(second.sha256)
    assert "-b = 2" in text and "+b = 3" in text and "+y = 1" in text
    assert "c = 3" not in text and "b = 9" not in text and "+a = 1" not in text
    approvals.approve(second.sha256)
    # Now the newer approval is what counts, and a file that goes is shown too.
    text = approvals.difference(pending.sha256)
    assert "-b = 3" in text and "-y = 1" in text
    assert approvals.difference(approvals.receive(pack("a = 1\nb = 2\n")).sha256) != ""


def test_nothing_hides_in_the_difference(approvals) -> None:
    hidden = "x = 1 # \u202e\x1b[2J\rimport os\u200b\n"
    text = approvals.difference(approvals.receive(pack(hidden, name="a\\u001b[0m")).sha256)
    for char in "\u202e\x1b\r\u200b":
        assert char not in text
        assert f"<U+{ord(char):04X}>" in text
    assert "\x1b" not in approvals.list()[0].app


def test_what_runs_is_what_was_approved(approvals) -> None:
    item = approvals.receive(pack())
    assert approvals.unpacked(item.sha256) == item.folder
    (item.folder / "digits_task" / "task.py").write_text("import evil\n")
    (item.folder / "digits_task" / "extra.py").write_text("import evil\n")
    folder = approvals.unpacked(item.sha256)
    assert (folder / "digits_task" / "task.py").read_text() == "x = 1\n"
    assert not (folder / "digits_task" / "extra.py").exists()
    assert [path.name for path in sorted(folder.parent.iterdir())] == ["bundle.fab", "tree"]


def test_a_changed_bundle_file_is_refused(approvals, paths) -> None:
    item = approvals.receive(pack())
    (paths.bundle(item.sha256) / "bundle.fab").write_bytes(pack("import evil\n"))
    with pytest.raises(ApprovalError, match="was changed"):
        approvals.unpacked(item.sha256)


def test_two_runs_bring_the_same_bundle_at_once(approvals) -> None:
    data, states = pack(), []
    threads = [threading.Thread(target=lambda: states.append(approvals.receive(data).state)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == ["pending"] * 8
    assert len(approvals.list()) == 1
