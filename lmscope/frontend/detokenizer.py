"""From token ids to text while they arrive, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence

from lmscope.boundary import EngineCoreRequest
from lmscope.frontend.tokenizer import REPLACEMENT, TokenizerAdapter

__all__ = ["IncrementalDetokenizer", "TextStream", "check_stop_strings"]

# How much of a prompt's end is decoded to give its continuation a context, in tokens.
_SHORTEST_TAIL = 4
_LONGEST_TAIL = 23
# A character has at most four bytes, so at most three tokens wait for its last one.
_MAX_CUT_TOKENS = 3


class IncrementalDetokenizer:
    """The text of one request's output so far, cut at a stop string.

    This class keeps token ids only: no tokenizer, or `detokenize=False`. `for_request`
    picks the one that is needed.

    output_token_ids   all of them, also those whose text is cut off or left out
    output_text        whole characters only; may hold the beginning of a stop string
    """

    def __init__(self) -> None:
        self.output_token_ids: list[int] = []
        self.output_text = ""

    @staticmethod
    def for_request(
        tokenizer: TokenizerAdapter | None, request: EngineCoreRequest
    ) -> IncrementalDetokenizer:
        """A detokenizer for a request that has just entered."""
        if tokenizer is None or not request.sampling_params.detokenize:
            return IncrementalDetokenizer()
        return _TextDetokenizer(tokenizer, request)

    def update(
        self, new_token_ids: Sequence[int], stop_terminated: bool, finished: bool = False
    ) -> str | None:
        """Take one step's tokens in; the stop string that ends the text, or None.

        stop_terminated   the last token is an EOS or a stop token
        finished          these are the request's last tokens
        """
        self.output_token_ids += new_token_ids
        return None

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text for the user: all of it, or with `delta` what the last delta left.

        Unless `finished`, as many characters are held back as could begin a stop string.
        """
        return ""


