"""server.toml: written by `init`, edited by the server admin."""

from __future__ import annotations

import ipaddress
import json
import re
import tomllib
from typing import Annotated, Literal

from fedward_common.errors import ConfigError
from fedward_common.files import write_atomic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fedward_server.paths import ServerPaths

_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def _host(text: str) -> str:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        if len(text) > 253 or not all(_LABEL.fullmatch(label) for label in text.split(".")):
            raise ValueError(
                "must be a host name or an IP address, without scheme and port, as nodes will use it"
            ) from None
    return text


Host = Annotated[str, AfterValidator(_host)]
Port = Annotated[int, Field(ge=1, le=65535)]


class Settings(BaseModel):
    """The `[server]` table. name: the host name or address that nodes use; it names the federation too."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Host
    sans: tuple[Host, ...] = ()
    fleet_port: Port = 9092
    service_port: Port = 8443
    control_port: Port = 8000
    max_runs: int = Field(default=2, ge=1, le=1000)
    log: Literal["human", "json"] = "human"

    @model_validator(mode="after")
    def _ports_differ(self) -> Settings:
        ports = (self.fleet_port, self.service_port, self.control_port)
        if len(set(ports)) != len(ports):
            raise ValueError(f"fleet, service and control port {ports} must differ. Choose three free ports.")
        return self

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every name and address that the server certificate holds; localhost always (the server's own parts)."""
        return tuple(dict.fromkeys((self.name, *self.sans, "localhost", "127.0.0.1")))

    @property
    def url(self) -> str:
        """The Fedward service's address for nodes and data scientists."""
        host = f"[{self.name}]" if ":" in self.name else self.name
        return f"https://{host}:{self.service_port}"


def make_settings(**fields: object) -> Settings:
    """Settings from parts. Raises `ConfigError`."""
    try:
        return Settings.model_validate(fields)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(item) for item in error.errors(include_url=False))) from error


def _line(item: ErrorDetails) -> str:
    where = ".".join(str(part) for part in item["loc"])
    rule = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        rule = f"unknown key; the keys are {', '.join(Settings.model_fields)}."
    return f"{where} = {item['input']!r}: {rule}" if where else rule


def load_settings(paths: ServerPaths) -> Settings:
    """Read server.toml. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(paths.settings.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{paths.root}: no server here. 'fedward server init' makes one; --dir names another directory."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{paths.settings}: not valid TOML: {error}") from error
    table = tables.get("server")
    if not isinstance(table, dict) or set(tables) != {"server"}:
        raise ConfigError(f"{paths.settings}: must hold the table [server] and no other.")
    try:
        return make_settings(**table)
    except ConfigError as error:
        raise ConfigError(f"{paths.settings}: {error}") from error


def write_settings(paths: ServerPaths, settings: Settings) -> None:
    """Write server.toml with a word on each key."""
    # JSON texts and lists of them are valid TOML.
    lines = f"""\
# Fedward server. Changes take effect at the next 'fedward server up'.
[server]
# What nodes call this server; it stands in the server certificate.
name = {json.dumps(settings.name)}
# Other names and addresses in the certificate ('fedward server renew' after a change).
sans = {json.dumps(list(settings.sans))}
# gRPC link of the nodes (all interfaces).
fleet_port = {settings.fleet_port}
# Enrolment and runs over HTTPS (all interfaces).
service_port = {settings.service_port}
# Flower's Control API (loopback only).
control_port = {settings.control_port}
# Runs that train at the same time; the others wait in the queue.
max_runs = {settings.max_runs}
# "human" or "json"
log = {json.dumps(settings.log)}
"""
    write_atomic(paths.settings, lines.encode())
