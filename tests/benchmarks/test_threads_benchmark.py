"""What threads of others cost: one measured process, and the table."""

from __future__ import annotations

import pytest
import threads


def test_a_step_is_measured_in_a_process_of_its_own(demo_model):
    assert threads._step_ms(str(demo_model), 1, 1, 1) > 0


def test_a_process_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="a measured process failed"):
        threads._step_ms(str(tmp_path / "nothing"), 1, 1, 1)


def test_the_table_has_a_line_for_each_number_of_requests():
    own = dict(zip(threads.WAYS, ([3.0, 1.0, 2.0], [1.0], [4.0]), strict=True))

    lines = threads.table({4: own})

    assert lines[-1] == "| 4 | 2.0; 1.5 to 2.5 | 1.0; 1.0 to 1.0 | 4.0; 4.0 to 4.0 |"


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--threads", "1"]])
def test_numbers_that_cannot_be_measured_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        threads.main(arguments)

    assert "must be at least 1, --threads at least 2" in capsys.readouterr().err
