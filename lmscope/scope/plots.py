"""Plots: figures over the data frames of a recording.

    recording.plot.timeline()

Each is a plain `plotly.graph_objects.Figure`, which every notebook shows without a widget and
`write_html` puts into a file. Whatever a model or a user wrote is shown as it is: markup in it
is not obeyed.
"""

from __future__ import annotations

import html
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from lmscope.scope.phases import KINDS, Lane, lanes
from lmscope.scope.visible import visible

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from lmscope.scope.recording import Recording

__all__ = ["Plots", "hover_text"]

_MOST_TEXT = 80
# Lanes beyond these would be thinner than a line.
_MOST_LANES = 60
_WIDTHS = {"waiting": 0.25, "preempted": 0.12}


class Plots:
    """The figures of one recording; each is made anew from what is recorded by then."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def timeline(self) -> go.Figure:
        """Per step how the token budget was spent, and below it a lane for each request.

        Tokens that came from the cache hang below the line: they cost nothing.
        """
        from plotly.subplots import make_subplots

        steps = self._recording.frames.steps
        made = lanes(self._recording.snapshot, self._recording.boundaries)
        shown = made[:_MOST_LANES]
        figure = make_subplots(
            rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.5, 0.5]
        )
        for kind in ("decode", "prefill", "recomputed"):
            self._bar(figure, steps, f"{kind}_tokens", kind, _colour(kind), 1)
        self._bar(figure, steps, "cached_tokens", "from cache", _colour("cached"), -1)
        _preemptions(figure, steps)
        budget = self._recording.info.max_num_batched_tokens
        if len(steps) and int(steps["scheduled_tokens"].max()) * 4 >= budget:
            # Farther away it would press all bars to the ground.
            figure.add_hline(
                budget, line={"dash": "dash", "color": _ink("ink_soft"), "width": 1}, row=1, col=1
            )
        for kind in KINDS:
            _lane_bars(figure, shown, kind)
        note = "" if len(made) == len(shown) else f" ({len(shown)} of {len(made):,} requests)"
        figure.update_yaxes(title_text="tokens", row=1, col=1)
        figure.update_yaxes(
            autorange="reversed",
            tickvals=list(range(len(shown))),
            ticktext=[hover_text(lane.request_id) for lane in shown],
            row=2,
            col=1,
        )
        figure.update_xaxes(title_text="step", row=2, col=1)
        height = 300 + max(120, 18 * len(shown))
        _style(figure, f"Timeline{note}", height, barmode="relative")
        return figure

    def latency(self) -> go.Figure:
        """Per request the time it waited, the time to its first token, and the rest."""
        import plotly.graph_objects as go

        requests = self._recording.frames.requests
        waited = requests["waited_s"]
        prefill = requests["ttft_s"] - waited
        decode = requests["latency_s"] - requests["ttft_s"]
        about = _about(requests)
        figure = go.Figure()
        for name, values, colour in (
            ("waited", waited, _ink("line")),
            ("to the first token", prefill, _colour("prefill")),
            ("to the end", decode, _colour("decode")),
        ):
            figure.add_bar(
                name=name,
                y=list(range(len(requests))),
                x=values,
                orientation="h",
                marker_color=colour,
                customdata=about,
                hovertemplate="%{customdata}<br>" + name + ": %{x:.4g} s<extra></extra>",
            )
        figure.update_yaxes(
            autorange="reversed",
            tickvals=list(range(len(requests))),
            ticktext=[hover_text(name) for name in requests["request_id"]],
        )
        figure.update_xaxes(title_text="seconds since arrival")
        _style(figure, "Latency", 160 + 18 * max(4, min(len(requests), 60)), barmode="stack")
        return figure

    def blocks_over_time(self) -> go.Figure:
        """Blocks in use and blocks kept for reuse, over the time of the run."""
        import plotly.graph_objects as go

        steps = self._recording.frames.steps
        total = self._recording.info.num_blocks - 1
        figure = go.Figure()
        for name, column, colour in (
            ("used", "used_blocks", _colour("decode")),
            ("kept", "kept_blocks", _ink("line")),
        ):
            figure.add_scatter(
                name=name,
                x=steps["time_s"],
                y=steps[column],
                customdata=steps["step"],
                stackgroup="blocks",
                line={"shape": "hv", "width": 1, "color": colour},
                hovertemplate="step %{customdata}: %{y} " + name + "<extra></extra>",
            )
        evictions = steps[steps["evictions"] > 0]
        figure.add_scatter(
            name="evicted",
            x=evictions["time_s"],
            y=[total] * len(evictions),
            customdata=evictions[["step", "evictions"]],
            mode="markers",
            marker={"symbol": "line-ns-open", "size": 9, "color": _ink("trouble")},
            hovertemplate="step %{customdata[0]}: %{customdata[1]} evicted<extra></extra>",
        )
        figure.add_hline(total, line={"dash": "dash", "color": _ink("ink_soft"), "width": 1})
        figure.update_yaxes(title_text="blocks", rangemode="tozero")
        figure.update_xaxes(title_text="seconds")
        _style(figure, f"Blocks, of {total:,}", 360)
        return figure

    def hit_rate(self) -> go.Figure:
        """Per request the share of its prompt that came from the cache, and that of all so far."""
        import plotly.graph_objects as go

        requests = self._recording.frames.requests
        requests = requests[requests["first_scheduled_step"].notna()]
        requests = requests.sort_values("first_scheduled_s", kind="stable")
        prompt, cached = requests["prompt_tokens"], requests["cached_tokens"]
        place = list(range(len(requests)))
        figure = go.Figure()
        figure.add_bar(
            name="request",
            x=place,
            y=cached / prompt,
            marker_color=_colour("prefill"),
            customdata=[
                [about, hit, asked]
                for about, hit, asked in zip(_about(requests), cached, prompt, strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]} of %{customdata[2]} prompt tokens"
            "<extra></extra>",
        )
        figure.add_scatter(
            name="all so far",
            x=place,
            y=cached.cumsum() / prompt.cumsum(),
            mode="lines+markers",
            line={"color": _ink("ink"), "width": 2},
            hovertemplate="all so far: %{y:.0%}<extra></extra>",
        )
        figure.update_yaxes(title_text="share from cache", range=[0, 1], tickformat=".0%")
        figure.update_xaxes(
            title_text="request, in the order of admission",
            tickvals=place if len(place) <= 40 else None,
            ticktext=[hover_text(name) for name in requests["request_id"]]
            if len(place) <= 40
            else None,
        )
        _style(figure, "Prefix cache", 360)
        return figure

    def _bar(
        self, figure: Any, steps: pd.DataFrame, column: str, name: str, colour: str, sign: int
    ) -> None:
        marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
        if sign < 0:
            marker = {"color": "rgba(0,0,0,0)", "line": {"color": colour, "width": 1}}
        elif name == "recomputed":
            marker["pattern"] = {"shape": "/"}
        figure.add_bar(
            name=name,
            x=steps["step"],
            y=sign * steps[column],
            customdata=steps[[column, "step_s"]],
            marker=marker,
            hovertemplate="step %{x}: %{customdata[0]} " + name + "<extra></extra>",
            row=1,
            col=1,
        )


def hover_text(text: object, length: int = _MOST_TEXT) -> str:
    """Text as plotly shows it letter by letter: no tag, no entity and no formula in it acts."""
    plain = " ".join(visible(str(text)[: length + 1]).split())
    plain = plain if len(plain) <= length else plain[: length - 1] + "…"
    # plotly knows few entities by name, but all by number.
    return html.escape(plain, quote=False).replace("$", "&#36;")


def _about(requests: pd.DataFrame) -> list[str]:
    """Per request, what a hover says of it."""
    lines = []
    for row in requests.itertuples():
        prompt = row.prompt if isinstance(row.prompt, str) else f"{row.prompt_tokens} tokens"
        lines.append(f"<b>{hover_text(row.request_id)}</b><br>{hover_text(prompt)}")
    return lines


def _preemptions(figure: Any, steps: pd.DataFrame) -> None:
    with_some = steps[steps["preemptions"] > 0]
    figure.add_scatter(
        name="preemption",
        x=with_some["step"],
        y=with_some["scheduled_tokens"],
        customdata=with_some["preemptions"],
        mode="markers",
        marker={"symbol": "triangle-down", "size": 9, "color": _ink("trouble")},
        hovertemplate="step %{x}: %{customdata} preempted<extra></extra>",
        row=1,
        col=1,
    )


def _lane_bars(figure: Any, shown: list[Lane], kind: str) -> None:
    """The spans of one kind, in all lanes."""
    spans = [
        (place, lane, phase)
        for place, lane in enumerate(shown)
        for phase in lane.phases
        if phase.kind == kind and phase.last_step >= phase.first_step
    ]
    if not spans:
        return
    colour = _colour({"recompute": "recomputed"}.get(kind, kind))
    figure.add_bar(
        name=kind,
        y=[place for place, _, _ in spans],
        x=[phase.last_step - phase.first_step + 1 for _, _, phase in spans],
        base=[phase.first_step - 0.5 for _, _, phase in spans],
        customdata=[
            [hover_text(lane.request_id), phase.first_step, phase.last_step, phase.tokens]
            for _, lane, phase in spans
        ],
        orientation="h",
        width=_WIDTHS.get(kind, 0.7),
        marker={"color": colour, "pattern": {"shape": "/" if kind == "recompute" else ""}},
        # The upper half has entries for the others.
        showlegend=kind in _WIDTHS,
        hovertemplate="<b>%{customdata[0]}</b> " + kind + ": steps %{customdata[1]} to "
        "%{customdata[2]}, %{customdata[3]} tokens<extra></extra>",
        row=2,
        col=1,
    )


def _colour(kind: str) -> str:
    """The colour of a kind of work; what computes nothing is pale."""
    work = _palette()["work"]["light"]
    if kind == "waiting":
        return _ink("line")
    if kind == "preempted":
        return _ink("trouble")
    return str(work["recompute" if kind == "recomputed" else kind])


def _ink(name: str) -> str:
    return str(_palette()["light"][name])


@cache
def _palette() -> Any:
    text = resources.files("lmscope_widgets").joinpath("palette.json").read_text("utf-8")
    return json.loads(text)


def _style(figure: Any, title: str, height: int, **layout: Any) -> None:
    figure.update_layout(
        template="none",
        title={"text": title, "font": {"size": 14}, "x": 0.01, "xanchor": "left"},
        height=height,
        margin={"l": 64, "r": 16, "t": 48, "b": 48},
        font={"size": 12, "color": _ink("ink")},
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "y": 1.02, "x": 1, "xanchor": "right", "yanchor": "bottom"},
        **layout,
    )
    grid = {"gridcolor": _ink("line_soft"), "zerolinecolor": _ink("line"), "automargin": True}
    figure.update_xaxes(**{**grid, "showgrid": False, "zeroline": False})
    figure.update_yaxes(**grid)
