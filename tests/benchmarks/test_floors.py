"""What is counted as a model's matrices, and that the floors of a small one are measured."""

from __future__ import annotations

import json

import floors

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "vocab_size": 32,
}


def shapes(tmp_path, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return floors.Shapes.of(str(tmp_path))


def test_the_matrices_of_a_layer_are_fused(tmp_path):
    assert shapes(tmp_path) == (((8, 16), (8, 8), (8, 32), (16, 8)), 3, (8, 32))


def test_heads_may_be_larger_than_their_share(tmp_path):
    assert shapes(tmp_path, head_dim=8).layer[:2] == ((8, 64), (32, 8))


def test_weights_and_products_are_counted(tmp_path):
    small = shapes(tmp_path)
    in_layers = 3 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
    assert small.num_weights() == in_layers + 8 * 32
    assert small.num_products(4, 1) == 2 * (4 * in_layers + 8 * 32)


def test_each_step_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(floors, "_READ_BYTES", 1 << 12)
    measured = floors.measure(shapes(tmp_path), threads=1, times=2)
    assert [step["rows"] for step in measured["steps"]] == [rows for rows, _ in floors.ROWS]
    for step in measured["steps"]:
        best, median = step["seconds"]
        assert 0 < best <= median
    best, median = measured["read_gb_per_s"]
    assert best >= median > 0
