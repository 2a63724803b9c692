"""Exit status 0 if the server of this container is ready: asks /ready over TLS, with the server's own CA."""

import os
import ssl
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

state = Path(os.environ.get("FEDWARD_SERVER_STATE", "fedward-server"))
if not (state / "server.toml").exists():
    sys.exit(f"not ready: {state} holds no server; run 'fedward server init' first")
port = tomllib.loads((state / "server.toml").read_text(encoding="utf-8"))["server"]["service_port"]
opener = urllib.request.build_opener(
    # No proxy: the question goes to this machine.
    urllib.request.ProxyHandler({}),
    urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=str(state / "tls" / "ca.pem"))),
)
try:
    opener.open(f"https://127.0.0.1:{port}/ready", timeout=8).close()
except urllib.error.HTTPError as error:
    sys.exit(f"not ready: {error.read().decode(errors='replace')}")
except OSError as error:
    sys.exit(f"not ready: {error}")
