"""Several samples of one prompt: for the engine n requests, for the user one Stream.

The engine, the stream of structs and every view know only the children "0_7", "1_7", ... of a
request "7". Each is an ordinary request with n=1; that they share the blocks of their prompt
is the prefix cache's doing. A request with n=1 is its own only child and keeps its id.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from lmscope.boundary import EngineCoreRequest
from lmscope.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lmscope.frontend.stream import Stream

__all__ = ["Child", "LiveRequests", "child_ids", "child_requests"]


@dataclass(frozen=True)
class Child:
    """One request of the engine, and where its output goes.

    request_id   as the engine and every view know it
    index        of its CompletionOutput in the outputs of `stream`
    """

    request_id: str
    index: int
    stream: Stream


def child_ids(request_id: str, n: int) -> tuple[str, ...]:
    """The ids that the engine knows, in the order of their indexes."""
    if n == 1:
        return (request_id,)
    return tuple(f"{index}_{request_id}" for index in range(n))


def child_requests(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The requests that the engine gets for one with any n; with a seed, each has its own."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request, request_id=child_id, sampling_params=_child_params(params, index)
        )
        for index, child_id in enumerate(child_ids(request.request_id, params.n))
    ]


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    if params.seed is None:
        return params.replace(n=1)
    seed = params.seed + index
    if seed == -1 or seed >= 2**64:
        # -1 would mean no seed. Draws depend on the lowest 64 bits, which stay the same.
        seed %= 2**64
    return params.replace(n=1, seed=seed)


class LiveRequests:
    """The requests that have not ended, and which ids are taken. For any thread.

    Its length and its items are those of the engine's requests, children one by one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # Ids of requests that are being submitted.
        self._reserved: set[str] = set()
        self._children: dict[str, Child] = {}
        # By the id that the user knows: its children that live, in the order of their indexes.
        self._families: dict[str, dict[str, Child]] = {}

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(tuple(self._children))

    def reserve(self, request_id: str | None, n: int) -> str:
        """An id that is free, with all of its children's; None counts up from "0"."""
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r}; it takes a string")
        if request_id is not None:
            try:
                request_id.encode()
            except UnicodeEncodeError as error:
                # No recording could hold it.
                raise ValueError(
                    f"request_id is {request_id!r}, which has half a surrogate pair at position "
                    f"{error.start} and is no text; remove it"
                ) from error
        with self._lock:
            if request_id is None:
                names: Iterator[str] = (str(number) for number in self._numbers)
            else:
                names = itertools.chain(
                    (request_id,), (f"{request_id}-{number}" for number in itertools.count(2))
                )
            name = next(name for name in names if not any(map(self._is_taken, _ids_of(name, n))))
            self._reserved.update(_ids_of(name, n))
        return name

    def release(self, request_id: str, n: int) -> None:
        """Give a reserved id back, as its request will not come."""
        with self._lock:
            self._reserved.difference_update(_ids_of(request_id, n))

    def add(self, stream: Stream) -> list[Child]:
        """The children of a stream, live from now on under the ids that were reserved."""
        request_id, n = stream.request_id, stream.sampling_params.n
        children = [Child(id_, i, stream) for i, id_ in enumerate(child_ids(request_id, n))]
        family = {child.request_id: child for child in children}
        with self._lock:
            self._reserved.difference_update(_ids_of(request_id, n))
            self._families[request_id] = family
            self._children.update(family)
        return children

    def find(self, request_ids: Sequence[str]) -> list[Child]:
        """The live children of some ids, which may be users' or children's; others are ignored."""
        found: dict[str, Child] = {}
        with self._lock:
            for request_id in request_ids:
                if request_id in self._families:
                    found.update(self._families[request_id])
                elif request_id in self._children:
                    found[request_id] = self._children[request_id]
        return list(found.values())

    def holds(self, child: Child) -> bool:
        """Whether it lives: meanwhile its id may belong to another request."""
        with self._lock:
            return self._children.get(child.request_id) == child

    def remove(self, request_id: str) -> None:
        """The engine's request has ended. The user's id is free when no child is left."""
        with self._lock:
            child = self._children.pop(request_id, None)
            if child is not None:
                name = child.stream.request_id
                del self._families[name][request_id]
                if not self._families[name]:
                    del self._families[name]

    def clear(self) -> list[Child]:
        """Forget all, and return them."""
        with self._lock:
            children = list(self._children.values())
            self._children.clear()
            self._families.clear()
        return children

    def _is_taken(self, name: str) -> bool:
        return name in self._reserved or name in self._children or name in self._families


def _ids_of(request_id: str, n: int) -> Sequence[str]:
    return (request_id,) if n == 1 else (request_id, *child_ids(request_id, n))
