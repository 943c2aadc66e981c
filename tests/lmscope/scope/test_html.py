"""The page: one file that holds a run, fetches nothing and obeys no text in it."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser

import pytest

from lmscope.errors import LmscopeError
from lmscope.scope import html
from lmscope.scope.html import page_frames
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.recording import record
from lmscope.scope.visible import escape

HOSTILE = "</script><script>alert(1)</script><img src=http://evil.example/x onerror=alert(2)>"


class Page(HTMLParser):
    """Elements of a page with their attributes, and the text of each script, style and table."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts, self._open = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.elements.append((tag, attributes))
        self._open.append(attributes.get("id", tag))

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]] = self.texts.get(self._open[-1], "") + data

    def tags(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]

    @property
    def data(self):
        return json.loads(zlib.decompress(base64.b64decode(self.texts["lmscope-data"])))


@pytest.fixture
def bundles(monkeypatch):
    """Stand-ins for the built script and style."""
    texts = {"page.js": "/* script */ const a = '</script>', b = '<!-- x';", "dashboard.css": "b{}"}
    monkeypatch.setattr(html, "_bundle", texts.__getitem__)


def run(engine, prompt="abcabc", count=4):
    for _ in range(count):
        engine.add(prompt, max_tokens=6)
        engine.step()
    engine.run()


@pytest.fixture
def page(tiny_engine, tmp_path, bundles):
    engine = tiny_engine()
    with record(engine) as recording:
        run(engine, HOSTILE[:40])
    path = tmp_path / "page.html"
    recording.to_html(path)
    return recording, path.read_text("utf-8"), Page(path.read_text("utf-8"))


def test_it_forbids_the_network_and_names_nothing_to_fetch(page):
    _, text, parsed = page
    (policy,) = [m["content"] for m in parsed.tags("meta") if "http-equiv" in m]

    assert policy == (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    )
    assert parsed.tags("link") == parsed.tags("img") == parsed.tags("iframe") == []
    assert all("src" not in script for script in parsed.tags("script"))
    assert "http" not in text.replace("http-equiv", "")


def test_hostile_text_is_data_and_words(page):
    _, text, parsed = page

    assert len(parsed.tags("script")) == 2
    assert HOSTILE[:40] not in text
    assert escape(HOSTILE[:40]) in text
    assert any(
        HOSTILE[:40] == row["prompt_text"] for f in parsed.data["frames"] for row in f["rows"]
    )


def test_the_bundles_cannot_end_their_element(page):
    _, text, _ = page

    assert text.count("</script>") == 2
    assert r"'\x3C/script>'" in text
    assert "<!-- x" not in text


def test_it_has_a_title_a_root_and_a_table_without_scripts(page):
    _, text, parsed = page

    assert parsed.texts["title"].strip() == "lmscope: tiny, 4 requests"
    assert any(attributes.get("id") == "lmscope" for attributes in parsed.tags("div"))
    inside = text[text.index("<noscript>") : text.index("</noscript>")]
    assert inside.count("<tr>") == 5
    assert "reached max_tokens 6" in inside


def test_a_long_run_has_one_frame_per_step_and_the_first_is_full(tiny_engine, monkeypatch):
    monkeypatch.setattr(html, "_MOST_DETAILED_STEPS", 100)
    engine = tiny_engine(num_blocks=100, block_size=16)
    with record(engine) as recording:
        for _ in range(15):
            engine.add("abcabc", max_tokens=12)
            for _ in range(10):
                engine.step()
    frames = list(page_frames(recording))

    assert [f["step"] for f in frames] == list(recording.steps)
    assert [f["seq"] for f in frames] == list(range(151))
    assert [f["seq"] for f in frames if f["k"] == "full"] == [0]
    assert {f["phase"] for f in frames} == {"replay"}
    # each is the picture after the step's last struct
    for frame in frames[::17]:
        view = recording.at(step=frame["step"])
        full = PictureEncoder(view).full("replay").to_page()
        assert frame["stat"] == full["stat"]
        assert frame["boundary"] == view.boundary


def test_a_short_run_stops_at_each_kind_of_struct(page):
    recording, _, parsed = page
    frames = parsed.data["frames"]

    # requests enter after a step, and carry its number
    stops = [(f["step"], f["at"] or 5) for f in frames]
    assert stops == sorted(set(stops))
    assert {at for _, at in stops} == {1, 2, 3, 4, 5}
    assert [f["struct"]["kind"] for f in frames if f["step"] == 3 and "struct" in f] == [
        "SchedulerOutput", "ModelRunnerOutput", "EngineCoreOutputs", "RequestOutput",
        "EngineCoreRequest",
    ]  # fmt: skip
    assert frames[-1]["step"] == recording.steps[-1]


def test_the_data_is_what_the_frames_are(page):
    recording, _, parsed = page

    assert parsed.data["v"] == 1
    assert parsed.data["frames"] == json.loads(json.dumps(list(page_frames(recording))))


def test_a_missing_bundle_says_what_to_do(tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(html.resources, "files", lambda name: tmp_path)
    with record(tiny_engine()) as recording:
        pass
    with pytest.raises(LmscopeError, match=r"static/page.js is missing; reinstall lmscope"):
        recording.to_html(tmp_path / "page.html")

    assert list(tmp_path.iterdir()) == []


def test_an_empty_recording_makes_a_page(tiny_engine, tmp_path, bundles):
    with record(tiny_engine()) as recording:
        pass
    recording.to_html(tmp_path / "page.html")

    assert len(Page((tmp_path / "page.html").read_text()).data["frames"]) == 1


def test_a_thousand_steps_of_32_requests_stay_below_a_megabyte_and_a_half(tiny_engine, tmp_path):
    engine = tiny_engine(
        num_blocks=2048, block_size=16, max_num_seqs=32, budget=256, vocabulary=26, seed=2
    )
    system = "You are a patient tutor. Answer in one short sentence. "
    with record(engine) as recording:
        for number in range(32):
            engine.add(system + f"Question {number}: why?", max_tokens=960)
        for _ in range(1000):
            engine.step()
    recording.to_html(tmp_path / "run.html")

    view = recording.at()
    assert view.step == 1000
    assert view.totals.output_tokens == 32 * 960
    # The whole file, with the script and the style of the views.
    assert (tmp_path / "run.html").stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<b>&\"'", "&lt;b&gt;&amp;&quot;&#x27;"),
        ("a\u202eb", "a&lt;U+202E&gt;b"),
        ("a\x00\x1b[31m", "a&lt;0x00&gt;&lt;0x1B&gt;[31m"),
        ("zero\u200bwidth", "zero&lt;U+200B&gt;width"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("naïve 🌶 日本", "naïve 🌶 日本"),
        ("half \ud800", "half &lt;U+D800&gt;"),
    ],
)
def test_escape_shows_what_would_hide(text, expected):
    assert escape(text) == expected
