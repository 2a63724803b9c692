"""`python -m fedward_server.superlink`: Flower's SuperLink with Fedward's settings, started by the supervisor."""

from __future__ import annotations

import os
import sys

from fedward_server.paths import ServerPaths


def arguments(paths: ServerPaths, fleet_port: int, control_port: int) -> list[str]:
    """The command line of `flower-superlink`."""
    return [
        "--ssl-ca-certfile", str(paths.public_ca),
        "--ssl-certfile", str(paths.server_certificate),
        "--ssl-keyfile", str(paths.server_key),
        "--enable-supernode-auth",
        "--database", str(paths.superlink_database),
        "--fleet-api-address", f"0.0.0.0:{fleet_port}",
        "--host", "127.0.0.1",
        "--port", str(control_port),
        "--disable-runtime-dependency-installation",
    ]  # fmt: skip


def main() -> None:
    """Run the SuperLink of the state directory in the environment until SIGTERM."""
    paths = ServerPaths.default()
    from fedward_server.settings import load_settings

    settings = load_settings(paths)
    paths.superlink_database.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.umask(0o077)
    # A line for each poll of each node helps nobody; must be set before Flower's logger is made.
    os.environ.setdefault("FLWR_LOG_LEVEL", "WARNING")
    from fedward_server import database, fleet

    database.use()
    fleet.use(paths.superlink_database)
    sys.argv = ["flower-superlink", *arguments(paths, settings.fleet_port, settings.control_port)]
    from flwr.superlink.cli.flower_superlink import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
