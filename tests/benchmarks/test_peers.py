"""How the comparison with other engines talks to its workers, and a whole run of a small model."""

from __future__ import annotations

import json
import os
import sys

import peers
import pytest
import worker_process
import workloads

# Its second token, and those that follow, depend on its name.
ECHO = """
import json, sys
own = int(sys.argv[1])
print(json.dumps({"ready": "echo"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "lead" in request:
        print(json.dumps({"lead": len(request["lead"][0])}), flush=True)
        continue
    if request["prompts"] == "die":
        sys.exit("out of memory")
    if request["prompts"] == "fail":
        print(json.dumps({"error": "ValueError('no')"}), flush=True)
        continue
    token_ids = [[7, *[own] * (count - 1)] for count in request["num_output_tokens"]]
    print(json.dumps(
        {"wall_s": 1.0, "cpu_s": 0.5, "peak_rss_bytes": 1 << 20, "token_ids": token_ids}
    ), flush=True)
"""


@pytest.fixture
def echo():
    started = []

    def start(own: int = 8) -> worker_process.Peer:
        command = [sys.executable, "-c", ECHO, str(own)]
        started.append(worker_process.Peer("echo", command, dict(os.environ)))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


# --- workers ---


def test_rounds_are_measured_after_one_that_does_not_count(echo):
    workload = workloads.Workload("2x3", [[1, 2, 3], [4, 5, 6]], [2, 2])
    result = peers.measure({"transformers": echo(8), "lmscope": echo(9)}, workload, rounds=2)
    assert (result.num_requests, result.num_prompt_tokens, result.num_output_tokens) == (2, 6, 4)
    assert result.runs["transformers"] == [peers.Run(1.0, 1.0, 0.5, 1 << 20, equal=1.0)] * 2
    assert result.runs["lmscope"] == [peers.Run(1.0, 1.0, 0.5, 1 << 20, equal=0.5)] * 2


def test_where_exact_tokens_part_the_reference_says_how_sure_it_is(echo):
    workload = workloads.Workload("2x3", [[1, 2, 3], [4, 5]], [2, 1])
    result = peers.measure({"transformers": echo(8), peers.EXACT: echo(9)}, workload, rounds=1)
    # Behind the three tokens of the first prompt and the one that both generated; the second
    # request has no token to part at.
    assert result.runs[peers.EXACT][0].leads == (4.0,)


def test_too_few_tokens_are_an_error(echo):
    peer = echo()
    peer.ask = lambda **_: {"token_ids": [[1]]}
    workload = workloads.Workload("1x1", [[1]], [2])
    with pytest.raises(worker_process.PeerError, match=r"generated \[1\] .* asked were \[2\]"):
        peers.measure({"transformers": peer}, workload, rounds=1)


def test_an_error_of_a_worker_is_raised_and_the_worker_goes_on(echo):
    peer = echo()
    with pytest.raises(worker_process.PeerError, match=r"echo: ValueError\('no'\)"):
        peer.ask(prompts="fail")
    assert peer.ask(prompts=[[1]], num_output_tokens=[1])["token_ids"] == [[7]]


def test_the_last_words_of_a_dead_worker_are_shown(echo):
    peer = echo()
    with pytest.raises(worker_process.PeerError, match=r"(?s)echo died:.*out of memory"):
        peer.ask(prompts="die")
    with pytest.raises(worker_process.PeerError, match="out of memory"):
        peer.ask(prompts=[])


def test_each_engine_is_first_in_turn():
    orders = [worker_process.rotated(["a", "b", "c"], number) for number in range(4)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


# --- options ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--workloads", "4x20,four"], "must be like 4x20, or mixed16, or shared16"),
        (["--engines", "lmscope,transformers,vlm"], "engine is 'vlm'; it must be one of"),
        (["--engines", "lmscope"], "must name transformers"),
    ],
)
def test_options_that_cannot_work_are_refused(arguments, words, capsys):
    with pytest.raises(SystemExit):
        peers.main(arguments)
    assert words in capsys.readouterr().err


# --- a whole run ---


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Four layers of random weights and no tokenizer; prompts are the bytes of their text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_small_model_runs_in_all_engines_that_are_here(small_model, tmp_path, capsys):
    out = tmp_path / "peers.json"
    arguments = ["--model", str(small_model), "--workloads", "4x20", "--rounds", "1"]

    # Time decides nothing here, so whatever the verdict is, there is one.
    engines = "lmscope,lmscope-exact,transformers,transformers-cb,vllm,llama.cpp"
    none = ["--vllm-python", "/nowhere/python", "--llama-python", ""]
    status = peers.main([*arguments, "--out", str(out), "--engines", engines, *none])

    assert status in (0, 1, 2)
    report = json.loads(out.read_text())
    (result,) = report["workloads"]
    engines_there = {"lmscope", "lmscope-exact", "transformers", "transformers-cb"}
    assert result["runs"].keys() == report["engines"].keys() == engines_there
    assert result["num_output_tokens"] == 4 * 64
    # The whole and the exact engine generate what the reference does, up to near ties.
    exact = result["runs"]["lmscope-exact"][0]
    assert all(abs(lead) < peers.NEAR_TIE for lead in exact["leads"])
    assert exact["equal"] == 1.0 or exact["leads"]
    assert result["runs"]["transformers-cb"][0]["equal"] > 0
    assert report["skipped"].keys() == {"vllm", "llama.cpp"}
    assert "No such file" in report["skipped"]["vllm"]
    assert report["floors"]["num_weights"] > 0

    # What was written can be shown again, alone or beside another run.
    printed = capsys.readouterr().out
    assert "| 4x20 | lmscope |" in printed
    assert peers.main(["--show", str(out)]) == status
    assert (
        capsys.readouterr().out.splitlines()[1:] == printed[printed.index("\n2") :].splitlines()[1:]
    )


# --- workloads ---


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_a_workload_is_named_by_requests_and_prompt_tokens():
    workload = workloads.make_workload("4x20", encode)
    assert [len(prompt) for prompt in workload.prompts] == [20] * 4
    assert workload.num_output_tokens == [64] * 4


def test_mixed16_is_16_requests_of_all_lengths():
    workload = workloads.make_workload("mixed16", encode)
    assert (min(map(len, workload.prompts)), max(map(len, workload.prompts))) == (16, 512)
    assert (min(workload.num_output_tokens), max(workload.num_output_tokens)) == (8, 64)
    assert len(set(workload.num_output_tokens)) == len(workload.prompts) == 16


def test_shared16_is_16_requests_that_begin_alike_and_go_on_alone():
    workload = workloads.make_workload("shared16", encode)
    assert [len(prompt) for prompt in workload.prompts] == [420] * 16
    assert len({tuple(prompt[:400]) for prompt in workload.prompts}) == 1
    assert len({tuple(prompt[400:]) for prompt in workload.prompts}) == 16


def test_prompts_are_the_same_each_time_and_share_no_block():
    first = workloads.make_workload("16x20", encode)
    assert first == workloads.make_workload("16x20", encode)
    assert len({tuple(prompt[:16]) for prompt in first.prompts}) == 16


def test_a_folder_without_a_tokenizer_has_the_bytes_of_the_text(tmp_path):
    assert workloads.make_encoder(str(tmp_path))("Ab") == [65, 98]


@pytest.mark.parametrize("name", ["", "x20", "4x", "0x20", "4x0", "-1x20", "four", "4x20x1"])
def test_an_unknown_workload_is_refused(name: str):
    with pytest.raises(ValueError, match=r"must be like 4x20, or mixed16, or shared16"):
        workloads.make_workload(name, encode)
