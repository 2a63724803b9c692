"""Flower's own programs, with nothing of ours but `SecureSum` and the mod: a SuperLink, three SuperNodes, FedAdam."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import BIN, ENVIRONMENT, Process, free_ports, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1500)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "stock_flower_secure"
N = 3


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def superlink(tmp_path: Path) -> Iterator[Process]:
    """The SuperLink and its nodes; `flwr` finds it by the configuration in `tmp_path`."""
    fleet, control, *ports = free_ports(2 + N)
    home = {"FLWR_HOME": str(tmp_path / "flower")}
    link = Process(
        [
            "env", *(f"{key}={value}" for key, value in home.items()),
            str(BIN / "flower-superlink"), "--insecure", "--disable-runtime-dependency-installation",
            "--fleet-api-address", f"127.0.0.1:{fleet}", "--port", str(control),
        ],
        tmp_path / "superlink.log",
    )  # fmt: skip
    (tmp_path / "flower").mkdir()
    (tmp_path / "flower" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{control}"\ninsecure = true\n'
    )
    with ExitStack() as running:
        link.start()
        running.callback(link.stop)
        until("the SuperLink is up", lambda: listens(fleet) and listens(control), 120)
        for i, port in enumerate(ports):
            node = Process(
                [
                    "env", f"FLWR_HOME={tmp_path / f'node-{i}'}",
                    str(BIN / "flower-supernode"), "--insecure", "--superlink", f"127.0.0.1:{fleet}",
                    "--port", str(port), "--node-config", f"partition-id={i} num-partitions={N}",
                ],
                tmp_path / f"node-{i}.log",
            )  # fmt: skip
            node.start()
            running.callback(node.stop)
        yield link


def run(folder: Path, link: Process, **told: Any) -> dict[str, Any]:
    """The result of one run."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in {**told, "result": str(result)}.items())
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(EXAMPLE), "here", "--run-config", settings],
        env={**ENVIRONMENT, "FLWR_HOME": str(folder / "flower")}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    until("the run has ended", result.exists, 1200)
    until("the result is whole", lambda: result.read_text().endswith("}"), 10)
    return json.loads(result.read_text())


def test_stock_programs_give_the_sum_and_no_reply(superlink: Process, tmp_path: Path) -> None:
    try:
        secure = run(tmp_path, superlink, strategy="fedadam", rounds=1, nodes=N, secure=True)
    except AssertionError as error:
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(tmp_path.glob("*.log")))
        raise AssertionError(f"{error}\n{logs}") from error
    assert sorted(secure["train"]) == sorted(secure["evaluate"]) == ["1"]
    for i in range(N):
        # Once a run, though each message had a process of its own: the node's state came back.
        assert (tmp_path / f"node-{i}.log").read_text().count("honest but curious") == 1

    # The same by NumPy, from the app's own functions: Adam on the weighted mean of what three sites train.
    found = {name: np.array(value) for name, value in secure["arrays"].items()}
    for name, expected in by_hand(1).items():
        np.testing.assert_allclose(found[name], expected, atol=1e-4)


def by_hand(rounds: int) -> dict[str, Any]:
    """FedAdam (Reddi et al. 2021, Alg. 2, with Kingma and Ba's bias correction as in Flower), eta 0.02."""
    script = f'''
import json, sys
sys.path.insert(0, {str(EXAMPLE)!r})
import numpy as np
import torch
from quickstart.task import Net, load_data, train
torch.manual_seed(0)
x = {{k: v.numpy().astype(float) for k, v in Net().state_dict().items()}}
m = {{k: np.zeros_like(v) for k, v in x.items()}}
v = {{k: np.zeros_like(u) for k, u in x.items()}}
for r in range(1, {rounds} + 1):
    trained, weights = [], []
    for i in range({N}):
        net = Net()
        net.load_state_dict({{k: torch.tensor(u) for k, u in x.items()}})
        data, _ = load_data(i, {N})
        train(net, data, 0.2, 0.0, 1000 * r + i)
        trained.append(net.state_dict())
        weights.append(len(data[1]))
    for k in x:
        delta = np.average([t[k].numpy() for t in trained], axis=0, weights=weights) - x[k]
        m[k] = 0.9 * m[k] + 0.1 * delta
        v[k] = 0.99 * v[k] + 0.01 * delta**2
        rate = 0.02 * np.sqrt(1 - 0.99 ** (r + 1)) / (1 - 0.9 ** (r + 1))
        x[k] = x[k] + rate * m[k] / (np.sqrt(v[k]) + 1e-3)
print(json.dumps({{k: u.tolist() for k, u in x.items()}}))
'''
    python = [str(BIN / "python"), "-c", script]
    done = subprocess.run(python, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=True)
    return {name: np.array(value) for name, value in json.loads(done.stdout).items()}
