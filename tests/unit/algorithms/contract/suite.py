"""All checks of the contract, to run them over an algorithm that is not in the registry's own list."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import test_contract

from . import (
    test_fixed_points,
    test_no_trace,
    test_refused_updates,
    test_resume,
    test_secure_sums,
    test_server_half,
)

MODULES: tuple[ModuleType, ...] = (
    test_contract,
    test_fixed_points,
    test_no_trace,
    test_refused_updates,
    test_resume,
    test_secure_sums,
    test_server_half,
)

CHECKS: dict[str, Callable[..., None]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": function
    for module in MODULES
    for name, function in vars(module).items()
    if name.startswith("test_") and inspect.isfunction(function)
}
"""Each takes `name`, and `tmp_path` if it writes files."""


def run(check: str, name: str, folder: Path) -> None:
    """One check of the registered algorithm `name`."""
    function = CHECKS[check]
    asked = inspect.signature(function).parameters
    assert set(asked) <= {"name", "tmp_path"}, f"{check} cannot be run by name alone"
    function(**{key: value for key, value in {"name": name, "tmp_path": folder}.items() if key in asked})
