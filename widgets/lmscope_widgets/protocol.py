"""Messages between the page and Python, as docs/picture.md defines them.

What comes from a page is not trusted: it is decoded into one of a few small structs with
bounded fields, and whatever does not fit is ignored.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import msgspec

__all__ = ["Ack", "Command", "Message", "Ready", "Resync", "decode_message", "reply"]

logger = logging.getLogger(__name__)

# What JavaScript counts exactly.
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
_Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]
_Word = Annotated[str, msgspec.Meta(max_length=64)]
_Argument = Annotated[str, msgspec.Meta(max_length=512)]


class Ready(msgspec.Struct, frozen=True, tag_field="k", tag="ready"):
    """A page has begun to draw and has nothing yet: it wants a full frame."""


class Ack(msgspec.Struct, frozen=True, tag_field="k", tag="ack"):
    """Frame `seq` is on the screen, or would be if the page were visible.

    epoch   that of the frame; a page that leaves it out means the current one
    """

    seq: _Count
    hidden: bool = False
    epoch: _Count | None = None


class Resync(msgspec.Struct, frozen=True, tag_field="k", tag="resync"):
    """Frames are missing: the page wants a full one."""


class Command(msgspec.Struct, frozen=True, tag_field="k", tag="command"):
    """Somebody pressed a button; `id` comes back in the reply."""

    id: _Count | _Word
    op: _Word
    arg: _Argument | float | _Whole | bool | None = None


Message = Ready | Ack | Resync | Command


def decode_message(content: object, buffers: Any = None) -> Message | None:
    """The message, or None when it is none of ours.

    No message of a page carries binary data, so one that does is not ours either.
    """
    if buffers:
        return None
    try:
        message: Message = msgspec.convert(content, Message)
    except (msgspec.ValidationError, RecursionError) as error:
        logger.debug("ignored a message from the page: %s", error)
        return None
    return message


def reply(command: Command, error: str = "") -> dict[str, Any]:
    """The answer to a command; an empty `error` means that it was done."""
    return {"k": "reply", "id": command.id, "ok": not error, "error": error}