class _TextDetokenizer(IncrementalDetokenizer):
    """With text, and a search for stop strings in what is new."""

    def __init__(self, tokenizer: TokenizerAdapter, request: EngineCoreRequest) -> None:
        super().__init__()
        params = request.sampling_params
        self._stream = TextStream(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_held_back = 0
        if self._stop and not self._include_stop:
            self._num_held_back = max(map(len, self._stop)) - 1
        # characters of output_text that deltas have delivered
        self._num_delivered = 0
        self._is_complete = False

    def update(
        self, new_token_ids: Sequence[int], stop_terminated: bool, finished: bool = False
    ) -> str | None:
        if not new_token_ids:
            return None
        shown = new_token_ids
        if stop_terminated and not self._include_stop:
            # Left out of the text; still one of the ids.
            shown = new_token_ids[:-1]

        num_searched = len(self.output_text)
        for token_id in shown:
            self.output_token_ids.append(token_id)
            self.output_text += self._stream.step(token_id)
            if len(self.output_token_ids) <= self._min_tokens:
                # What ends within min_tokens does not count, now or later.
                num_searched = len(self.output_text)
        self.output_token_ids += new_token_ids[len(shown) :]
        if finished:
            self._complete()
        return self._cut_at_stop_string(len(self.output_text) - num_searched)

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        if finished and not self._is_complete:
            # An abort comes without tokens, so without an update.
            num_searched = len(self.output_text)
            self._complete()
            self._cut_at_stop_string(len(self.output_text) - num_searched)
        end = len(self.output_text) - (0 if finished else self._num_held_back)
        if not delta:
            return self.output_text[: max(end, 0)]
        start = self._num_delivered
        if end <= start:
            return ""
        self._num_delivered = end
        return self.output_text[start:end]

    def _complete(self) -> None:
        """Add the whole characters of a last token that also begins another one."""
        self._is_complete = True
        # A text of nothing else stays empty, as in vLLM.
        if self.output_text:
            self.output_text += self._stream.flush()

    def _cut_at_stop_string(self, num_new_characters: int) -> str | None:
        if not self._stop or len(self.output_token_ids) <= self._min_tokens:
            return None
        found = check_stop_strings(
            self.output_text, num_new_characters, self._stop, self._include_stop
        )
        if found is None:
            return None
        stop, length = found
        self.output_text = self.output_text[:length]
        self._is_complete = True
        return stop


def check_stop_strings(
    text: str, num_new_characters: int, stop: Sequence[str], include_in_output: bool
) -> tuple[str, int] | None:
    """The stop string that `text` contains and the number of characters to keep, or None.

    Only matches that end within the last `num_new_characters` count. The first of `stop`
    that matches wins, wherever another one may be.
    """
    if not num_new_characters:
        return None
    for string in stop:
        # The match may have begun in the old text.
        first = max(len(text) - num_new_characters - len(string) + 1, 0)
        index = text.find(string, first)
        if index >= 0:
            return string, index + (len(string) if include_in_output else 0)
    return None


class TextStream:
    """Decodes tokens one by one: each step gives the characters that became whole.

    A token's text depends on those before it (leading spaces, bytes of one character), so
    every step decodes the last few tokens with and without the new one and gives the
    difference. Tokens that end inside a character wait until it is whole.

    prompt_token_ids   what came before; its last tokens are the context of the first step

    The same as a DecodeStream of the tokenizers library, for any tokenizer; and unlike it,
    what waits can be asked for (`flush`) and told from what the prompt left.
    """

    def __init__(
        self,
        tokenizer: TokenizerAdapter,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._texts = tokenizer.token_texts[skip_special_tokens]
        self._is_byte_level = tokenizer.is_byte_level
        # Decoders may put a space before a special token; without skipping, callers can
        # ask for neighbouring ones as they are spelled.
        self._is_tight = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_was_added = False
        # Tokens of the last text given, and their text: the context of the next.
        self._context: list[int] = []
        self._context_text = ""
        # Tokens since then.
        self._waiting: list[int] = []
        # Text that waits but belongs to the prompt: whole characters, then cut ones.
        self._prompt_text = ""
        self._prime(prompt_token_ids)

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is not whole.

        Ids that no tokenizer has add nothing.
        """
        if not 0 <= token_id < 2**32:
            return ""
        text = self._decode_next(token_id)
        if self._is_tight:
            spelling = self._tokenizer.added_tokens.get(token_id)
            if spelling is not None and self._last_was_added:
                text = spelling
            self._last_was_added = spelling is not None
        return text

    def flush(self) -> str:
        """The whole characters among what still waits; cut ones are dropped."""
        new_text = self._waiting_text().rstrip(REPLACEMENT)
        self._waiting = []
        return self._without_prompt_text(new_text)

    def _prime(self, prompt_token_ids: Sequence[int]) -> None:
        for token_id in self._find_tail(prompt_token_ids):
            self._decode_next(token_id)
        self._prompt_text = self._waiting_text()

    def _find_tail(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """A short end of the prompt that begins at the beginning of a character.

        The last tokens may be part of a character that the output completes; what comes
        before them must decode cleanly. Bounded, so a prompt of broken bytes costs no more.
        """
        num_tokens = len(prompt_token_ids)
        for num_cut in range(min(_MAX_CUT_TOKENS, num_tokens) + 1):
            end = num_tokens - num_cut
            for length in range(min(_SHORTEST_TAIL, end), min(_LONGEST_TAIL, end) + 1):
                text = self._tokenizer.decode(prompt_token_ids[end - length : end])
                if REPLACEMENT not in text:
                    return prompt_token_ids[end - length :]
        return prompt_token_ids[-_LONGEST_TAIL:]

    def _decode_next(self, token_id: int) -> str:
        if self._is_byte_level and not self._waiting:
            text = self._texts[token_id]
            if text and REPLACEMENT not in text:
                # Whole characters behind whole characters: decoding both gives the same.
                self._context, self._context_text = [token_id], text
                return text
        self._waiting.append(token_id)
        text = self._decode(self._context + self._waiting)
        if len(text) <= len(self._context_text) or text.endswith(REPLACEMENT):
            return ""
        if not text.startswith(self._context_text):
            # Broken bytes can make a decoder rewrite text it has already given. That text
            # is with the user, so go on without it; what waits is lost.
            self._context, self._context_text, self._waiting = [], "", []
            self._prompt_text = ""
            return self._decode_next(token_id)
        new_text = text[len(self._context_text) :]
        self._context, self._waiting = self._waiting, []
        self._context_text = self._decode(self._context)
        return self._without_prompt_text(new_text)

    def _without_prompt_text(self, new_text: str) -> str:
        """`new_text` without what a prompt that ends inside a character left waiting."""
        if not self._prompt_text:
            return new_text
        whole = self._prompt_text.rstrip(REPLACEMENT)
        num_cut = len(self._prompt_text) - len(whole)
        self._prompt_text = ""
        new_text = new_text.removeprefix(whole)
        # None of them is there when the output has completed the character.
        num_left = len(new_text) - len(new_text.lstrip(REPLACEMENT))
        return new_text[min(num_cut, num_left) :]

    def _waiting_text(self) -> str:
        if not self._waiting:
            return ""
        return self._decode(self._context + self._waiting).removeprefix(self._context_text)

    def _decode(self, ids: list[int]) -> str:
        if len(ids) == 1:
            return self._texts[ids[0]]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
