"""Attention by the compiled loops beside torch: both do the same work, and the table."""

from __future__ import annotations

import cpu_attention
import pytest
import torch
from cpu_attention import Case, Layers
from lmscope_kernels.numba_support import why_not_numba

from lmscope.models import attention_plan


@pytest.mark.skipif(why_not_numba() is not None, reason="needs the extra cpu")
@pytest.mark.parametrize("case", [Case(3, 1, 20), Case(2, 20, 20), Case(1, 5, 40)])
def test_both_ways_attend_to_the_same_and_nothing_stays_changed(case, monkeypatch):
    layers, choose, calls = Layers(case, num_layers=2), attention_plan._is_compiled, []
    for name in ("paged_decode_cpu", "attend_prompts_cpu"):
        loops = getattr(attention_plan, name)
        monkeypatch.setattr(
            attention_plan, name, lambda *args, _=loops, **more: (calls.append(1), _(*args, **more))
        )

    compiled = layers.attend(True)
    assert len(compiled) == len(calls) == 2
    plain = layers.attend(False)

    assert len(plain) == len(calls) == 2
    for output, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(output, expected)
    assert attention_plan._is_compiled is choose


def test_a_line_has_both_ways_and_ratios_within_pairs():
    *_, line = cpu_attention.table({"a": {"compiled": [1.0, 2.0, 4.0], "torch": [4.0, 4.0, 4.0]}})

    assert line == ("| a | 2.00, 1.50 to 3.00 | 4.00, 4.00 to 4.00 | 2.00, 1.50 to 3.00 |")


def test_pairs_must_be_at_least_one():
    with pytest.raises(SystemExit):
        cpu_attention.main(["--pairs", "0"])
