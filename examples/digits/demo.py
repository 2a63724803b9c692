"""A whole federation on this machine: one server, five enrolled nodes, TLS gRPC between them, SCAFFOLD on digits.

    python demo.py [--seed N] [--dir .demo]

Every step is a command that a server admin, a site admin or a data scientist would type; they are printed as they
run. Exit code 1 if the federated model is not what it should be (see compare.py).
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from compare import Scores, compare, verdict  # noqa: E402
from fedward_common.config import load_config  # noqa: E402
from fedward_common.errors import FedwardError  # noqa: E402
from fedward_common.http import Service, ServiceError, Unreachable  # noqa: E402
from fedward_server.plan import bundle_digest  # noqa: E402
from prepare import prepare  # noqa: E402

FEDWARD = Path(sys.executable).parent / "fedward"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
SITES = 5
FATAL_ROUND = 8
"""The round in which one node is killed."""
RUNNING: dict[str, subprocess.Popen[bytes]] = {}
"""Site -> the process of its node."""
MARK = "made-by-demo"
"""A file that says that the folder may be removed."""


class DemoFailed(FedwardError):
    """A step of the demo did not work; the text names the log to read."""


def command_line(description: str, folder: str, steps: Callable[[Path, int], int]) -> int:
    """A demo's command line: `steps` in a fresh work folder, by default `folder`; the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the training")
    parser.add_argument("--dir", type=Path, default=Path(folder), help="work folder; made anew")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return steps(fresh(arguments.dir.resolve()), arguments.seed)
    except FedwardError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; server and nodes are stopped.", file=sys.stderr)
        return 130


def demo(work: Path, seed: int) -> int:
    say(f"Five sites share out the digits (seed {seed}); each keeps its own file")
    files = prepare(work / "data", SITES, seed=seed)
    project = copy_project(work, seed)
    os.environ["FEDWARD_CREDENTIAL"] = ENVIRONMENT["FEDWARD_CREDENTIAL"] = str(work / "server" / "credential.json")
    with processes(work) as start:
        serve(work, start)
        say("Each site joins with a token of its own and starts its node")
        nodes = [join(work, file, start) for file in files]
        victim = Victim(work, nodes[-1].name, start)
        say("The data scientist starts the run")
        run = output("run", "start", project / "run.toml", "--detach")
        approve(work, nodes, bundle_digest(project))
        say("The nodes train; the server sees sums of masked vectors, and nothing of any single node")
        print(f"{victim.name} will be killed in the middle of a round, on purpose, and started again.")
        with victim.killed_in(run):
            watched = call("run", "watch", run)
        if watched:
            raise DemoFailed(f"The run did not finish. See {work}/server.log and {work}/site-1.log.")
        print_sums(work, run, victim)
        call("node", "journal", "verify", "--dir", nodes[0])
        model = work / "model.safetensors"
        if call("run", "model", run, "-o", model):
            raise DemoFailed("The model could not be fetched.")
    say("What a site wants to know (training two models for comparison)")
    scores = compare(load_config(project / "run.toml"), work / "data", model)
    print_scores(scores)
    problems = verdict(scores)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def fresh(work: Path) -> Path:
    """An empty work folder; an earlier demo's is removed, anything else is not."""
    if work.exists() and any(work.iterdir()):
        if not (work / MARK).exists():
            raise DemoFailed(f"{work}: holds files that are not the demo's. Name another folder with --dir.")
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    (work / MARK).touch()
    return work


