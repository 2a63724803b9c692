"""For the sceptical expert: a server that attacks five live nodes, in minutes on one machine.

    python demo.py [--seed N] [--dir .demo-hostile] [--keep]

1. A plain FedAvg update gives back the digit that it was trained on.
2. Under secure aggregation a hostile server tells every lie that `server.py` knows; the nodes' journals hold each
   refusal.
3. A node is killed in a round. The sum is held against the sites' inputs, which this demo alone can know: it has the
   sites' files and computes their updates once more.
4. More nodes are killed than a round survives: it aborts, nothing is revealed, and the next round ends well.

Exit code 1 if any lie succeeds, or if anything else is not as said here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "digits"), str(HERE)]

import demo as digits_demo  # noqa: E402
from demo import DemoFailed, approve, call, copy_project, fresh, join, output, processes, say, serve  # noqa: E402
from digits.task import Digits  # noqa: E402
from fedward_common.errors import FedwardError  # noqa: E402
from fedward_common.messages import Purpose, Request  # noqa: E402
from fedward_common.secagg.server import Aborted  # noqa: E402
from fedward_common.summand import CLIPPED  # noqa: E402
from fedward_common.update import Update  # noqa: E402
from fedward_server.plan import bundle_digest  # noqa: E402
from inversion import as_if_in_the_open, invert, mse, show, trained, write_png  # noqa: E402
from prepare import prepare  # noqa: E402
from stolen import WEIGHT_SCALE, Round, Stolen  # noqa: E402

from server import LIES, gives  # noqa: E402

SITES = [f"site-{number}" for number in range(1, 6)]
STRICT = "min_cohort = 4\n"
LAX = "min_cohort = 4\nrequire_secure_sum = false\n"
RUN = """
name = "{name}"
task = "digits.task:Digits"
rounds = 1
seed = {seed}

[algorithm]
name = "fedavg"

[local]
lr = 0.1
batch_size = 1
steps = 1

[cohort]
# There are five. The run's own ServerApp waits for a sixth for ever, and the attacker speaks in its place.
min_nodes = 6
wait = 86400.0

