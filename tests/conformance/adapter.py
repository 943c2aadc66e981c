"""Our scheduler behind the methods that `replay.replay` drives."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lmscope.boundary import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineCoreOutputs,
    EngineCoreRequest,
    KVEvent,
    ModelRunnerOutput,
    SchedulerOutput,
)
from lmscope.engine.prefix_hash import BlockHasher
from lmscope.engine.request import Request, RequestStatus
from lmscope.engine.scheduler import Scheduler, SchedulerConfig
from lmscope.sampling_params import SamplingParams

__all__ = ["SchedulerAdapter", "make_adapter"]


def make_adapter(config: dict[str, Any]) -> SchedulerAdapter:
    """An adapter around a scheduler with the configuration of a trace."""
    return SchedulerAdapter(config)


class SchedulerAdapter:
    """Drives a Scheduler with the requests and tokens of a trace."""

    def __init__(self, config: dict[str, Any]) -> None:
        speculative = config.get("speculative") or {}
        self.eos_token_id = config["eos_token_id"]
        self.hasher = BlockHasher(config["block_size"]) if config["enable_prefix_caching"] else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=config["block_size"],
                num_blocks=config["num_gpu_blocks"],
                max_num_seqs=config["max_num_seqs"],
                max_num_batched_tokens=config["max_num_batched_tokens"],
                max_model_len=config["max_model_len"],
                enable_prefix_caching=config["enable_prefix_caching"],
                enable_chunked_prefill=config["enable_chunked_prefill"],
                long_prefill_token_threshold=config["long_prefill_token_threshold"],
                policy=config["policy"],
                async_scheduling=config["async_scheduling"],
                spec_method=speculative.get("method"),
                num_speculative_tokens=speculative.get("num_speculative_tokens", 0),
            )
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.pool.record_events = config["enable_kv_cache_events"]
        self.batches: dict[int, SchedulerOutput] = {}
        self.kv_events: list[list[Any]] = []
        self.hash_numbers: dict[int, int] = defaultdict(lambda: len(self.hash_numbers))

    def add_request(self, request: dict[str, Any]) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            min_tokens=request.get("min_tokens", 0),
            stop_token_ids=tuple(request.get("stop_token_ids", ())),
            ignore_eos=request.get("ignore_eos", False),
            skip_reading_prefix_cache=request.get("skip_reading_prefix_cache", False),
        )
        core_request = EngineCoreRequest(
            request_id=request["id"],
            prompt_token_ids=tuple(request["prompt"]),
            sampling_params=params,
            eos_token_id=self.eos_token_id,
            arrival_time=request["arrival_time"],
            cache_salt=request.get("cache_salt"),
            priority=request.get("priority", 0),
        )
        self.scheduler.add_request(Request(core_request, self.hasher))

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self, reset_running: bool) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running)

    def set_drafts(self, drafts: dict[str, list[int]]) -> None:
        self.scheduler.update_draft_token_ids(drafts)

    def schedule(self, batch: int) -> dict[str, Any]:
        output = self.scheduler.schedule()
        self.batches[batch] = output
        self._describe_events(output.kv_events)
        answer = _describe_schedule(output)
        answer.update(self._state())
        answer["free_queue"] = list(self.pool.free_queue)
        return answer

    def update(self, batch: int, sampled: dict[str, list[int]]) -> dict[str, Any]:
        output = self.batches.pop(batch)
        ids = tuple(output.num_scheduled_tokens)
        result = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                step=output.step,
                req_ids=ids,
                sampled_token_ids=tuple(tuple(sampled.get(i, ())) for i in ids),
            ),
        )
        self._describe_events(result.kv_events)
        answer = _describe_outputs(result)
        answer["kv_events"], self.kv_events = self.kv_events, []
        answer.update(self._state())
        return answer

    def _state(self) -> dict[str, Any]:
        return {
            "running": [
                [r.request_id, r.num_computed_tokens, r.num_tokens] for r in self.scheduler.running
            ],
            "waiting": [r.request_id for r in self.scheduler.waiting],
            "free_blocks": self.pool.num_free_blocks,
            "usage": self.scheduler.kv_cache_manager.usage,
        }

    def _describe_events(self, events: tuple[KVEvent, ...]) -> None:
        """Fold our events, one per block, into those of a trace, one per call.

        A call stores consecutive blocks of one request, so the next block continues the
        event exactly when its index follows and nothing else came between.
        """
        expected: tuple[str, int] | None = None
        for event in events:
            if isinstance(event, BlockStored):
                name = (
                    self.hash_numbers[event.parent_block_hash]
                    if (event.parent_block_hash is not None)
                    else None
                )
                number = self.hash_numbers[event.block_hash]
                if expected == (event.request_id, event.index):
                    self.kv_events[-1][1].append(number)
                    self.kv_events[-1][3].extend(event.token_ids)
                else:
                    self.kv_events.append(
                        ["stored", [number], name, list(event.token_ids), self.pool.block_size]
                    )
                expected = (event.request_id, event.index + 1)
                continue
            expected = None
            if isinstance(event, BlockRemoved):
                self.kv_events.append(["removed", [self.hash_numbers[event.block_hash]]])
            elif isinstance(event, AllBlocksCleared):
                self.kv_events.append(["cleared"])


def _describe_schedule(output: SchedulerOutput) -> dict[str, Any]:
    cached = output.scheduled_cached_reqs
    counts = output.num_scheduled_tokens
    return {
        "new": [
            {
                "id": r.req_id,
                "computed": r.num_computed_tokens,
                "tokens": counts[r.req_id],
                "blocks": list(r.block_ids[0]),
            }
            for r in output.scheduled_new_reqs
        ],
        "cached": [
            {
                "id": request_id,
                "resumed": request_id in cached.resumed_req_ids,
                "computed": cached.num_computed_tokens[i],
                "output": cached.num_output_tokens[i],
                "tokens": counts[request_id],
                "new_blocks": list(blocks[0]) if (blocks := cached.new_block_ids[i]) else None,
            }
            for i, request_id in enumerate(cached.req_ids)
        ],
        "resent_lens": {k: len(v) for k, v in cached.all_token_ids.items()},
        "order": list(counts),
        "total": output.total_num_scheduled_tokens,
        "spec": {k: list(v) for k, v in output.scheduled_spec_decode_tokens.items()},
        "preempted": sorted(output.preempted_req_ids),
        "finished": sorted(output.finished_req_ids),
        "common_prefix_blocks": output.num_common_prefix_blocks[0],
    }


def _describe_outputs(result: EngineCoreOutputs) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "outputs": [
            {
                "id": o.request_id,
                "tokens": list(o.new_token_ids),
                "finish": o.finish_reason,
                "stop": o.stop_reason,
                "cached": o.num_cached_tokens,
                "events": [e.type.name.lower() for e in o.events],
            }
            for o in result.outputs
        ]
    }
    stats = result.scheduler_stats
    assert stats is not None
    described: dict[str, Any] = {
        "running": stats.num_running_reqs,
        "waiting": stats.num_waiting_reqs,
    }
    prefix = stats.prefix_cache_stats
    if prefix is not None:
        fields = {name: getattr(prefix, name) for name in prefix.__struct_fields__}
        described["prefix"] = {name: value for name, value in fields.items() if value}
    spec = stats.spec_decoding_stats
    if spec is not None:
        described["spec"] = {
            "drafts": spec.num_drafts,
            "draft_tokens": spec.num_draft_tokens,
            "accepted_tokens": spec.num_accepted_tokens,
            "accepted_per_pos": list(spec.num_accepted_tokens_per_pos),
        }
    answer["stats"] = described
    return answer
