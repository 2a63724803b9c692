"""A new task project, written from the templates."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import util
from pathlib import Path
from string import Template

from fedward_common.errors import FedwardError

TEMPLATES = Path(__file__).parent / "templates" / "task"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST = 40


class ProjectError(FedwardError):
    """A project cannot be made under that name or in that place."""


def package_of(name: str) -> str:
    """The import package of a project: heart-risk -> heart_risk. Raises `ProjectError`."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        raise ProjectError(
            f"NAME = {name!r}: must be lower-case letters, digits and single hyphens, a letter first, at "
            f"most {_LONGEST} characters. For example 'heart-risk'."
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or package.startswith("fedward"):
        raise ProjectError(
            f"NAME = {name!r}: a name that Python or Fedward uses itself. Choose another, e.g. 'my-{name}'."
        )
    if util.find_spec(package) is not None:
        raise ProjectError(
            f"NAME = {name!r}: would hide the installed module {package!r}. Choose another, e.g. 'my-{name}'."
        )
    return package


def create(name: str, folder: Path, publisher: str) -> list[Path]:
    """Write the project `name` into `folder`/`name`; returns the files. Raises `ProjectError`."""
    package = package_of(name)
    root = folder / name
    if root.exists():
        raise ProjectError(f"{root}: exists already. Choose another NAME, or remove it.")
    fields = {"name": name, "package": package, "publisher": publisher}
    written = []
    for template in sorted(path for path in TEMPLATES.rglob("*.tmpl")):
        relative = template.relative_to(TEMPLATES).as_posix().removesuffix(".tmpl")
        relative = re.sub(r"^package/", f"{package}/", relative)
        target = root / relative.replace("gitignore", ".gitignore")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Template(template.read_text(encoding="utf-8")).substitute(fields), encoding="utf-8")
        written.append(target)
    return written
