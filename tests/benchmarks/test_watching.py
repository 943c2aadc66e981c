"""The benchmark of watching: what it switches off decides nothing, and its arithmetic."""

from __future__ import annotations

import json
import statistics

import scheduler_load
import scheduler_worker
import watching

LOAD = scheduler_load.Load("tight", num_live=6, num_blocks=70, num_warm_steps=5, num_steps=100)


class Listening:
    """An engine that keeps what its scheduler said."""

    def __init__(self, load):
        make_engine, _ = scheduler_worker.import_lmscope()
        self.engine = make_engine(load)
        self.outputs = []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def schedule(self):
        self.outputs.append(self.engine.schedule())
        return self.outputs[-1]


def outputs_of_a_run():
    engine = Listening(LOAD)
    scheduler_worker.run(engine, LOAD)
    return engine.outputs


def test_without_reasons_the_scheduler_decides_the_same_and_says_nothing():
    told = outputs_of_a_run()
    with watching.without_reasons():
        silent = outputs_of_a_run()
    told_again = outputs_of_a_run()

    assert any(output.preempted_req_ids for output in told)
    for ours, theirs in zip(told, silent, strict=True):
        assert ours.num_scheduled_tokens == theirs.num_scheduled_tokens
        assert ours.scheduled_cached_reqs == theirs.scheduled_cached_reqs
        assert ours.preempted_req_ids == theirs.preempted_req_ids
    # A victim's decision is made where it is chosen, but it is not kept either.
    assert not any(output.decisions or output.behind for output in silent)
    assert [o.decisions for o in told_again] == [o.decisions for o in told]


def comparison(with_it, without, goal=watching.GOAL):
    return watching.Comparison("what", with_it, without, goal)


def test_ratios_are_taken_within_pairs():
    assert watching.ratios(comparison([2.0, 30.0], [1.0, 20.0])) == [2.0, 1.5]


def test_a_missed_goal_is_said_and_changes_the_exit_status():
    met, missed = comparison([10.4], [10.0]), comparison([10.6], [10.0])
    assert watching.verdict([met])[1] == 0
    lines, status = watching.verdict([missed, met, comparison([20.0], [10.0], None)])
    assert status == 1
    assert [line.split(",")[0] for line in lines] == ["what: MISSED", "what: met"]


def test_the_table_has_a_line_for_each_comparison():
    lines = watching.table([comparison([11.0] * 3, [10.0] * 3)])
    assert (
        lines[-1] == "| what | 3 | 11.0, 11.0 to 11.0 | 10.0, 10.0 to 10.0 | 1.00, 1.00 to 1.00 "
        "| 1.100, 1.100 to 1.100 |"
    )


def test_the_scheduler_alone_needs_no_model(tmp_path, capsys, monkeypatch):
    small = {"16 requests": LOAD, "decode": LOAD}
    monkeypatch.setattr(watching, "LOADS", small)
    monkeypatch.setattr(watching, "GOAL", 100.0)
    out = tmp_path / "watching.json"

    assert watching.main(["--scheduler-only", "--pairs", "2", "--out", str(out)]) == 0

    assert "| reasons, 6 requests, scheduler alone | 2 |" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert [len(each["with_it"]) for each in report["comparisons"]] == [2, 2]


def test_recording_is_measured_with_the_model_and_judged_without_it(demo_model):
    results = watching.measure_model(str(demo_model), "2x20", num_output_tokens=4, pairs=2)
    assert [each.what.split(", ")[0] for each in results] == [
        "recording",
        "recording to a file",
    ] * 2
    for each in results:
        assert len(each.with_it) == len(each.without) == 2
        assert min(each.with_it + each.without) > 0
    with_model, alone = results[:2], results[2:]
    assert [each.most_us for each in with_model] == [None, None]
    step_us = statistics.median(with_model[0].without)
    assert {each.most_us for each in alone} == {watching.MOST_RECORDING_SHARE * step_us}


def test_what_a_tap_costs_is_measured_on_the_structs_of_a_step():
    one, sixteen = watching.measure_tap(pairs=2, num_steps=10)
    # what was scheduled, what was sampled, what was taken in, and an output for each request
    assert one.what == "a tap nobody listens to, 1 requests, 4 structs"
    assert sixteen.what == "a tap nobody listens to, 16 requests, 19 structs"
    assert one.most_us == watching.MOST_TAP_US


def test_microseconds_that_are_added_have_a_goal_of_their_own():
    met = watching.Comparison("what", [11.0], [10.0], most_us=1.0)
    missed = met._replace(with_it=[11.1])
    assert watching.verdict([met]) == (
        ["what: met, 1.00 µs a step more, the goal is at most 1"],
        0,
    )
    assert watching.verdict([missed])[1] == 1