[secure_sum]
enabled = {secure}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="A server that attacks five live nodes.")
    parser.add_argument("--seed", type=int, default=0, help="of the split and of the training")
    parser.add_argument("--dir", type=Path, default=Path(".demo-hostile"), help="work folder; made anew")
    parser.add_argument("--keep", action="store_true", help="leave all running at the end, to try lies of your own")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        demo(fresh(arguments.dir.resolve()), arguments.seed, arguments.keep)
    except (FedwardError, TimeoutError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; server and nodes are stopped.", file=sys.stderr)
        return 130
    print(f"\nAll of it held, in {time.monotonic() - began:.0f} s.")
    return 0


def demo(work: Path, seed: int, keep: bool) -> None:
    say(f"Five sites share out the digits (seed {seed})")
    files = dict(zip(SITES, prepare(work / "data", len(SITES), seed=seed), strict=True))
    project = copy_project(work, seed)
    for name, secure in (("plain", "false"), ("secure", "true")):
        (project / f"{name}.toml").write_text(RUN.format(name=name, seed=seed, secure=secure), encoding="utf-8")
    os.environ["FEDWARD_CREDENTIAL"] = digits_demo.ENVIRONMENT["FEDWARD_CREDENTIAL"] = str(
        work / "server" / "credential.json"
    )
    with processes(work) as start:
        serve(work, start)
        say("Each site joins. The policy of site-1 allows plain runs, for the first part alone; all ask for 4 nodes")
        nodes = [join(work, file, start, LAX if name == "site-1" else STRICT) for name, file in files.items()]
        bundle = bundle_digest(project)

        plain = output("run", "start", project / "plain.toml", "--detach")
        approve(work, nodes[:1], bundle)
        picture = a_plain_update(work, plain, files["site-1"])

        say("From here on site-1 has the default policy too: sums only")
        (work / "site-1" / "policy.toml").write_text(STRICT, encoding="utf-8")
        stop(SITES[:1], signal.SIGTERM)
        digits_demo.again(work, "site-1", start)
        secure = output("run", "start", project / "secure.toml", "--detach")
        approve(work, nodes[1:], bundle)
        lies(work, secure, plain)
        journals(nodes, secure)

        server = Stolen.from_disk(work / "server", secure, Digits(), SITES)
        one_node_killed(work, server, files, picture)
        restart(work, SITES[-1:], server, start)
        beyond_the_threshold(server)
        restart(work, SITES[-2:], server, start)
        say("The next round: all five are back")
        held_against_inputs(server, whole_round(server), SITES, files)
        for node in nodes:
            if call("node", "journal", "verify", "--dir", node):
                raise DemoFailed(f"The journal of {node.name} does not verify.")
        if keep:
            print(f"\nAll is still running. Edit {HERE / 'server.py'}, then in another terminal:")
            print(f"  {sys.executable} {HERE / 'server.py'} --dir {work / 'server'} --run {secure} --plain {plain} LIE")
            input("Enter stops server and nodes. ")


# --- 1


def a_plain_update(work: Path, run: str, file: Path) -> dict[str, Any]:
    """The image behind one plain update, beside the one that it was; both, by name."""
    say("1. Plain FedAvg: the server looks at the update of site-1 (one step on one digit)")
    server = Stolen.from_disk(work / "server", run, Digits(), ["site-1"])
    server.ready()
    request = Request(Purpose.TRAIN, server.run, 1, 1, server.broadcast, settings={"cohort": 5, "seconds": 60.0})
    reply = server.ask({"site-1": request})["site-1"]
    if reply.failure is not None:
        raise DemoFailed(f"site-1 does not train: {reply.failure}")
    _, true = trained(server.config, "site-1", file, server.broadcast)
    images = {"at site-1": true, "from its update": invert(server.layout, reply.vectors["delta"])}
    show(images)
    error = mse(true, images["from its update"])
    print(f"  mean squared error {error:.1e}; a guess of the mean digit has 0.075")
    if error > 1e-6:
        raise DemoFailed("The attack on a plain update did not work, so the rest would show nothing.")
    return images


# --- 2


def lies(work: Path, run: str, plain: str) -> None:
    """Every lie of `server.py`, from a process of its own."""
    say("2. Secure aggregation: a hostile server lies to the nodes")
    command = [sys.executable, HERE / "server.py", "--dir", work / "server", "--run", run, "--plain", plain]
    print("$ python " + " ".join(digits_demo.spelled(tuple(command[1:])).split()[1:]), flush=True)
    if subprocess.run(command, env=digits_demo.ENVIRONMENT, check=False).returncode:
        raise DemoFailed("A lie succeeded, or was not refused for what it is.")


def journals(nodes: list[Path], run: str) -> None:
    """What the nodes wrote down of it: every rule that a lie ran into, and no message that gave a value away."""
    call("node", "journal", "show", "--dir", nodes[1], "--run", run, "--last", "30")
    rules: set[str] = set()
    for node in nodes:
        entries = [
            json.loads(line)
            for line in (node / "journal.jsonl").read_text(encoding="utf-8").splitlines()
            if '"outcome"' in line
        ]
        refused = [entry for entry in entries if entry["outcome"] != "answered"]
        rules |= {str(entry["rule"]) for entry in refused}
        print(f"{node.name}: {len(entries)} messages left it, {len(refused)} of them refusals")
    missing = [
        lie for lie, rule in LIES.items()
        if lie != "a_vector_of_nobodys_making" and not any(rule in text for text in rules)
    ]  # fmt: skip
    if missing:
        raise DemoFailed(f"No journal holds the refusals of {', '.join(missing)}.")


# --- 3 and 4


def one_node_killed(work: Path, server: Stolen, files: dict[str, Path], picture: dict[str, Any]) -> None:
    say(f"3. {SITES[-1]} is killed in the middle of a round, after it dealt its shares")
    now = Round(server)
    now.start()
    stop(SITES[-1:])
    now.mask(lost=1)
    now.agree()
    now.unmask()
    held_against_inputs(server, now, SITES[:-1], files)
    masked = as_if_in_the_open(now.shape, now.masked["site-1"])
    images = {**picture, "from its masked one": invert(server.layout, masked)}
    print("What the server has of site-1 now is its masked vector. Read as an update it gives:")
    show(images)
    error = mse(images["at site-1"], images["from its masked one"])
    print(f"  mean squared error {error:.2f}")
    write_png(work / "digit.png", images)
    print(f"  the three as a picture: {work / 'digit.png'}")
    if error < 0.1:
        raise DemoFailed("The masked vector gives the image away.")


def beyond_the_threshold(server: Stolen) -> None:
    say(f"4. Two of five are killed in a round that survives one: {', '.join(SITES[-2:])}")
    now = Round(server)
    now.start()
    stop(SITES[-2:])
    now.mask(lost=2)
    try:
        now.sum()
    except Aborted as error:
        print(f"An honest server gives up: {error}")
    else:
        raise DemoFailed("A sum came out where none may.")
    print("A dishonest one asks the other three to go on all the same:")
    replies = {**now.agree(), **{f"{name} (unmask)": reply for name, reply in now.unmask().items()}}
    for name, reply in replies.items():
        print(f"  {name}: {reply.failure}")
    if any(map(gives, replies.values())):
        raise DemoFailed("A node went on with a round that is beyond its threshold.")


def whole_round(server: Stolen) -> Round:
    """One round as it should be."""
    now = Round(server)
    for stage in (now.start, now.mask, now.agree, now.unmask):
        stage()
    return now


def held_against_inputs(server: Stolen, now: Round, sites: Collection[str], files: dict[str, Path]) -> None:
    """The sum is that of `sites` and of nobody else: weights exactly, losses to within 1e-4, each coordinate
    within the rounding of as many values."""
    mean: Update = now.sum()
    inputs = [trained(server.config, site, files[site], server.broadcast, now.number)[0] for site in sites]
    weight = sum(done.weight for done in inputs)
    loss = sum(done.metrics["loss"] for done in inputs)
    true = sum(done.weight * done.vectors["delta"].astype(np.float64) for done in inputs)
    [group] = now.shape.groups
    most = len(inputs) * WEIGHT_SCALE * 2 * group.range / now.shape.levels
    off = float(np.abs(mean.groups["delta"] * mean.weight - true).max())
    print(
        f"The sum of {', '.join(sorted(now.masked))}: weights {mean.weight:g} (inputs {weight:g}), losses "
        f"{mean.metrics['train.loss']:.4f} ({loss:.4f}),\n{true.size} coordinates off by {off:.1e} at most, where "
        f"rounding allows {most:.1e} and they go up to {np.abs(true).max():.2g}; "
        f"{mean.metrics[CLIPPED + 'delta']:g} clipped."
    )
    wrong = mean.weight != weight or abs(mean.metrics["train.loss"] - loss) > 1e-4 or off > most
    if wrong or set(now.masked) != set(sites) or not np.abs(true).max() > 10 * most:
        raise DemoFailed("The sum is not that of the inputs.")


def stop(sites: Collection[str], how: signal.Signals = signal.SIGKILL) -> None:
    """End the nodes of these sites."""
    for site in sites:
        process = digits_demo.RUNNING[site]
        os.killpg(process.pid, how)
        process.wait()


def restart(work: Path, sites: Collection[str], server: Stolen, start: digits_demo.Start) -> None:
    """Start the nodes of these sites again, and wait for them."""
    for site in sites:
        digits_demo.again(work, site, start)
    server.ready()


if __name__ == "__main__":
    sys.exit(main())
