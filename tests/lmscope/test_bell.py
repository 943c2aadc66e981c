"""Bell and Reply: waiting and waking, each ring once, and answers for one reader."""

from __future__ import annotations

import threading

import pytest

from lmscope.bell import Bell, Reply

DEADLINE_S = 200


def test_a_ring_between_listening_and_waiting_is_not_missed():
    bell = Bell()
    with bell.lock:
        ring = bell.listen()
        bell.ring()
    assert bell.wait(ring, DEADLINE_S)


def test_wakes_all_who_listen_and_nobody_twice():
    bell = Bell()
    with bell.lock:
        rings = [bell.listen() for _ in range(3)]
        bell.ring()
        bell.ring()
        late = bell.listen()
    assert all(bell.wait(ring, DEADLINE_S) for ring in rings)
    assert not bell.wait(late, 0.0)


def test_who_has_waited_in_vain_is_forgotten():
    bell = Bell()
    for _ in range(3):
        with bell.lock:
            ring = bell.listen()
        assert not bell.wait(ring, 0.0)
    assert not bell._rings


def test_the_lock_may_be_taken_again_by_its_holder():
    bell = Bell()
    with bell.lock, bell.lock:
        bell.ring()
    took = []
    thread = threading.Thread(target=lambda: took.append(bell.lock.acquire(timeout=DEADLINE_S)))
    thread.start()
    thread.join()
    assert took == [True]


def test_a_reply_waits_for_its_result_and_gives_it_again():
    reply: Reply[int] = Reply()
    asked = threading.Event()

    def answer() -> None:
        asked.wait(DEADLINE_S)
        reply.set_result(7)

    thread = threading.Thread(target=answer)
    thread.start()
    asked.set()
    assert reply.result() == 7
    assert reply.result() == 7
    thread.join()


def test_a_reply_raises_the_error_that_it_was_given():
    reply: Reply[int] = Reply()
    reply.set_exception(KeyError("x"))
    with pytest.raises(KeyError, match="x"):
        reply.result()
