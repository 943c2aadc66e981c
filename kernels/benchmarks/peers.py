"""How fast lmscope generates beside other engines: transformers, vLLM and llama.cpp.

    .venv/bin/python kernels/benchmarks/peers.py --rounds 5 --threads 1 --out peers.json
    .venv/bin/python kernels/benchmarks/peers.py --show peers.json more.json

Each engine lives in a worker process of its own for the whole run and gets its work as JSON
lines, so nothing is loaded twice and only one engine works at a time. In every round each engine
runs the same token ids, in an order that rotates; ratios are taken within a round, where the
machine is the same for both, and then min, median and max over the rounds. What the machine can do
at best is measured in the same run. No verdict is given when the reference waited for the machine.
The exit status is 0 when every goal is met, 1 when one is missed and 2 when there is no verdict.

vLLM and llama.cpp run under the interpreters that --vllm-python and --llama-python name, or
VLLM_PYTHON and LLAMA_PYTHON; what is not there is skipped, and the reason is printed. A long run
can be cut into several with --workloads, and --show puts their files into one table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_figures import (
    REFERENCE,
    Result,
    Run,
    engine_table,
    equal_share,
    floor_table,
    workload_table,
)
from peer_goals import EXACT, NEAR_TIE, goal_table, verdict
from worker_process import Peer, PeerError, rotated
from workloads import Workload, make_encoder, make_workload, workload_shape

__all__ = ["ENGINES", "EXACT", "NEAR_TIE", "WORKLOADS", "Run", "main", "measure"]

# lmscope comes first: it knows the demo model, and names a folder that the others can load.
OURS = ("lmscope", "lmscope-exact", "lmscope-gguf", "lmscope-int8")
ENGINES = (*OURS, REFERENCE, "transformers-cb", "vllm", "vllm-caching", "llama.cpp")
WORKLOADS = "1x20,4x20,16x20,32x20,1x512,mixed16,shared16"
# Only where prompts have a common beginning does it matter whether vLLM finds it again.
ONLY_SHARED = ("vllm-caching",)
# Tokens of each request in the run that does not count: enough to have done everything once.
_NUM_WARM_UP_TOKENS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.show:
        return show([json.loads(Path(name).read_text()) for name in options.show])
    load_before = os.getloadavg()
    peers, skipped = _start_all(options)
    try:
        folder = str(peers["lmscope"].ready["model"])
        report: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "threads": options.threads,
            "rounds": options.rounds,
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "engines": {name: peer.ready for name, peer in peers.items()},
            "skipped": skipped,
            "floors": _floors(folder, options.threads),
            "workloads": [],
        }
        for name in options.workloads.split(","):
            workload = make_workload(name, make_encoder(folder))
            own = {
                engine: peer
                for engine, peer in peers.items()
                if engine not in ONLY_SHARED or name.startswith("shared")
            }
            result = measure(own, workload, options.rounds)
            report["workloads"].append(result.as_data())
            report["load_average"] = {"before": load_before, "after": os.getloadavg()}
            if options.out:  # each time, so that what ends a long run loses one workload
                Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
            print(f"{name} is done", file=sys.stderr, flush=True)
    finally:
        for peer in peers.values():
            peer.close()
    return show([report])


def show(reports: Sequence[dict[str, Any]]) -> int:
    """Print the tables of some runs with as many threads as one; returns the exit status."""
    first = reports[0]
    for key in ("threads", "machine"):
        if len({report[key] for report in reports}) > 1:
            raise SystemExit(f"the files have different {key}; show them one by one")
    results = [Result.from_data(data) for report in reports for data in report["workloads"]]
    loads = ", ".join(
        f"{report['load_average'][when][0]:.1f}"
        for report in reports
        for when in ("before", "after")
    )
    print(
        f"\n{first['date']}, {first['cores']} cores, {first['threads']} threads each, "
        f"{first['rounds']} rounds, load average {loads}\n"
    )
    engines = {name: about for report in reports for name, about in report["engines"].items()}
    skipped = {name: why for report in reports for name, why in report["skipped"].items()}
    lines, status = verdict(results, first["threads"])
    for part in (
        engine_table(engines, skipped),
        workload_table(results),
        floor_table(results, first["floors"]),
        goal_table(results, first["threads"]),
        lines,
    ):
        print("\n".join([*part, ""]), flush=True)
    return status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="threads of every engine")
    parser.add_argument(
        "--workloads",
        default=WORKLOADS,
        help="REQUESTSxPROMPT_TOKENS, mixed16, shared16, separated by commas "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="separated by commas (default: %(default)s)"
    )
    parser.add_argument("--out", help="write every measurement to this JSON file")
    parser.add_argument("--show", nargs="+", metavar="FILE", help="print tables of such files")
    parser.add_argument("--model", default="demo", help="what LLM() takes (default: %(default)s)")
    parser.add_argument("--gguf", help="what llama.cpp loads (default: the demo model's file)")
    for name, default in (
        ("transformers", os.environ.get("TRANSFORMERS_PYTHON", sys.executable)),
        ("vllm", os.environ.get("VLLM_PYTHON")),
        ("llama", os.environ.get("LLAMA_PYTHON")),
    ):
        parser.add_argument(
            f"--{name}-python",
            default=default,
            help=f"an interpreter that imports it (default: what {name.upper()}_PYTHON names)",
        )
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    for name in options.workloads.split(","):
        try:
            workload_shape(name)
        except ValueError as error:
            parser.error(str(error))
    options.engines = options.engines.split(",")
    for name in options.engines:
        if name not in ENGINES:
            parser.error(f"engine is {name!r}; it must be one of {', '.join(ENGINES)}")
    for name in ("lmscope", REFERENCE):
        if name not in options.engines:
            parser.error(f"--engines must name {name}, which the others are compared with")
    return options


# --- workers -------------------------------------------------------------------------------


def _start_all(options: argparse.Namespace) -> tuple[dict[str, Peer], dict[str, str]]:
    """The workers that load, in the order of ENGINES, and why the others do not."""
    peers: dict[str, Peer] = {}
    skipped: dict[str, str] = {}
    try:
        for name in (engine for engine in ENGINES if engine in options.engines):
            python, flag = _interpreter(name, options)
            model = options.model
            if name not in OURS:
                about = peers["lmscope"].ready
                model = (options.gguf or about["gguf"]) if name == "llama.cpp" else about["model"]
            if not python:
                skipped[name] = f"no interpreter is named; give {flag}"
            elif not model:
                skipped[name] = f"there is no GGUF file of {options.model}; give --gguf"
            else:
                try:
                    peers[name] = _start(name, python, model, options.threads)
                except (OSError, PeerError) as error:
                    if name in ("lmscope", REFERENCE):
                        raise
                    skipped[name] = str(error).removeprefix(f"{name}: ").strip()
            if name in skipped:
                print(f"{name} is skipped: {skipped[name]}", flush=True)
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return peers, skipped


def _interpreter(name: str, options: argparse.Namespace) -> tuple[str | None, str]:
    if name in OURS:
        return sys.executable, ""
    kind = {"t": "transformers", "v": "vllm", "l": "llama"}[name[0]]
    return getattr(options, f"{kind}_python"), f"--{kind}-python"


def _start(name: str, python: str, model: str, threads: int) -> Peer:
    worker = str(Path(__file__).with_name("peer_worker.py"))
    command = [python, worker, name, model, "--threads", str(threads)]
    peer = Peer(name, command, _environment(threads))
    print(f"{name}: ready in {peer.ready['load_s']:.1f} s", file=sys.stderr, flush=True)
    return peer


def _floors(folder: str, threads: int) -> dict[str, Any]:
    script = str(Path(__file__).with_name("floors.py"))
    command = [sys.executable, script, folder, "--threads", str(threads)]
    peer = Peer("floors", command, _environment(threads))
    peer.close()
    return peer.ready


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


# --- measuring -----------------------------------------------------------------------------


def measure(peers: dict[str, Peer], workload: Workload, rounds: int) -> Result:
    """`rounds` runs of each engine, after a short one that does not count."""
    result = Result(
        workload.name,
        len(workload.prompts),
        sum(map(len, workload.prompts)),
        sum(workload.num_output_tokens),
        {name: [] for name in peers},
    )
    few = [min(count, _NUM_WARM_UP_TOKENS) for count in workload.num_output_tokens]
    for peer in peers.values():
        _generate(peer, workload._replace(num_output_tokens=few))
    for number in range(rounds):
        measured = {name: _run(peers[name], workload) for name in rotated(list(peers), number)}
        for name, (run, token_ids) in measured.items():
            expected = measured[REFERENCE][1]
            leads: tuple[float, ...] = ()
            if name == EXACT and number == 0:
                leads = _leads(peers[REFERENCE], workload, token_ids, expected)
            fields = {**run, "equal": equal_share(token_ids, expected), "leads": leads}
            result.runs[name].append(Run(**fields))
    return result


def _run(peer: Peer, workload: Workload) -> tuple[dict[str, Any], list[list[int]]]:
    """The costs of one run, and its tokens."""
    ones = [1] * len(workload.prompts)
    first = _generate(peer, workload._replace(num_output_tokens=ones))
    whole = _generate(peer, workload)
    costs = {
        "first_s": first["wall_s"],
        "total_s": whole["wall_s"],
        "total_cpu_s": whole["cpu_s"],
        "peak_rss_bytes": whole["peak_rss_bytes"],
    }
    return costs, whole["token_ids"]


def _generate(peer: Peer, workload: Workload) -> dict[str, Any]:
    asked = workload.num_output_tokens
    answer = peer.ask(prompts=workload.prompts, num_output_tokens=asked)
    lengths = [len(token_ids) for token_ids in answer["token_ids"]]
    if lengths != asked:
        raise PeerError(
            f"{peer.name} generated {lengths} tokens for {workload.name}; asked were {asked}"
        )
    return answer


def _leads(
    reference: Peer, workload: Workload, token_ids: list[list[int]], expected: list[list[int]]
) -> tuple[float, ...]:
    """For each request whose tokens part, how sure the reference is of its own there."""
    leads = []
    for prompt, ours, theirs in zip(workload.prompts, token_ids, expected, strict=True):
        for place, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                answer = reference.ask(lead=[[*prompt, *theirs[:place]], their, our])
                leads.append(float(answer["lead"]))
                break
    return tuple(leads)


if __name__ == "__main__":
    sys.exit(main())
