"""What is left of a view where there is no kernel: nbconvert's page and a sanitiser's output."""

from __future__ import annotations

import html
import html.parser
import re
import shutil
from collections.abc import Iterator
from typing import Any

import nbformat
import pytest
from lmscope_widgets.dashboard import VIEWS
from lmscope_widgets.step_log import StepBar
from lmscope_widgets.still import still

MOST_BYTES = 50_000
WIDGET = "application/vnd.jupyter.widget-view+json"
STEPS = [StepBar(step=i, decode=3, prefill=20 * (i % 5 == 0), used=i, kept=2) for i in range(1, 41)]
HOSTILE = "</td></table><script>steal()</script><img src=x onerror=steal()>&lt;\u202egnp\x1b"

# What GitHub's published sanitiser (html-pipeline) keeps. Style, script, svg, ids, classes and
# event handlers are not among it. A picture of a notebook may be a data URL there.
TAGS = frozenset(
    [
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "br",
        "b",
        "i",
        "strong",
        "em",
        "a",
        "pre",
        "code",
        "img",
        "tt",
        "div",
        "ins",
        "del",
        "sup",
        "sub",
        "p",
        "picture",
        "ol",
        "ul",
        "table",
        "thead",
        "tbody",
        "tfoot",
        "blockquote",
        "dl",
        "dt",
        "dd",
        "kbd",
        "q",
        "samp",
        "var",
        "hr",
        "ruby",
        "rt",
        "rp",
        "li",
        "tr",
        "td",
        "th",
        "s",
        "strike",
        "summary",
        "details",
        "caption",
        "figure",
        "figcaption",
        "abbr",
        "bdo",
        "cite",
        "dfn",
        "mark",
        "small",
        "source",
        "span",
        "time",
        "wbr",
    ]
)
DROPPED_WITH_TEXT = frozenset(("script", "style"))
ATTRIBUTES = frozenset(
    [
        "abbr",
        "accept",
        "align",
        "alt",
        "axis",
        "border",
        "cellpadding",
        "cellspacing",
        "char",
        "charoff",
        "charset",
        "clear",
        "cols",
        "colspan",
        "compact",
        "coords",
        "datetime",
        "dir",
        "disabled",
        "headers",
        "height",
        "hreflang",
        "hspace",
        "label",
        "lang",
        "maxlength",
        "media",
        "method",
        "multiple",
        "name",
        "nohref",
        "noshade",
        "nowrap",
        "open",
        "prompt",
        "readonly",
        "rel",
        "rev",
        "role",
        "rows",
        "rowspan",
        "rules",
        "scope",
        "selected",
        "shape",
        "size",
        "span",
        "start",
        "summary",
        "tabindex",
        "title",
        "type",
        "usemap",
        "valign",
        "value",
        "width",
        "itemprop",
        "src",
        "href",
    ]
)
VOID = frozenset(("br", "hr", "img", "source", "wbr"))


