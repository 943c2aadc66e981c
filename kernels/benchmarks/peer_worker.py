"""One engine of `peers.py` in a process of its own: JSON lines in, JSON lines out.

    PYTHON peer_worker.py ENGINE MODEL --threads 1

It runs under the interpreter of any engine. The first line out says that the engine is loaded and
what it is, or is {"error": words}. Then each {"prompts": [[token id]], "num_output_tokens": [n]}
is answered with the generated ids and what they cost; {"lead": [[token id], a, b]} with how far
apart the logits of two tokens are behind some others; both with {"error": words} where it fails.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time

__all__ = ["serve"]


def serve(name: str, model: str, threads: int) -> None:
    """Load an engine, then answer requests from standard input until it ends."""
    # Only answers may reach the driver, so whatever libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    began = time.perf_counter()
    from peer_engines import ENGINES

    try:
        engine = ENGINES[name](model, threads)
    except Exception as error:  # whatever an import or a load raises, the driver must hear of it
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(
        ready=name,
        load_s=time.perf_counter() - began,
        peak_rss_bytes=_peak_rss_bytes(),
        **engine.about,
    )
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "lead" in request:
                assert engine.lead is not None
                answer(lead=engine.lead(*request["lead"]))
                continue
            engine.forget()
            began, cpu_began = time.perf_counter(), time.process_time()
            token_ids = engine.generate(request["prompts"], request["num_output_tokens"])
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        except Exception as error:  # it is the driver that decides what an error means
            answer(error=repr(error))
            continue
        answer(wall_s=wall_s, cpu_s=cpu_s, peak_rss_bytes=_peak_rss_bytes(), token_ids=token_ids)


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One engine of peers.py.")
    parser.add_argument("engine")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    serve(options.engine, options.model, options.threads)
