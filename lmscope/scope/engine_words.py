"""What runs an engine, and what its device has still to tell, in words."""

from __future__ import annotations

from collections.abc import Sequence

from lmscope.boundary import EngineInfo

__all__ = ["engine_words", "in_flight_words"]


def engine_words(info: EngineInfo) -> str:
    """Device, attention and overlap, as far as a source tells: "cuda, Triton kernels".

    On a CPU attention in torch is what there is, and not said.
    """
    words = [info.device] if info.device else []
    if info.attention_backend == "triton":
        words.append("Triton kernels")
    elif info.attention_backend == "torch" and info.device != "cpu":
        words.append("attention in torch")
    if info.async_scheduling:
        words.append("async scheduling")
    return ", ".join(words)


def in_flight_words(steps: Sequence[int]) -> str:
    """What is meant by steps that are in flight while an engine stands; "" for none."""
    if not steps:
        return ""
    if len(steps) == 1:
        return (
            f"Step {steps[0]} is in flight: the device has run it, and its tokens are taken in "
            "when the engine goes on."
        )
    return (
        f"Steps {steps[0]} to {steps[-1]} are in flight: the device has run them, and their "
        "tokens are taken in when the engine goes on."
    )
