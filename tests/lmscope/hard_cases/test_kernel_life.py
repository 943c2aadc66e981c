"""Hard cases of life inside a notebook's kernel (N), and of what threads print (U8)."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import subprocess
import sys
import threading
import weakref

import pytest

from lmscope import LLM, EngineClosedError, SamplingParams
from lmscope.boundary import SchedulerOutput
from lmscope.config import EngineOptions, ModelFacts, resolve
from lmscope.testing import byte_tokenizer

DEADLINE_S = 200
GREEDY = SamplingParams(temperature=0, max_tokens=5)


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# -- N1, N2, N3: memory -----------------------------------------------------------------


def references(llm):
    """Weak ones, to what is large in an engine."""
    runner = llm._loop.call(lambda core: core._executor._worker._runner)
    kept = [weakref.ref(runner.kv_cache), weakref.ref(llm.module)]
    kept += [weakref.ref(parameter) for parameter in llm.module.parameters()]
    return kept


def test_n1_close_gives_weights_and_cache_back_at_once_though_others_hold_on(tiny_folder):
    history, listened = [], []
    gc.collect()
    gc.disable()  # nothing may wait for the next collection
    try:
        for _ in range(5):
            llm = LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1)
            llm.tap.on(SchedulerOutput, listened.append)
            outputs = llm.generate("hello", GREEDY, use_tqdm=False)
            large = references(llm)
            history += [llm, outputs, llm.tap, llm.gate]

            llm.close()

            assert [reference() for reference in large if reference() is not None] == []
    finally:
        gc.enable()
    assert len(listened) >= 5


def test_n1_after_close_calls_say_what_to_do(tiny_folder):
    with LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
        llm.generate("hello", GREEDY, use_tqdm=False)

    for call in (
        lambda: llm.generate("hello", use_tqdm=False),
        lambda: llm.submit("hello"),
        llm.reset_prefix_cache,
        llm.like,
        lambda: llm.module,
    ):
        with pytest.raises(EngineClosedError, match="load a new one"):
            call()
    llm.abort("0")
    llm.close()
    assert "closed" in repr(llm)


def test_n1_engines_that_share_weights_close_one_by_one(tiny_folder):
    first = LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1)
    second = first.like(num_kv_blocks=16)
    large = references(first)
    first.close()

    assert large[0]() is None  # its cache
    assert large[1]() is second.module
    assert second.generate("hello", GREEDY, use_tqdm=False)[0].finished
    second.close()
    assert large[1]() is None


def test_n2_a_second_model_is_told_of_the_first_before_it_is_loaded(tiny_folder, tmp_path, caplog):
    with LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
        with caplog.at_level(logging.WARNING):
            llm.like().close()
            assert caplog.records == []  # the same weights, and meant so
            with pytest.raises(ValueError, match="no config"):
                LLM(tmp_path)
        (warning,) = caplog.records
        for words in ("MB of weights", "MB of KV cache", "32 blocks of 16", "close()", "like()"):
            assert words in warning.getMessage()
    caplog.clear()
    with pytest.raises(ValueError, match="no config"):
        LLM(tmp_path)
    assert caplog.records == []


FACTS = ModelFacts(max_model_len=2048, kv_block_bytes=1 << 20, kv_formula="...")


@pytest.mark.parametrize(
    ("free_bytes", "num_blocks"),
    [(64 << 30, 512), (1 << 30, 102), (30 << 20, 3)],
)
def test_n3_the_cache_is_reckoned_from_what_is_free_and_small(free_bytes, num_blocks):
    config = resolve(EngineOptions.parse("m", {}), FACTS, free_bytes)

    assert config.num_kv_blocks == num_blocks
    assert f"{num_blocks}.0 MiB" in config.describe()


# -- N4, N5: event loops ----------------------------------------------------------------


def test_n4_sync_and_async_calls_work_in_a_running_loop(scripted):
    llm = scripted("Hello")

    async def cell():
        for _ in range(20):
            (output,) = llm.generate("abc", use_tqdm=False)
            assert output.outputs[0].text == "Hello"
        assert (await llm.submit("abc")).text == "Hello"
        texts = [o.outputs[0].text async for o in llm.submit("abc", SamplingParams(max_tokens=2))]
        return texts

    assert asyncio.run(cell()) == ["H", "He"]
    assert asyncio.run(cell()) == ["H", "He"]  # and in the next loop


def test_n5_any_number_of_streams_can_be_gathered(scripted, endless):
    llm = scripted(endless, num_kv_blocks=30, max_num_seqs=4)

    async def read(number):
        params = SamplingParams(max_tokens=3 + number % 5)
        stream = llm.submit("x" * (1 + number), params)
        return [o async for o in stream][-1].outputs[0]

    async def cell():
        return await asyncio.wait_for(asyncio.gather(*map(read, range(20))), DEADLINE_S)

    outputs = asyncio.run(cell())
    assert [len(o.token_ids) for o in outputs] == [3 + n % 5 for n in range(20)]


def test_n5_so_can_streams_from_several_threads(scripted, endless):
    llm = scripted(endless, num_kv_blocks=30, max_num_seqs=4)
    done = []

    def work(number):
        outputs = llm.generate(
            ["x" * (1 + number)] * 3, SamplingParams(max_tokens=4), use_tqdm=False
        )
        done.append([len(o.outputs[0].token_ids) for o in outputs])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert done == [[4, 4, 4]] * 20


# -- N6, N7, N8: processes, files, machines without a device ----------------------------


RUN = """
import sys
sys.modules["triton"] = None  # an import of it fails
import torch
torch.ones(2) @ torch.ones(2)
started = []
sys.addaudithook(
    lambda event, arguments: started.append(event)
    if event in ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "subprocess.Popen",
                 "os.system", "socket.connect", "socket.getaddrinfo")
    else None
)
from lmscope import LLM, SamplingParams
from lmscope.testing import byte_tokenizer
with LLM({folder!r}, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
    (output,) = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
print(len(output.outputs[0].token_ids), started)
"""


@pytest.fixture(scope="module")
def fresh_run(tiny_folder) -> list[str]:
    """What a run in a fresh interpreter says: its number of tokens, and what it started.

    torch was used before, and there is no triton.
    """
    return run_python(RUN.format(folder=str(tiny_folder))).strip().split(maxsplit=1)


def test_n6_no_process_is_started_and_nobody_is_called(fresh_run):
    assert fresh_run[1] == "[]"


class Cell(io.StringIO):
    """A notebook's stdout: text without a file behind it."""

    def __init__(self):
        super().__init__()
        self.writers = set()

    def write(self, text):
        self.writers.add(threading.current_thread())
        return super().write(text)

    def fileno(self):
        raise io.UnsupportedOperation("a notebook's stdout has no file number")


def test_n7_an_output_without_a_file_number_is_enough(tiny_folder, monkeypatch):
    cell = Cell()
    monkeypatch.setattr(sys, "stdout", cell)
    monkeypatch.setattr(sys, "stderr", cell)

    with LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
        (output,) = llm.generate("hello", GREEDY)  # with its progress bar

    assert output.finished
    assert "Processed prompts" in cell.getvalue()


WITHOUT_DEVICE = """
import importlib, pkgutil, sys
sys.modules["triton"] = None  # an import of it fails
import lmscope, lmscope_kernels, lmscope_widgets
names = []
for package in (lmscope, lmscope_kernels, lmscope_widgets):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        names.append(module.name)
print(len(names) > 40)
"""


def test_n8_everything_imports_without_a_device_and_without_triton():
    assert run_python(WITHOUT_DEVICE).strip() == "True"


def test_n8_and_runs_without_them(fresh_run):
    assert fresh_run[0] == "3"


# -- U8: text from threads --------------------------------------------------------------


def test_u8_a_run_in_the_background_prints_nothing(tiny_folder, monkeypatch):
    cell = Cell()
    monkeypatch.setattr(sys, "stdout", cell)
    monkeypatch.setattr(sys, "stderr", cell)
    with LLM(tiny_folder, tokenizer=byte_tokenizer(), num_kv_blocks=32, threads=1) as llm:
        cell.writers.clear()
        streams = [llm.submit("hello", GREEDY) for _ in range(3)]
        streams[0].abort()
        llm.gate.pause()
        llm.gate.resume()
        for stream in streams:
            stream.wait(DEADLINE_S)
        llm.reset_prefix_cache()

    assert cell.writers == set()


def test_u8_progress_is_written_by_the_thread_that_waits(scripted, monkeypatch):
    cell = Cell()
    monkeypatch.setattr(sys, "stdout", cell)
    monkeypatch.setattr(sys, "stderr", cell)

    scripted("Hello").generate(["abc"] * 3)

    assert "3/3" in cell.getvalue()
    assert cell.writers == {threading.current_thread()}
