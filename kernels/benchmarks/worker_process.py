"""A process that is asked with JSON lines, so that only one of several works at a time."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

__all__ = ["Peer", "PeerError", "rotated"]


class PeerError(RuntimeError):
    """A worker answered with an error, or died."""


class Peer:
    """One engine in a process of its own, which answers one JSON line with one JSON line.

    `ready` is its first line, which comes when it is loaded.
    """

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.name = name
        # What libraries print goes here, and is shown when the worker dies.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  close() ends it
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.ready = self._read()

    def ask(self, **request: object) -> dict[str, Any]:
        """What the worker answers; raises PeerError with its words when it failed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead, and reading says what its last words were
        return self._read()

    def close(self) -> None:
        """End the worker: it stops by itself at the end of its input."""
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise PeerError(f"{self.name} died:\n{self._log.read()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer


def rotated(names: Sequence[str], number: int) -> list[str]:
    """`names` from a place that moves on with each round, so that each is first in turn."""
    start = number % len(names)
    return [*names[start:], *names[:start]]