class Sanitiser(html.parser.HTMLParser):
    """Keeps the elements and attributes of the list, and the text of all others."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    @property
    def kept(self) -> str:
        return "".join(self._parts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in DROPPED_WITH_TEXT:
            self._inside.append(tag)
        if tag not in TAGS:
            return
        kept = [
            f' {name}="{html.escape(value or "")}"'
            for name, value in attrs
            if name in ATTRIBUTES
            and (name not in ("src", "href") or re.match("https?:|data:image/png;", value or ""))
        ]
        self._parts.append(f"<{tag}{''.join(kept)}>")

    def handle_endtag(self, tag: str) -> None:
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()
        if tag in TAGS and tag not in VOID:
            self._parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self._parts.append(html.escape(data))


def test_the_sanitiser_is_as_strict_as_it_is_said_to_be() -> None:
    kept = Sanitiser(
        '<style>p{color:red}</style><svg><text>words</text></svg><p style="x" id="a" class="b" '
        'onclick="c()">seen</p><script>d()</script><img src="javascript:e()" alt="f">'
        '<img src="data:image/svg+xml;base64,x"><iframe src="https://example.org"></iframe>'
    ).kept

    assert kept == 'words<p>seen</p><img alt="f"><img>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


def pools(make_frame: Any, make_row: Any) -> dict[str, tuple[Any, Any]]:
    rows = [make_row(0, prompt_text=HOSTILE, text=HOSTILE * 100), make_row(1)]
    nodes = [[0, -1, 0, 2, HOSTILE, ["r0", "r1"]], [1, 0, 2, 1, "tutor", [], "r1"]]
    extra = {
        "tree": {"nodes": nodes},
        "where": "Step 40, SchedulerOutput. 4 requests are scheduled.",
        "struct": {"kind": "SchedulerOutput", "fields": [["step", 40], ["text", HOSTILE]]},
    }
    return {
        "small": make_frame(rows=rows, **extra),
        "a million blocks": make_frame(num_blocks=1_000_000, has_cells=False, **extra),
    }


def bundles(make_frame: Any, make_row: Any) -> dict[tuple[str, str], dict[str, str]]:
    """An output of each view alone and of all, of a small pool and of a large one."""
    return {
        (size, view or "all"): still(*frame, STEPS, HOSTILE, (view,) if view else None)
        for size, frame in pools(make_frame, make_row).items()
        for view in ("", *VIEWS)
    }


def check_page(page: Any, name: object) -> None:
    """One picture that the browser could read, numbers in a table, and no script of a model."""
    image = page.locator('img[src^="data:image/png"]')
    assert image.count() == 1, name
    # Decoding ends after the load event where the page is short.
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") >= 800, name
    assert image.evaluate("image => image.naturalHeight") >= 60, name
    assert "blocks used" in image.get_attribute("alt"), name
    table = page.locator("table").first
    assert re.search(r"\d", table.inner_text()), name
    assert page.evaluate("() => window.stolen") is None, name
    assert page.locator("img[onerror]").count() == 0, name


def test_each_output_is_small(make_frame: Any, make_row: Any) -> None:
    for name, bundle in bundles(make_frame, make_row).items():
        assert sum(len(text.encode()) for text in bundle.values()) < MOST_BYTES, name


@pytest.mark.browser
def test_a_sanitiser_that_drops_style_script_and_svg_leaves_picture_and_numbers(
    browser: Any, make_frame: Any, make_row: Any
) -> None:
    page = browser.new_page()
    page.add_init_script("window.steal = () => { window.stolen = true; }")
    for name, bundle in bundles(make_frame, make_row).items():
        page.goto("about:blank")
        page.set_content(Sanitiser(bundle["text/html"]).kept)
        check_page(page, name)
    page.close()


@pytest.mark.browser
def test_nbconvert_leaves_picture_and_numbers(browser: Any, make_frame: Any, make_row: Any) -> None:
    exporter = pytest.importorskip("nbconvert").HTMLExporter()
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.add_init_script("window.steal = () => { window.stolen = true; }")
    for name, bundle in bundles(make_frame, make_row).items():
        view = {"model_id": "0", "version_major": 2, "version_minor": 1}
        output = nbformat.v4.new_output("display_data", data={WIDGET: view, **bundle})
        cell = nbformat.v4.new_code_cell("lmscope.watch(llm)", outputs=[output])
        made, _ = exporter.from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
        page.set_content(made, wait_until="domcontentloaded")
        check_page(page, name)
    context.close()


def test_a_narrowed_output_has_what_its_view_shows_and_nothing_else(
    make_frame: Any, make_row: Any
) -> None:
    frame, columns = pools(make_frame, make_row)["small"]
    texts = {view: still(frame, columns, STEPS, "", (view,))["text/html"] for view in VIEWS}

    assert {view for view, text in texts.items() if "decode: 1 token" in text} == {"requests"}
    assert {view for view, text in texts.items() if "Glass is a solid." in text} == {"tokens"}
    assert {view for view, text in texts.items() if "read by" in text} == {"tree"}
    assert {view for view, text in texts.items() if "4 requests are sched" in text} == {"debugger"}
    sizes = {view: len(text) for view, text in texts.items()}
    assert sizes["blocks"] > sizes["timeline"] > sizes["requests"]
