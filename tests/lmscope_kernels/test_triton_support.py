"""Where kernels cannot run: each reason is told, and importing works all the same.

Each in a process of its own, since this one must not load Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys


def run(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_without_triton_kernel_files_import_and_launchers_say_what_to_do():
    printed = run(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, lmscope\n"
        "from lmscope_kernels import rms_norm, silu_mul, store_kv, unified_attention\n"
        "silu_mul.silu_mul_reference(torch.ones(1, 2))\n"
        "try: silu_mul.silu_mul(torch.ones(1, 32))\n"
        "except RuntimeError as error: print(error)\n"
    )

    assert "Triton is not installed" in printed
    assert 'use backend="torch"' in printed


def test_old_gpus_other_devices_and_other_types_are_told_apart():
    old, cpu, dtype = run(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.get_device_capability = lambda device: (7, 5)\n"
        "torch.cuda.get_device_name = lambda device: 'Tesla T4'\n"
        "import lmscope_kernels.triton_support as support\n"
        "support.triton = support.triton or object()\n"
        "print(support.is_available(torch.device('cuda')))\n"
        "print(support.is_available(torch.device('cpu')))\n"
        "print(support.is_available(torch.device('cuda'), torch.float64))\n"
    ).splitlines()

    assert "(False, 'Tesla T4 is sm_75" in old
    assert "sm_80 or newer" in old
    assert "the device is cpu" in cpu
    assert "float32 or float16 or bfloat16, not torch.float64" in dtype