def copy_project(work: Path, seed: int, run: str = "run.toml") -> Path:
    """The example's bundle project with the seed written into run.toml, made from the file named `run`."""
    project = work / "project"
    shutil.copytree(HERE / "digits", project / "digits", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(HERE / name, project / name)
    text = (HERE / run).read_text(encoding="utf-8")
    (project / "run.toml").write_text(text.replace("seed = 0", f"seed = {seed}"), encoding="utf-8")
    return project


Start = Callable[..., subprocess.Popen[bytes]]


@contextmanager
def processes(work: Path) -> Iterator[Start]:
    """Starts `fedward` commands in the background, each with a log of its own; all are ended at the end."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str | Path) -> subprocess.Popen[bytes]:
        if not name.endswith("-again"):  # the live table is on the screen
            print(f"$ {spelled(arguments)} &")
        with (work / f"{name}.log").open("wb") as log:
            # A session of its own: Ctrl-C reaches this script alone, which then ends them in order.
            process = subprocess.Popen(
                [FEDWARD, *map(str, arguments)],
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        running.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(running):
            if process.poll() is None:
                process.terminate()
        for process in reversed(running):
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def serve(work: Path, start: Start) -> None:
    """Set up the server and wait until all its parts answer."""
    say("The server admin sets up a server")
    fleet, service, control = map(str, free_ports(3))
    ports = ("--fleet-port", fleet, "--service-port", service, "--control-port", control)
    output("server", "init", "--dir", work / "server", "--name", "localhost", *ports)
    server = start("server", "server", "up", "--dir", work / "server")
    with Service(f"https://localhost:{service}", (work / "server/tls/ca.pem").read_text(encoding="utf-8")) as link:

        def ready() -> bool:
            if server.poll() is not None:
                raise DemoFailed(f"The server ended. See {work}/server.log.")
            try:
                link.get("/ready")
            except (Unreachable, ServiceError):
                return False
            return True

        wait_for("the server to be ready", ready, 120)


def join(work: Path, data: Path, start: Start, policy: str = "") -> Path:
    """Invite a site, enrol it, start its node; returns its state directory. policy: in the place of the default one."""
    name = data.stem
    folder = work / name
    invitation = output("server", "invite", name, "--dir", work / "server")
    words = shlex.split(invitation)
    output(*words[1:], "--dir", folder)
    if policy:
        (folder / "policy.toml").write_text(policy, encoding="utf-8")
    config = work / f"{name}.toml"
    config.write_text(f'[node]\ndevice = "cpu"\n\n[data]\npath = "{data}"\n', encoding="utf-8")
    RUNNING[name] = start(name, "node", "up", "--dir", folder, "--config", config)
    return folder


def again(work: Path, name: str, start: Start) -> None:
    """Start a site's node once more."""
    RUNNING[name] = start(f"{name}-again", "node", "up", "--dir", work / name, "--config", work / f"{name}.toml")


class Victim:
    """The node that is killed in the middle of a round: kill -9, no farewell."""

    def __init__(self, work: Path, name: str, start: Start) -> None:
        self.name = name
        self.killed = False
        self._work = work
        self._start = start
        self._over = threading.Event()

    @contextmanager
    def killed_in(self, run: str) -> Iterator[None]:
        """While the block runs: kill the node once the run is under way, and start it again a little later."""
        thread = threading.Thread(target=self._kill, args=(run,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _kill(self, run: str) -> None:
        log = self._work / f"{self.name}.log"
        # Its guard writes a line when a request arrives: it is training now.
        while not self._over.wait(0.02):
            if log.read_text(errors="replace").count(": train") >= FATAL_ROUND:
                break
        else:
            return
        process = RUNNING[self.name]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self.killed = True
        if not self._over.wait(5.0):
            again(self._work, self.name, self._start)


def print_sums(work: Path, run: str, victim: Victim) -> None:
    """What the rounds' sums held."""
    [events] = (work / "server" / "runs").glob(f"{run}*/events.jsonl")
    rounds = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "round"]
    sums = [event["secure_sum"] for event in rounds]
    last = sums[-1]
    print(
        f"\n{len(sums)} secure sums of {last['cohort']} nodes, threshold {last['threshold']}: each round survives "
        f"{last['drop_outs_survived']} drop-outs and {last['colluders_survived']} nodes that collude with the server."
    )
    without = [event["round"] for event in rounds if victim.name not in event["replies"]]
    if not victim.killed or not without:
        raise DemoFailed(f"{victim.name} was not lost in any round. See {work}/{victim.name}.log.")
    print(
        f"{victim.name} was killed while it trained in round {without[0]}: the sum is that of the other "
        f"{len(rounds[without[0] - 1]['replies'])}, exactly, and their secrets stay secret. It missed "
        f"{'round' if len(without) == 1 else 'rounds'} {', '.join(map(str, without))}."
    )


def approve(work: Path, nodes: list[Path], bundle: str) -> None:
    """Each site admin reads and approves the bundle that waits at the site's node."""
    say("Task code runs at a site only once its admin has approved it")
    for node in nodes:
        wait_for(
            f"the bundle to arrive at {node.name} (see {work}/{node.name}.log)",
            (node / "bundles" / bundle / "bundle.fab").exists,
            120,
        )
    call("node", "bundle", "list", "--dir", nodes[0])
    for node in nodes:
        output("node", "bundle", "approve", bundle[:12], "--dir", node)


def print_scores(scores: list[Scores]) -> None:
    """The table: alone, federated, pooled, on the site's own test digits and on held-out digits of all sites."""
    from rich.console import Console
    from rich.table import Table

    kinds = ("alone", "federated", "pooled")
    table = Table(box=None, pad_edge=False, title="accuracy in %", title_justify="left")
    table.add_column("\nsite")
    table.add_column("training\ndigits", justify="right")
    for digits in ("held-out", "own test"):
        for kind in kinds:
            table.add_column(f"{digits}\n{kind}", justify="right")
    for score in scores:
        cells = [f"{part[kind]:.1f}" for part in (score.heldout, score.own) for kind in kinds]
        table.add_row(score.site, str(score.examples), *cells)
    Console().print(table)
    federated, pooled = scores[0].heldout["federated"], scores[0].heldout["pooled"]
    gains = [federated - score.heldout["alone"] for score in scores]
    print(f"\nFederated {federated:.1f} %, pooled {pooled:.1f} % on held-out digits: {federated - pooled:+.1f} points.")
    print(f"Against training alone a site gains {min(gains):.1f} to {max(gains):.1f} points there.")
    narrow = [score.site for score in scores if score.own["alone"] > score.own["federated"]]
    if narrow:
        print(
            f"On its own narrow mix of digits {', '.join(narrow)} scores higher alone: a model that has seen little "
            "but those\nneed not tell all ten apart. The pooled model shows how much of that is the task's own doing."
        )


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def spelled(arguments: tuple[str | Path, ...]) -> str:
    """The command as one would type it; secrets left out."""
    here = Path.cwd()
    words = []
    for word in map(str, arguments):
        path = Path(word)
        words.append(str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else word)
    return "fedward " + " ".join(f"{word[:10]}…" if word.startswith("FW1") else shlex.quote(word) for word in words)


def output(*arguments: str | Path) -> str:
    """Run a command; its standard output. Raises `DemoFailed` with what it said."""
    print(f"$ {spelled(arguments)}", flush=True)
    done = subprocess.run([FEDWARD, *map(str, arguments)], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailed(f"'{spelled(arguments)}' failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def call(*arguments: str | Path) -> int:
    """Run a command that shows its own output; its exit code."""
    print(f"$ {spelled(arguments)}", flush=True)
    return subprocess.run([FEDWARD, *map(str, arguments)], env=ENVIRONMENT, check=False).returncode


def wait_for(what: str, condition: Callable[[], bool], seconds: float) -> None:
    """Ask `condition` again and again. Raises `DemoFailed` when the time is up."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise DemoFailed(f"Waited {seconds:.0f} s for {what}.")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


if __name__ == "__main__":
    sys.exit(command_line("A federation of five sites on this machine.", ".demo", demo))
