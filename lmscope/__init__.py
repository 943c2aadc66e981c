"""lmscope, the inference-engine microscope."""
__version__ = "0.1.0.dev0"
