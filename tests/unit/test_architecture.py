"""The dependency rule, read from the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "fedward_common": ROOT / "common" / "fedward_common",
    "fedward_server": ROOT / "server" / "fedward_server",
    "fedward_client": ROOT / "client" / "fedward_client",
}
USES_FLOWER = {
    "common/fedward_common/records.py",
    "common/fedward_common/bundle.py",
    "server/fedward_server/app.py",
    "server/fedward_server/arrivals.py",
    "server/fedward_server/control.py",
    "server/fedward_server/database.py",
    "server/fedward_server/direct.py",
    "server/fedward_server/fleet.py",
    "server/fedward_server/grid.py",
    "server/fedward_server/objects.py",
    "server/fedward_server/probe.py",
    "server/fedward_server/secure_sum.py",
    "server/fedward_server/strategy.py",
    "server/fedward_server/superlink.py",
    "client/fedward_client/app.py",
    "client/fedward_client/link.py",
    "client/fedward_client/secure_mod.py",
}


def sources() -> list[Path]:
    found = [path for folder in PACKAGES.values() for path in sorted(folder.rglob("*.py"))]
    return [path for path in found if "templates" not in path.parts]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return found


def test_common_knows_neither_side_and_the_sides_do_not_know_each_other() -> None:
    forbidden = {
        "fedward_common": ("fedward_server", "fedward_client"),
        "fedward_server": ("fedward_client",),
        "fedward_client": ("fedward_server",),
    }
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            for name in imports(path):
                assert not name.startswith(forbidden[package]), f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_flower_is_used_in_few_files(path: Path) -> None:
    if str(path.relative_to(ROOT)) not in USES_FLOWER:
        assert not any(name == "flwr" or name.startswith("flwr.") for name in imports(path))


def test_nothing_imports_the_command_line() -> None:
    for path in sources():
        own = path.name == "cli.py" or "commands" in path.parts
        for name in imports(path):
            is_cli = (name.endswith(".cli") and name.startswith("fedward_")) or ".commands" in name
            assert own or not is_cli, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize(
    "module",
    [
        "fedward_client.cli", "fedward_client.enrol", "fedward_client.guard", "fedward_server.service",
        "fedward_server.commands.server", "fedward_server.commands.run", "fedward_server.app",
        "fedward_server.privacy_report",
    ],
)  # fmt: skip
def test_only_workers_pay_for_pytorch(module: str) -> None:
    """Seconds to import and 200 MB: a command answers at once, and a guard or a service stays small."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
