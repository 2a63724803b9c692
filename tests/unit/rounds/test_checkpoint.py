import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from fedward_common.algorithms.base import ServerState
from fedward_common.files import write_atomic
from fedward_common.messages import Stamp
from fedward_common.update import Kind, Layout
from fedward_server.checkpoint import Checkpoint, CheckpointError, Checkpoints, Standing, read_checkpoint
from fedward_server.fencing import Fenced
from fedward_server.paths import RunPaths
from safetensors.numpy import load_file
from safetensors.torch import load, save
from torch import nn

MODEL = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
LAYOUT = Layout.of(MODEL)


def checkpoint(number, best=None, size=8):
    vectors = {
        "model": np.full(size, number, np.float32),
        "c": np.arange(size, dtype=np.float64) + number,
        "counter": np.array([number]),
        "empty": np.empty(0, np.float32),
    }
    return Checkpoint(
        run="r",
        epoch=1,
        layout=LAYOUT,
        state=ServerState(vectors, number),
        enrolled=("a", "b"),
        present=("a",),
        included={"a": Stamp(number, 5)},
        cohorts=((0, 1), (1,)),
        standing=Standing("loss", 0.1, best, 2),
        event={"round": number, "failures": {"b": "offline"}},
    )


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "run")


def test_what_is_written_is_read_and_safetensors_agrees(paths):
    written = checkpoint(3)
    path = Checkpoints(paths, 100, 1).write(written)
    got = read_checkpoint(path)
    assert got.to_json() == written.to_json()
    assert got.included == {"a": Stamp(3, 5)} and got.cohorts == ((0, 1), (1,)) and got.standing.stale == 2
    for vectors in (got.state.vectors, load_file(path)):  # safetensors' own reader is the oracle
        assert set(vectors) == set(written.state.vectors)
        for name, vector in written.state.vectors.items():
            assert vectors[name].dtype == vector.dtype
            np.testing.assert_array_equal(vectors[name], vector)
    assert path.stat().st_mode & 0o777 == 0o600


def test_keeps_the_last_three_the_best_and_every_twentieth_part(paths):
    store = Checkpoints(paths, rounds=200, epoch=1)
    for number in range(48):
        store.write(checkpoint(number, best=7 if number >= 7 else None))
    kept = sorted(int(path.stem.removeprefix("round-")) for path in paths.checkpoints.iterdir())
    assert kept == [0, 7, 10, 20, 30, 40, 45, 46, 47]
    assert store.model_file("last").stem.endswith("47") and store.model_file("best").stem.endswith("07")
    assert store.model_file("20").stem.endswith("20")
    with pytest.raises(CheckpointError, match="round 21 is not kept; kept are the rounds 0, 7, 10"):
        store.model_file("21")
    with pytest.raises(CheckpointError, match="'last', 'best' or a round's number"):
        store.model_file("../secret")


def test_nothing_yet(paths):
    store = Checkpoints(paths)
    assert store.newest() is None
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        store.model_file("last")
    Checkpoints(paths, 5, 1).write(checkpoint(1))
    with pytest.raises(CheckpointError, match="no evaluation yet"):
        store.model_file("best")


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_broken_newest_gives_way_to_the_one_before(paths, damage):
    store = Checkpoints(paths, 100, 1)
    store.write(checkpoint(1))
    path = store.write(checkpoint(2))
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes({"cut": content[:-5], "flip": content, "empty": b""}[damage])
    assert store.newest().round == 1
    (paths.checkpoints / "round-0000001.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="none of 2"):
        store.newest()


def test_an_older_epoch_is_refused_and_leaves_nothing(paths):
    store = Checkpoints(paths, 100, epoch=2)
    store.write(checkpoint(1))
    write_atomic(paths.owner, b'{"epoch": 2, "pid": 1, "created": 0, "command": []}')
    store.write(checkpoint(2))
    write_atomic(paths.owner, b'{"epoch": 3, "pid": 1, "created": 0, "command": []}')
    with pytest.raises(Fenced):
        store.write(checkpoint(3))
    assert store.newest().round == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_the_model_by_name_for_the_data_scientist(dtype):
    def fresh():
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(dtype)

    model = fresh()
    layout, state = Layout.of(model), model.state_dict()
    vectors = {
        "model": layout.pack(state, Kind.TRAINABLE),
        "statistic": layout.pack(state, Kind.STATISTIC),
        "counter": layout.pack(state, Kind.COUNTER),
        "c": np.zeros(4),
    }
    written = Checkpoint("r", 1, layout, ServerState(vectors, 1), ()).model_bytes()
    assert written == save(state, {"round": "1"})  # safetensors' own writer is the oracle
    other = fresh()
    other.load_state_dict(load(written))  # strict: all names, shapes and nothing else
    assert all(torch.equal(other.state_dict()[name], state[name]) for name in state)


def test_kill_9_while_writing_never_tears_the_newest(paths):
    """A child writes checkpoints as fast as it can and is killed at some moment, again and again."""
    rng = random.Random(0)
    last = 0
    for _ in range(12):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            store = Checkpoints(paths, 10**6, 1)
            number = last
            while True:
                number += 1
                store.write(checkpoint(number, size=300_000))
                os.write(writer, b"x")
        os.close(writer)
        for _ in range(2):
            os.read(reader, 1)  # two were written
        time.sleep(rng.random() * 0.02)  # anywhere in a later one
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        written = 2 + len(_rest(reader))
        newest = max(paths.checkpoints.glob("round-*.safetensors"))
        found = read_checkpoint(newest)
        assert found.round >= last + written
        assert (found.state.vectors["model"] == found.round).all()
        last = found.round
    assert last >= 24
    Checkpoints(paths, 10**6, 1).write(checkpoint(last + 1))
    assert not list(paths.checkpoints.glob(".*"))  # leftovers of the dead are gone


def _rest(reader):
    rest = b""
    while part := os.read(reader, 4096):
        rest += part
    os.close(reader)
    return rest
