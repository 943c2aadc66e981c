"""What models shaped like Llama are called, and their linear layers; fuse.py runs them lean."""

from __future__ import annotations

__all__ = ["FAMILIES", "LINEARS_OF_ATTENTION", "LINEARS_OF_MLP"]

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Granite", "Olmo2")
LINEARS_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEARS_OF_MLP = ("gate_proj", "up_proj", "down_proj")
