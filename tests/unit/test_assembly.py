"""Messages put together from their objects, against Flower's own taking apart."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest
from fedward_common.messages import Purpose, Reply
from fedward_common.records import RecordError, assemble, deflate_once, message_to_reply, release, reply_to_message
from flwr.app import ConfigRecord, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, no_object_id_recompute


def taken_apart(**vectors):
    asked = Metadata(
        run_id=5,
        message_id="asked",
        src_node_id=1,
        dst_node_id=7,
        reply_to_message_id="",
        group_id="",
        created_at=time.time(),
        ttl=60.0,
        message_type="train",
    )
    reply = Reply(Purpose.TRAIN, "run", 3, 1, vectors, 2.0, {"examples": 2.0})
    message = reply_to_message(reply, make_message(metadata=asked, content=RecordDict()))
    message.metadata.__dict__["_message_id"] = message.object_id
    return message.object_id, {name: item.deflate() for name, item in get_all_nested_objects(message).items()}


def test_a_message_comes_back_as_it_was():
    # Over 5 MiB: several chunks. Zeros: chunks that are equal, and stored once.
    noise = np.random.default_rng(0).standard_normal(3_000_000, dtype=np.float32)
    zeros = np.zeros(4_000_000, np.float32)
    message_id, objects = taken_apart(model=noise, c=zeros, small=np.array([1.5], np.float64))
    message = assemble(message_id, objects.__getitem__)
    assert message.metadata.message_id == message_id and message.metadata.reply_to_message_id == "asked"
    reply = message_to_reply(message)
    assert (reply.purpose, reply.run, reply.round, reply.weight) == (Purpose.TRAIN, "run", 3, 2.0)
    np.testing.assert_array_equal(reply.vectors["model"], noise)
    np.testing.assert_array_equal(reply.vectors["c"], zeros)
    np.testing.assert_array_equal(reply.vectors["small"], [1.5])


def test_small_vectors_travel_in_one_object():
    # Message, RecordDict and one record: each object costs a call at either end.
    message_id, objects = taken_apart(model=np.arange(1000.0, dtype=np.float32), c=np.ones(3))
    assert len(objects) == 3
    reply = message_to_reply(assemble(message_id, objects.__getitem__))
    np.testing.assert_array_equal(reply.vectors["model"], np.arange(1000.0))
    np.testing.assert_array_equal(reply.vectors["c"], np.ones(3))


def test_the_root_is_asked_for_first_and_the_puller_may_give_up():
    message_id, _ = taken_apart(model=np.ones(4, np.float32))
    asked = []

    class NotThere(Exception):
        pass

    def pull(object_id):
        asked.append(object_id)
        raise NotThere

    with pytest.raises(NotThere):
        assemble(message_id, pull)
    assert asked == [message_id]


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"Message 3"])
def test_broken_objects_are_record_errors(damage):
    message_id, objects = taken_apart(model=np.ones(4, np.float32))
    for object_id in objects:
        broken = {**objects, object_id: damage}
        with pytest.raises(RecordError):
            assemble(message_id, broken.__getitem__)


def test_an_object_that_is_no_message_is_refused():
    _, objects = taken_apart(model=np.ones(4, np.float32))
    for object_id in list(objects)[:-1]:
        with pytest.raises(RecordError):
            assemble(object_id, objects.__getitem__)


def test_a_released_message_keeps_nothing_and_the_reply_keeps_its_vectors():
    message_id, objects = taken_apart(model=np.ones(3_000_000, np.float32))
    gc.collect()
    gc.disable()
    try:
        message = assemble(message_id, objects.__getitem__)
        array = weakref.ref(message.content.array_records["vectors"]["model"])
        reply = message_to_reply(message)
        release(message)
        assert array() is None
        np.testing.assert_array_equal(reply.vectors["model"], np.ones(3_000_000))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "record",
    [
        ConfigRecord({"json": '{"a": "ü"}', "delta": bytes(range(256)) * 40, "empty": b""}),
        ConfigRecord({"json": "", "n": 3, "x": [1.5, 2.5]}),
        ConfigRecord({}),
    ],
)
def test_deflated_once_is_what_flower_deflates(record):
    content = record.deflate()
    with no_object_id_recompute():
        once = deflate_once([record, record])
        assert once == {get_object_id(content): content}
        # And Flower takes the id without deflating again.
        record.__dict__["deflate"] = None
        assert record.object_id == get_object_id(content)


def test_a_record_that_has_changed_since_is_deflated_anew():
    record = ConfigRecord({"delta": b"1"})
    with no_object_id_recompute():
        first = deflate_once([record])
    record["delta"] = b"2"
    with no_object_id_recompute():
        assert record.object_id not in first
