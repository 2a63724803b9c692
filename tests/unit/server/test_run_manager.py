"""The run manager against a Flower that obeys the test; store, signatures, bundles and files are real."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fedward_common.errors import ConfigError
from fedward_common.manifest import Manifest, ManifestError
from fedward_common.signing import SignatureError, generate
from fedward_server.runs import MAX_RESTARTS, STOP_GRACE, RunError, Unknown
from world import World, make_bundle, make_config


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_run_goes_through_its_states(world: World) -> None:
    run = world.submit()
    assert world.status(run) == "queued"
    world.tick()
    assert world.status(run) == "starting"
    assert world.flower.started[0]["fedward-epoch"] == 1
    assert world.flower.started[0]["fedward-manifest"] == world.run(run).manifest.read_text()
    assert world.prepared == 1
    world.flower.states[1] = "running"
    world.tick()
    assert world.status(run) == "running"
    world.say(run, "round", round=3)
    world.say(run, "run_finished", status="finished", reason="all rounds done", round=3)
    world.tick()
    view = world.manager.view(run)
    assert (view.status, view.reason, view.round, view.rounds) == ("finished", "all rounds done", 3, 3)


def test_the_third_of_three_runs_waits_for_room(world: World) -> None:
    runs = [world.submit() for _ in range(4)]
    assert [world.manager.view(run).position for run in runs] == [1, 2, 3, 4]
    world.tick()
    assert [world.status(run) for run in runs] == ["starting", "starting", "queued", "queued"]
    assert [world.manager.view(run).position for run in runs] == [None, None, 1, 2]
    world.say(runs[1], "run_finished", status="early_stopped", reason="")
    world.tick()
    assert [view.status for view in world.manager.views()] == ["starting", "early_stopped", "starting", "queued"]


def test_a_lost_run_is_resumed_with_the_next_epoch(world: World, caplog: pytest.LogCaptureFixture) -> None:
    run = world.submit()
    world.tick()
    world.flower.states[1] = "finished"
    world.tick()
    assert world.flower.started[1]["fedward-epoch"] == 2
    assert world.status(run) == "starting"
    assert "Traceback of run 1" in caplog.text
    # A SuperLink that lost its database does not know the run at all.
    world.flower.states.clear()
    world.tick()
    assert world.flower.started[2]["fedward-epoch"] == 3


def test_the_servers_log_tells_of_a_ledger_that_went_back(world: World, caplog: pytest.LogCaptureFixture) -> None:
    run = world.submit()
    world.tick()
    world.flower.states[1] = "running"
    heads = {"expected": "9:" + "a" * 64, "told": "7:" + "b" * 64}
    world.say(run, "ledger_mismatch", node="clinic-a", **heads, settled=False)
    for _ in range(2):
        world.tick()
    (record,) = [record for record in caplog.records if "privacy ledger" in record.getMessage()]
    assert record.levelname == "WARNING" and vars(record)["run"] == run
    assert record.getMessage() == (
        f"the privacy ledger of clinic-a is at {heads['told']}, but {heads['expected']} was told before: it was rolled "
        "back or changed"
    )


def test_a_new_manager_resumes_what_it_finds(world: World) -> None:
    run = world.submit()
    world.tick()
    world.flower.states.clear()
    world.manager = world.new_manager()
    world.tick()
    assert [config["fedward-epoch"] for config in world.flower.started] == [1, 2]
    world.say(run, "run_finished", status="finished", reason="")
    world.manager = world.new_manager()
    world.tick()
    assert world.status(run) == "finished"


def test_a_run_whose_process_died_is_resumed_before_flower_notices(world: World) -> None:
    run = world.submit()
    world.tick()
    world.flower.states[1] = "running"
    code = "import sys; from pathlib import Path; from fedward_server.fencing import take_over; " \
        "from fedward_server.paths import RunPaths; take_over(RunPaths(Path(sys.argv[1])), 1)"
    subprocess.run([sys.executable, "-c", code, str(world.run(run).root)], check=True)
    world.tick()
    assert world.flower.stopped == [1]
    assert world.flower.started[1]["fedward-epoch"] == 2


def test_the_process_of_a_lost_run_is_ended_before_the_next_begins(world: World) -> None:
    run = world.submit()
    world.tick()
    code = "import sys, time; from pathlib import Path; from fedward_server.fencing import take_over; " \
        "from fedward_server.paths import RunPaths; held = take_over(RunPaths(Path(sys.argv[1])), 1); " \
        "print('owned', flush=True); time.sleep(600)"
    former = subprocess.Popen([sys.executable, "-c", code, str(world.run(run).root)], stdout=subprocess.PIPE)
    try:
        assert former.stdout is not None and former.stdout.readline() == b"owned\n"
        world.flower.states[1] = "finished"
        world.tick()
        assert not psutil.pid_exists(former.pid)
        assert len(world.flower.started) == 2
    finally:
        former.kill()
        former.wait()


def test_a_run_without_progress_is_given_up(world: World) -> None:
    run = world.submit()
    for _ in range(20):
        world.tick()
        world.flower.states = dict.fromkeys(world.flower.states, "finished")
    view = world.manager.view(run)
    assert view.status == "failed"
    assert "6 times in a row without a new round" in view.reason
    assert len(world.flower.started) == 1 + MAX_RESTARTS


def test_progress_renews_the_patience(world: World) -> None:
    run = world.submit()
    for round_number in range(1, 3 * MAX_RESTARTS):
        world.tick()
        world.say(run, "round", round=round_number)
        world.flower.states = dict.fromkeys(world.flower.states, "finished")
    assert world.status(run) == "starting"
    for _ in range(MAX_RESTARTS + 2):
        world.tick()
        world.flower.states = dict.fromkeys(world.flower.states, "finished")
    assert world.status(run) == "failed"


def test_a_run_that_flower_refuses_fails_with_its_word(world: World) -> None:
    run = world.submit()
    world.flower.refuses = "the FAB is odd"
    for _ in range(20):
        world.tick()
    view = world.manager.view(run)
    assert view.status == "failed"
    assert "the FAB is odd" in view.reason


def test_a_superlink_that_is_down_costs_no_attempt(world: World) -> None:
    run = world.submit()
    world.flower.down = True
    for _ in range(20):
        world.tick()
    assert (world.status(run), world.manager.view(run).epoch) == ("queued", 0)
    world.flower.down = False
    world.tick()
    world.flower.down = True
    for _ in range(20):
        world.tick()
    assert (world.status(run), world.manager.view(run).epoch) == ("starting", 1)


def test_a_broken_run_does_not_hold_up_the_others(world: World) -> None:
    broken, sound = world.submit(), world.submit()
    world.tick()
    world.run(broken).events.write_text("not JSON\n")
    world.say(sound, "run_finished", status="finished", reason="")
    world.tick()
    assert world.status(sound) == "finished"
    world.run(broken).events.write_text("")
    world.say(broken, "run_finished", status="failed", reason="why")
    world.tick(60.0)
    assert world.status(broken) == "failed"


def test_a_stop_in_the_queue_is_at_once(world: World) -> None:
    run = world.submit()
    assert world.manager.stop(run, "ada").status == "stopped"
    world.tick()
    assert not world.flower.started
    with pytest.raises(RunError, match="stopped already"):
        world.manager.stop(run, "ada")


def test_a_stop_asks_the_run_first_and_ends_it_by_force_after_the_deadline(world: World) -> None:
    run = world.submit(make_config(cohort={"deadline": 100}))
    world.tick()
    world.flower.states[1] = "running"
    world.manager.stop(run, "ada")
    assert world.run(run).stop.exists()
    asked = world.run(run).stop.stat().st_mtime
    world.now = asked + 100 + STOP_GRACE - 10
    world.tick(0)
    assert world.status(run) == "running"
    world.tick(20)
    assert world.status(run) == "stopped"
    assert world.flower.stopped == [1]


def test_a_run_that_was_to_stop_is_not_resumed_by_itself(world: World) -> None:
    run = world.submit()
    world.tick()
    world.manager.stop(run, "ada")
    world.flower.states[1] = "finished"
    world.tick()
    assert world.status(run) == "stopped"
    assert len(world.flower.started) == 1


def test_a_stopped_run_goes_on_when_asked_to(world: World) -> None:
    run = world.submit()
    world.tick()
    world.manager.stop(run, "ada")
    world.say(run, "run_finished", status="stopped", reason="asked to")
    world.tick()
    assert world.status(run) == "stopped"
    assert world.manager.resume(run, "ada").status == "queued"
    assert not world.run(run).stop.exists()
    world.tick()
    world.flower.states[2] = "running"
    world.tick()
    # The old "run_finished" belongs to the attempt before.
    assert (world.status(run), world.manager.view(run).epoch) == ("running", 2)
    with pytest.raises(RunError, match="only a stopped or failed run"):
        world.manager.resume(run, "ada")


def test_a_resumed_failure_has_all_its_attempts_again(world: World) -> None:
    run = world.submit()
    for again in range(2):
        for _ in range(20):
            world.tick()
            world.flower.states = dict.fromkeys(world.flower.states, "finished")
        assert world.status(run) == "failed"
        assert len(world.flower.started) == (again + 1) * (1 + MAX_RESTARTS)
        world.manager.resume(run, "ada")


def test_the_same_submission_again_changes_nothing(world: World) -> None:
    bundle = make_bundle()
    manifest = world.manifest(bundle=bundle)
    first = world.manager.submit(manifest.sign(world.key), bundle, None, None, "ada")
    again = world.manager.submit(manifest.sign(world.key), bundle, None, None, "ada")
    assert first == again
    other = Manifest.make(manifest.run, make_config(seed=7), bundle, None, "ada")
    with pytest.raises(RunError, match="taken by another run"):
        world.manager.submit(other.sign(world.key), bundle, None, None, "ada")


def test_files_of_a_submission_that_the_store_never_saw_are_replaced(world: World) -> None:
    bundle = make_bundle()
    manifest = world.manifest(bundle=bundle)
    stale = world.run(manifest.run)
    stale.root.mkdir(parents=True)
    stale.stop.touch()
    world.manager.submit(manifest.sign(world.key), bundle, None, None, "ada")
    assert not stale.stop.exists() and stale.bundle.read_bytes() == bundle


def test_a_starting_model_is_kept_if_it_is_the_signed_one(world: World, tmp_path: Path) -> None:
    bundle, model = make_bundle(), b"weights"
    upload = tmp_path / "upload"
    upload.write_bytes(model)
    manifest = world.manifest(bundle=bundle, initial=model)
    with pytest.raises(ManifestError, match="starting model"):
        world.manager.submit(manifest.sign(world.key), bundle, None, None, "ada")
    with pytest.raises(ManifestError, match="starting model"):
        world.manager.submit(manifest.sign(world.key), bundle, upload, hashlib.sha256(b"other").hexdigest(), "ada")
    world.manager.submit(manifest.sign(world.key), bundle, upload, hashlib.sha256(model).hexdigest(), "ada")
    assert world.run(manifest.run).initial.read_bytes() == model
    assert not os.listdir(world.paths.runs)[1:]


def test_what_is_not_signed_by_a_data_scientist_is_refused(world: World) -> None:
    with pytest.raises(SignatureError):
        world.submit(key=generate())
    bundle = make_bundle()
    with pytest.raises(ManifestError, match="sent it"):
        world.manager.submit(world.manifest(bundle=bundle).sign(world.key), bundle, None, None, "bob")
    with pytest.raises(ManifestError, match="the bundle"):
        world.manager.submit(world.manifest(bundle=bundle).sign(world.key), bundle + b" ", None, None, "ada")


def test_a_bundle_with_a_foreign_component_is_refused(world: World) -> None:
    with pytest.raises(ConfigError, match="clientapp"):
        world.submit(bundle=make_bundle(clientapp="evil:app"))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"cohort": {"nodes": ["clinic-a", "clinic-z"]}}, "clinic-z is enrolled. Enrolled: clinic-a, clinic-b"),
        ({"evaluation": {"holdout": ["clinic-y"]}}, "evaluation.holdout: no node named clinic-y"),
        ({"cohort": {"tags": ["icu"]}}, "Tags in use: ward"),
        ({"cohort": {"nodes": ["clinic-b"], "tags": ["ward"]}}, "no node that the run may use"),
    ],
)
def test_unknown_nodes_are_refused_with_the_known_ones(world: World, tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        world.submit(make_config(**tables))
    assert not world.paths.runs.exists()


def test_an_unknown_run(world: World) -> None:
    for call in (world.manager.view, world.manager.config):
        with pytest.raises(Unknown, match="no such run"):
            call("0" * 32)


def test_the_thread_starts_runs_and_ends_when_told(world: World) -> None:
    run = world.submit()
    world.manager.start()
    while not world.flower.started:
        time.sleep(0.01)
    world.manager.close()
    assert world.status(run) == "starting"
