"""Kernels: functions of tensors, each with a torch reference beside it."""
