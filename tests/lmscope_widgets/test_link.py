"""What a page is sent, and when: the rules that keep an engine free of its viewers."""

from __future__ import annotations

from lmscope_widgets.link import MOST_PROBES, SETTLED_AFTER_S, Link, Send

# Seconds between two frames at 8 a second: a number that floats hold exactly.
T = 0.125
# Frames that may be on their way after frame 0.
AHEAD = (1, 2, 3, 4, 5)


def make_link(rate_hz: float = 8.0) -> Link:
    """A link whose page has drawn frame 0, sent and acknowledged at second 0."""
    link = Link(rate_hz)
    link.hear_ready(0.0)
    assert link.choose(0.0, 0, None) is Send.FULL
    link.sent(Send.FULL, 0, 0, 0.0)
    link.hear_ack(0, False, 0.0)
    return link


def test_sends_nothing_before_the_page_is_ready() -> None:
    link = Link(8.0)

    assert link.choose(100.0, 5, None) is Send.NOTHING
    assert link.next_time(100.0, 5, None) is None


def test_sends_a_full_frame_first_and_deltas_after_it() -> None:
    link = make_link()

    assert link.choose(T, 1, None) is Send.DELTA


def test_sends_nothing_when_nothing_has_changed() -> None:
    link = make_link()

    assert link.choose(T, 0, None) is Send.NOTHING
    assert link.next_time(T, 0, None) is None


def test_keeps_to_the_rate() -> None:
    link = make_link(rate_hz=8.0)

    assert link.choose(T / 2, 1, None) is Send.NOTHING
    assert link.next_time(T / 2, 1, None) == T
    assert link.choose(T, 1, None) is Send.DELTA


def test_lets_five_frames_be_on_their_way_and_no_sixth() -> None:
    link = make_link()
    for seq in AHEAD:
        assert link.choose(seq * T, seq, None) is Send.DELTA
        link.sent(Send.DELTA, seq, seq, seq * T)

    assert link.choose(6 * T, 6, None) is Send.NOTHING

    link.hear_ack(1, False, 6 * T)
    assert link.choose(6 * T, 6, None) is Send.DELTA


def test_does_not_believe_an_ack_for_a_frame_that_was_never_sent() -> None:
    link = make_link()
    for seq in AHEAD:
        link.sent(Send.DELTA, seq, seq, seq * T)

    link.hear_ack(1_000_000, False, 6 * T)

    assert link.choose(7 * T, 6, None) is Send.NOTHING


def test_sends_a_full_frame_after_a_gap_and_the_lost_ones_do_not_count() -> None:
    link = make_link()
    for seq in AHEAD:
        link.sent(Send.DELTA, seq, seq, seq * T)

    link.hear_ready(6 * T)

    assert link.choose(6 * T, 6, None) is Send.FULL
    link.sent(Send.FULL, 6, 6, 6 * T)
    assert link.choose(7 * T, 7, None) is Send.DELTA


def test_a_flood_of_resyncs_gets_full_frames_at_the_rate_and_not_faster() -> None:
    link = make_link(rate_hz=10.0)
    sent = 0
    for millisecond in range(1000):
        now = 1.0 + millisecond / 1000
        link.hear_ready(now)
        if link.choose(now, 1, None) is Send.FULL:
            link.sent(Send.FULL, 1 + sent, 1, now)
            sent += 1

    assert sent <= 11


def test_a_hidden_page_gets_two_frames_a_second() -> None:
    link = make_link()
    link.hear_ack(0, True, 0.0)

    assert link.choose(3 * T, 1, None) is Send.NOTHING
    assert link.choose(4 * T, 1, None) is Send.DELTA


def test_a_page_that_does_not_answer_gets_one_frame_a_second_then_none_until_it_speaks() -> None:
    link = make_link()
    times = []
    seq = 0
    for tick in range(1, 1000):
        now = tick * T
        if link.choose(now, tick, None) is Send.DELTA:
            seq += 1
            link.sent(Send.DELTA, seq, tick, now)
            times.append(now)

    assert times[:5] == [seq * T for seq in AHEAD]
    # Two seconds after the first one that was not answered, then one a second.
    assert times[5:8] == [2 + T, 3 + T, 4 + T]
    assert len(times) == 5 + MOST_PROBES
    assert link.next_time(200.0, 1000, None) is None

    link.hear_ack(seq, False, 200.0)
    assert link.choose(200.0, 1000, None) is Send.DELTA


def test_a_run_that_has_ended_gets_one_full_frame_even_without_credit() -> None:
    link = make_link()
    for seq in AHEAD:
        link.sent(Send.DELTA, seq, seq, seq * T)

    ended = 5 * T
    assert link.choose(ended + T, 6, ended) is Send.NOTHING
    assert link.next_time(ended + T, 6, ended) == ended + SETTLED_AFTER_S
    assert link.choose(ended + SETTLED_AFTER_S, 6, ended) is Send.FULL
    link.sent(Send.FULL, 6, 6, ended + SETTLED_AFTER_S)
    assert link.choose(9.0, 6, ended) is Send.NOTHING


def test_many_short_runs_in_a_row_do_not_each_cost_a_full_frame() -> None:
    link = make_link()
    kinds = []
    seq = 0
    for tick in range(1, 50):
        now = tick * T
        # Each tick a whole run has come and gone.
        kind = link.choose(now, tick, now - 0.01)
        if kind is not Send.NOTHING:
            seq += 1
            link.sent(kind, seq, tick, now)
            link.hear_ack(seq, False, now)
        kinds.append(kind)

    assert set(kinds) == {Send.DELTA}


def test_a_stream_that_starts_anew_begins_with_a_full_frame_and_its_own_count() -> None:
    link = make_link()
    link.sent(Send.DELTA, 1, 1, T)

    link.restart()

    assert link.choose(2 * T, 2, None) is Send.FULL
    link.sent(Send.FULL, 0, 2, 2 * T)
    link.hear_ack(0, False, 2 * T)
    assert link.choose(3 * T, 3, None) is Send.DELTA
