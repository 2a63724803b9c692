"""The same federation, whose sums hide each site: every node adds its share of the noise before it masks.

    python private_demo.py [--seed N] [--dir .demo-private]

ε grows in the table; one site has a stricter policy than the others and drops out by itself; the run ends before the
round that would cross its budget.
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from demo import (  # noqa: E402
    ENVIRONMENT,
    SITES,
    DemoFailed,
    approve,
    call,
    command_line,
    copy_project,
    join,
    output,
    processes,
    say,
    serve,
)
from fedward_server.plan import bundle_digest  # noqa: E402
from prepare import prepare  # noqa: E402

RUN = "run-private.toml"
STRICT = 2.0
"""max_epsilon_per_run of the last site; the run's own budget is twice that."""


def demo(work: Path, seed: int) -> int:
    say(f"Five sites share out the digits (seed {seed}); each keeps its own file")
    files = prepare(work / "data", SITES, seed=seed)
    project = copy_project(work, seed, RUN)
    os.environ["FEDWARD_CREDENTIAL"] = ENVIRONMENT["FEDWARD_CREDENTIAL"] = str(work / "server" / "credential.json")
    say("What the run will have spent, before it starts")
    call("plan", project / "run.toml", "--nodes", str(SITES))
    with processes(work) as start:
        serve(work, start)
        say(f"Each site joins; the last one's policy gives away at most ε = {STRICT:g} a run")
        policies = [""] * (SITES - 1) + [f"max_epsilon_per_run = {STRICT}\n"]
        nodes = [join(work, file, start, policy) for file, policy in zip(files, policies, strict=True)]
        say("The data scientist starts the run")
        run = output("run", "start", project / "run.toml", "--detach")
        approve(work, nodes, bundle_digest(project))
        say("The nodes train and add noise; the server sees noisy sums")
        call("run", "watch", run)
        report(work, run, nodes)
        for node in (nodes[0], nodes[-1]):
            call("node", "ledger", "show", "--dir", node)
            call("node", "ledger", "verify", "--dir", node)
    return 0


def report(work: Path, run: str, nodes: list[Path]) -> None:
    """What happened, and whether it is what should have."""
    [file] = (work / "server" / "runs").glob(f"{run}*/events.jsonl")
    events = [json.loads(line) for line in file.read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    end, strict = events[-1], nodes[-1].name
    if end["event"] != "run_finished" or end["status"] != "budget_spent" or not rounds:
        raise DemoFailed(f"The run did not end by its budget: {end}. See {work}/server.log and {file}.")
    refused = [event["round"] for event in rounds if "max_epsilon_per_run" in event["failures"].get(strict, "")]
    if not refused or strict in rounds[-1]["replies"]:
        raise DemoFailed(f"{strict} did not refuse. See {work}/{strict}.log.")
    last, number, of = rounds[-1]["privacy"], rounds[-1]["round"], rounds[-1]["of"]
    print(
        f"\n{strict} refused from round {refused[0]} on, by its own policy: "
        f"{rounds[refused[0] - 1]['failures'][strict]}."
        f"\nThe run ended after round {number} of {of} with ε = {last['epsilon']:.3g} at δ = {last['delta']:g}, under "
        f"its budget of {last['budget']:g}."
        f"\nWhat hides a whole site among {SITES} hides the model too: the noise in the mean has a standard deviation "
        f"of {last['noise_multiplier'] / SITES:.2g} · clip\nin every coordinate. Hundreds of sites make it as many "
        "times smaller; few sites want privacy by record or patient."
    )


if __name__ == "__main__":
    sys.exit(command_line("A federation with differential privacy by site.", ".demo-private", demo))
