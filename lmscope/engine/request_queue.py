"""The two orders in which requests wait: first come first served, and by priority."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from lmscope.engine.request import Request

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "RequestQueue", "make_request_queue"]


class RequestQueue(Protocol):
    """A queue of waiting requests; iteration goes in the order of admission."""

    def add(self, request: Request) -> None: ...
    def prepend(self, request: Request) -> None:
        """Put a preempted request back: as far in front as the order allows."""
        ...

    def peek(self) -> Request: ...
    def peek_last(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove_all(self, requests: Iterable[Request]) -> None: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...


class FCFSRequestQueue:
    """First come first served; preempted requests go to the head."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def peek_last(self) -> Request:
        return self._requests[-1]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove_all(self, requests: Iterable[Request]) -> None:
        gone = set(map(id, requests))
        self._requests = deque(r for r in self._requests if id(r) not in gone)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue:
    """Smallest (priority, arrival time, request id) first, wherever a request comes from."""

    def __init__(self) -> None:
        # Kept sorted: both ends are then one look away, and an insertion moves pointers
        # in C, which beats a heap for any queue that fits in memory.
        self._entries: list[tuple[tuple[int, float, str], Request]] = []

    def add(self, request: Request) -> None:
        key = (request.priority, request.arrival_time, request.request_id)
        # The id is unique among live requests, so two requests are never compared.
        bisect.insort(self._entries, (key, request), key=lambda entry: entry[0])

    def prepend(self, request: Request) -> None:
        self.add(request)

    def peek(self) -> Request:
        return self._entries[0][1]

    def peek_last(self) -> Request:
        return self._entries[-1][1]

    def pop(self) -> Request:
        return self._entries.pop(0)[1]

    def remove_all(self, requests: Iterable[Request]) -> None:
        gone = set(map(id, requests))
        self._entries = [entry for entry in self._entries if id(entry[1]) not in gone]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)


def make_request_queue(policy: str) -> RequestQueue:
    """The queue for a scheduling policy, "fcfs" or "priority"."""
    return PriorityRequestQueue() if policy == "priority" else FCFSRequestQueue()
