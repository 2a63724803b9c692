"""What several groups of commands share: the server's directory and the way to print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedward_server.paths import ServerPaths

Directory = Annotated[
    Path | None, typer.Option("--dir", help="state directory; else $FEDWARD_SERVER_STATE, ./fedward-server")
]

console = Console(highlight=False, soft_wrap=True)


def server_paths(directory: Path | None) -> ServerPaths:
    """The state directory that was asked for."""
    return ServerPaths.default() if directory is None else ServerPaths(directory.resolve())
