"""Messages of a page are decoded, bounded, or ignored."""

from __future__ import annotations

import pytest
from lmscope_widgets.protocol import Ack, Command, Ready, Resync, decode_message, reply


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"k": "ready"}, Ready()),
        ({"k": "resync"}, Resync()),
        ({"k": "ack", "seq": 7, "hidden": True}, Ack(7, True)),
        ({"k": "ack", "seq": 7, "unknown": [1]}, Ack(7)),
        ({"k": "command", "id": 3, "op": "rate", "arg": 5}, Command(3, "rate", 5)),
        ({"k": "command", "id": 3, "op": "rate", "arg": 2.5}, Command(3, "rate", 2.5)),
        ({"k": "command", "id": 3, "op": "pause", "arg": None}, Command(3, "pause")),
    ],
)
def test_decodes_what_the_protocol_names(content: object, message: object) -> None:
    assert decode_message(content) == message


@pytest.mark.parametrize(
    "content",
    [
        None,
        "ready",
        [],
        {},
        {"k": "unknown"},
        {"k": 5},
        {"k": "ack"},
        {"k": "ack", "seq": -1},
        {"k": "ack", "seq": 2**60},
        {"k": "ack", "seq": "7"},
        {"k": "ack", "seq": 7, "hidden": "yes"},
        {"k": "command", "id": 1, "op": "x" * 65},
        {"k": "command", "id": 1, "op": "seek", "arg": "x" * 513},
        {"k": "command", "id": 1, "op": "seek", "arg": {"deep": [1]}},
        {"k": "command", "op": "pause"},
        {"k": "command", "id": 1, "op": "speed", "arg": 10**400},
        {"k": "command", "id": 1, "op": "seek", "arg": -(2**60)},
        {"k": "command", "id": [1], "op": "pause"},
        {"k": "command", "id": "x" * 65, "op": "pause"},
        {"k": "command", "id": 1, "op": None},
        {"k": "ack", "seq": 7, "epoch": -1},
        {"k": "ack", "seq": 7.5},
    ],
)
def test_ignores_everything_else(content: object) -> None:
    assert decode_message(content) is None


@pytest.mark.parametrize("where", ["k", "id", "op", "arg", "more"])
def test_keeps_nothing_of_a_megabyte(where: str) -> None:
    content = {"k": "command", "id": 1, "op": "pause", "arg": None, where: "x" * 2**20}

    message = decode_message(content)

    assert message in (None, Command(1, "pause"))
    assert (message is None) == (where != "more")


def test_ignores_a_message_that_is_too_deep_to_look_at() -> None:
    content: dict[str, object] = {"k": "command", "id": 1, "op": "seek"}
    inner: list[object] = []
    content["arg"] = inner
    for _ in range(100_000):
        inner.append([])
        inner = inner[0]  # type: ignore[assignment]  # always the list that was just made

    assert decode_message(content) is None


def test_ignores_binary_data() -> None:
    assert decode_message({"k": "ready"}, [memoryview(b"x")]) is None


def test_a_reply_names_the_command_and_what_was_wrong() -> None:
    command = Command(9, "rate", 99)

    assert reply(command) == {"k": "reply", "id": 9, "ok": True, "error": ""}
    assert reply(command, "too fast") == {
        "k": "reply",
        "id": 9,
        "ok": False,
        "error": "too fast",
    }
