"""State on disk: the contract, and what is left after kill -9 at any moment."""

from __future__ import annotations

import os
import random
import resource
import signal

import numpy as np
import pytest
from fedward_client.state import FileStore, StateError
from fedward_common.messages import Stamp
from fedward_common.node import MemoryStore, Refused, settle


def vectors(value: float, size: int = 1000) -> dict[str, np.ndarray]:
    return {"c": np.full(size, value, np.float32), "h": np.full(3, value, np.float64)}


def same(left, right) -> bool:
    if left is None or right is None:
        return left is right
    return left[0] == right[0] and left[1].keys() == right[1].keys() and all(
        left[1][name].dtype == right[1][name].dtype and np.array_equal(left[1][name], right[1][name])
        for name in left[1]
    )


def test_a_new_store_is_empty(tmp_path) -> None:
    store = FileStore(tmp_path / "runs" / "r" / "state")
    assert store.committed() == (None, {})
    assert store.pending() is None
    assert (tmp_path / "runs" / "r" / "state").stat().st_mode & 0o777 == 0o700


def test_it_behaves_as_the_store_in_memory(tmp_path) -> None:
    # Random walks; the store is opened anew for each step, as after a restart.
    for seed in range(20):
        rng, memory, folder = random.Random(seed), MemoryStore(), tmp_path / str(seed)
        for step in range(12):
            file = FileStore(folder)
            action = rng.choice(["save", "commit", "drop", "settle"])
            if action == "save":
                stamp = Stamp(step, rng.randrange(3))
                for store in (memory, file):
                    store.save_pending(stamp, vectors(step, size=5))
            elif action == "settle":
                included = rng.choice([memory.committed()[0], Stamp(step - 1, 0), None])
                outcomes = []
                for store in (memory, file):
                    try:
                        settle(store, included)
                        outcomes.append("settled")
                    except Refused as refused:
                        outcomes.append(str(refused))
                assert outcomes[0] == outcomes[1]
            elif memory.pending() is not None:
                for store in (memory, file):
                    (store.commit_pending if action == "commit" else store.drop_pending)()
            assert same(memory.committed(), FileStore(folder).committed())
            assert same(memory.pending(), FileStore(folder).pending())


def test_vectors_are_the_callers_own(tmp_path) -> None:
    store = FileStore(tmp_path)
    store.save_pending(Stamp(1, 0), vectors(1))
    read = store.pending()
    assert read is not None and read[1]["c"].flags.writeable
    store.save_pending(Stamp(2, 0), vectors(2))
    assert (read[1]["c"] == 1).all()


def test_no_vectors_at_all(tmp_path) -> None:
    store = FileStore(tmp_path)
    store.save_pending(Stamp(4, 1), {})
    store.commit_pending()
    assert store.committed() == (Stamp(4, 1), {})


def test_files_are_for_their_owner_only(tmp_path) -> None:
    FileStore(tmp_path).save_pending(Stamp(1, 0), vectors(1))
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", [b"", b"\0" * 100, None])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path, damage) -> None:
    store = FileStore(tmp_path)
    store.save_pending(Stamp(1, 0), vectors(1))
    store.commit_pending()
    file = tmp_path / "committed.safetensors"
    file.write_bytes(file.read_bytes()[:-5] if damage is None else damage)
    with pytest.raises(StateError, match=r"committed\.safetensors"):
        store.committed()


LARGE = 500_000
"""So that writing takes a while, and a kill falls into it."""


def rounds_without_end(folder, tell: int) -> None:
    """What a guard does, from wherever the last one was killed."""
    store = FileStore(folder)
    stamp, _ = store.committed()
    number = 0 if stamp is None else stamp.round
    while True:
        number += 1
        store.save_pending(Stamp(number, number % 7), vectors(number, LARGE))
        os.write(tell, b".")
        store.commit_pending()
        os.write(tell, b".")


def test_kill_at_any_moment(tmp_path) -> None:
    rng = random.Random(0)
    last = 0
    for _ in range(12):
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                rounds_without_end(tmp_path, tell)
            finally:
                os._exit(1)
        os.close(tell)
        for _ in range(rng.randrange(1, 8)):
            assert os.read(hear, 1) == b"."
        # Nowhere in particular within the next save or commit.
        sum(range(rng.randrange(200_000)))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(hear)

        store = FileStore(tmp_path)
        stamp, kept = store.committed()
        for found in (store.pending(), (stamp, kept) if stamp is not None else None):
            if found is not None:
                assert found[0].attempt == found[0].round % 7
                assert same(found, (found[0], vectors(found[0].round, LARGE)))
        number = 0 if stamp is None else stamp.round
        assert number >= last
        last = number
    assert last > 10


@pytest.mark.parametrize("bytes_left", [0, 1, 100, 2000, 4100])
def test_a_crash_in_the_middle_of_a_write(tmp_path, bytes_left) -> None:
    # The kernel ends the process at the first byte beyond the limit of a file's size.
    store = FileStore(tmp_path)
    store.save_pending(Stamp(1, 0), vectors(1))
    store.commit_pending()
    store.save_pending(Stamp(2, 0), vectors(2))
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, bytes_left))
            store.save_pending(Stamp(3, 0), vectors(3))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
    assert same(FileStore(tmp_path).pending(), (Stamp(2, 0), vectors(2)))
    assert same(FileStore(tmp_path).committed(), (Stamp(1, 0), vectors(1)))
    # The half-written file is not kept for ever.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["committed.safetensors", "pending.safetensors"]
