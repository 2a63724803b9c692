"""What the groups of `fedward node` share: the node's directory and the way to print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

Folder = Annotated[Path, typer.Option("--dir", envvar="FEDWARD_NODE_STATE", help="The node's state directory.")]
DEFAULT = Path("fedward-node")
out = Console()
