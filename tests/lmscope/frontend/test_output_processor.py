"""OutputProcessor: each output reaches the tap and then the stream, once and in order."""

from __future__ import annotations

from lmscope.boundary import EngineCoreOutput, EngineCoreOutputs, EngineInfo, RequestOutput
from lmscope.frontend.input_processor import InputProcessor
from lmscope.frontend.output_processor import OutputProcessor
from lmscope.frontend.parallel_sampling import Child
from lmscope.frontend.stream import Stream
from lmscope.sampling_params import SamplingParams
from lmscope.tap import Tap
from lmscope.testing import byte_tokenizer

TOKENIZER = byte_tokenizer()


class FrontEnd:
    """An output processor with one request in it; `seen` is what crossed the tap."""

    def __init__(self, **params):
        info = EngineInfo(
            model="m",
            block_size=4,
            num_blocks=8,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_model_len=28,
        )
        self.tap = Tap(info)
        self.processor = OutputProcessor(TOKENIZER, self.tap)
        inputs = InputProcessor(
            TOKENIZER,
            vocab_size=TOKENIZER.vocab_size,
            max_model_len=28,
            eos_token_id=TOKENIZER.eos_token_id,
            max_pool_tokens=28,
            block_size=4,
        )
        sampling_params = SamplingParams(max_tokens=9, **params)
        request = inputs.process("abc", sampling_params, request_id="0")
        self.stream = Stream(
            "0", "abc", request.prompt_token_ids, sampling_params, abort=lambda i: None
        )
        self.ended = []
        self.child = Child("0", 0, self.stream)
        self.processor.add_request(request, self.child, self.ended.append)
        self.seen = []
        self.tap.on(RequestOutput, self.seen.append, strict=True)

    def step(self, text, finish_reason=None):
        output = EngineCoreOutput("0", tuple(text.encode()), finish_reason=finish_reason)
        return self.processor.process(EngineCoreOutputs(step=1, outputs=(output,)))


def test_the_stream_gets_what_crossed_the_tap():
    front_end = FrontEnd()
    front_end.step("x")
    front_end.step("y", "length")

    assert front_end.stream.output.outputs[0].text == "xy"
    assert [d.outputs[0].text for d in front_end.seen] == ["x", "y"]
    assert front_end.stream.finished
    assert front_end.ended == ["0"]


def test_the_tap_comes_first():
    front_end = FrontEnd()
    texts = []
    front_end.tap.on(RequestOutput, lambda delta: texts.append(front_end.stream.text), strict=True)
    front_end.step("x")
    front_end.step("y", "length")

    assert texts == ["", "x"]


def test_an_abort_at_the_tap_comes_after_the_output_that_stands_there():
    front_end = FrontEnd()
    aborted = []

    def abort(delta):  # as somebody may at a closed gate
        if not aborted:
            aborted.append(delta)
            assert front_end.processor.abort_requests([front_end.child], 1) == ["0"]

    front_end.tap.on(RequestOutput, abort, strict=True)
    front_end.step("x")

    assert front_end.stream.finished
    assert front_end.stream.text == "x"
    assert front_end.stream.outputs[0].finish_reason == "abort"
    assert [d.finished for d in front_end.seen] == [False, True]
    assert front_end.ended == ["0"]


def test_an_abort_at_the_tap_of_the_last_output_changes_nothing():
    front_end = FrontEnd()
    front_end.tap.on(
        RequestOutput,
        lambda delta: front_end.processor.abort_requests([front_end.child], 1),
        strict=True,
    )
    front_end.step("x", "length")

    assert front_end.stream.outputs[0].finish_reason == "length"
    assert len(front_end.seen) == 1


def test_a_stop_string_ends_the_request_and_names_it():
    front_end = FrontEnd(stop="y")

    assert front_end.step("x") == []
    assert front_end.step("y") == ["0"]
    assert front_end.step("z") == []  # on its way when the end was found
    assert front_end.stream.outputs[0].stop_reason == "y"


def test_outputs_of_unknown_requests_are_dropped():
    front_end = FrontEnd()
    output = EngineCoreOutput("1", (97,))

    assert front_end.processor.process(EngineCoreOutputs(step=1, outputs=(output,))) == []
    assert front_end.seen == []
    assert front_end.processor.text_of("1") == ""
