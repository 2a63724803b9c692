import pytest
from fedward_server.events import EventLog, read_events


def test_a_torn_last_line_is_dropped_before_the_next_event(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.append("round", round=1)
    with path.open("ab") as file:
        file.write(b'{"event":"round","rou')  # the writer was killed here
    assert [event["round"] for event, _ in read_events(path)] == [1]
    EventLog(path).append("round", round=2)
    assert [event["round"] for event, _ in read_events(path)] == [1, 2]


def test_reading_goes_on_from_an_offset(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.append("round", round=1)
    ((_, offset),) = read_events(tmp_path / "events.jsonl")
    log.append("round", round=2)
    assert [event["round"] for event, _ in read_events(tmp_path / "events.jsonl", offset)] == [2]


def test_values_that_are_not_json_are_refused(tmp_path):
    with pytest.raises(ValueError):
        EventLog(tmp_path / "events.jsonl").append("round", loss=float("nan"))
    assert list(read_events(tmp_path / "events.jsonl")) == []
