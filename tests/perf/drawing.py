"""Charts as SVG: panels in a grid, a line for each series, a bar from the lowest round to the highest."""

import math
from html import escape

from harness import median

WIDTH, HEIGHT, PER_ROW = 330, 230, 3
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 30, 36
HEAD, LEGEND_LINE = 56, 18


class Drawing:
    """SVG elements, one after the other."""

    def __init__(self, width, height):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="system-ui, sans-serif" font-size="11" fill="#30343b">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
        ]

    def text(self, x, y, text, anchor="start", size=11, weight="normal", colour="#30343b"):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" fill="{colour}">{escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, colour="#d9dce1", width=1):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>')

    def path(self, points, colour, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')

    def dot(self, x, y, colour):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.8" fill="{colour}"/>')

    def __str__(self):
        return "\n".join([*self.parts, "</svg>", ""])


def steps(top):
    """Round values from 0 to at least `top`, five or so."""
    rough = (top or 1) / 4
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    return [step * index for index in range(math.ceil((top or 1) / step) + 1)]


def label(value):
    return f"{value:.6g}"


class Axis:
    """Vertical positions of values: linear, or logarithmic from `floor` up."""

    def __init__(self, values, top, bottom, floor=None):
        self.top, self.bottom, self.floor = top, bottom, floor
        highest = max(values, default=1) or 1
        if floor is None:
            self.marks = steps(highest)
        else:
            low, high = math.log10(floor), math.ceil(math.log10(max(highest, floor * 10)))
            self.marks = [10**power for power in range(round(low), high + 1)]

    def place(self, value):
        if self.floor is None:
            share = value / self.marks[-1]
        else:
            low, high = math.log10(self.floor), math.log10(self.marks[-1])
            share = (math.log10(max(value, self.floor)) - low) / (high - low)
        return self.bottom - share * (self.bottom - self.top)


def frame(drawing, x, y, title, series, floor):
    """The left, right and lower edge, and the vertical axis of these series with its lines."""
    top, bottom = y + TOP, y + HEIGHT - BOTTOM
    left, right = x + LEFT, x + WIDTH - RIGHT
    everything = [value for *_, points in series.values() for values in points.values() for value in values]
    axis = Axis(everything, top, bottom, floor)
    drawing.text(left, y + 18, title, size=12, weight="600")
    for mark in axis.marks:
        at = axis.place(mark)
        drawing.line(left, at, right, at)
        name = label(mark) if floor is None or mark > floor else f"≤ {label(mark)}"
        drawing.text(left - 6, at + 4, name, "end", size=10)
    return left, right, bottom, axis


def timeline(drawing, x, y, title, marks, series, floor=None):
    """`series` is {name: (colour, dashed, {second: [values]})}; `marks` are the seconds that are named, from 0 to the last."""
    left, right, bottom, axis = frame(drawing, x, y, title, series, floor)
    for mark in marks:
        drawing.text(left + mark / marks[-1] * (right - left), bottom + 16, f"{label(mark)} s", "middle", size=10)
    for colour, dashed, points in series.values():
        line = [(left + second / marks[-1] * (right - left), axis.place(median(values))) for second, values in sorted(points.items())]
        drawing.path(line, colour, dashed)


def panel(drawing, x, y, title, places, series, floor=None):
    """`series` is {name: (colour, dashed, {place: [values]})}; `places` are the names along the bottom, in order."""
    left, right, bottom, axis = frame(drawing, x, y, title, series, floor)
    across = {place: left + (index + 0.5) * (right - left) / len(places) for index, place in enumerate(places)}
    for place, at in across.items():
        drawing.text(at, bottom + 16, place, "middle", size=10)
    for index, (colour, dashed, points) in enumerate(series.values()):
        # Beside each other, so that equal ones are seen.
        aside = (index - (len(series) - 1) / 2) * 3
        middles = [(across[place] + aside, axis.place(median(points[place]))) for place in places if points.get(place)]
        drawing.path(middles, colour, dashed)
        for place in places:
            if values := points.get(place):
                at = across[place] + aside
                drawing.line(at, axis.place(min(values)), at, axis.place(max(values)), colour)
                drawing.dot(at, axis.place(median(values)), colour)


def legend_places(legend, width):
    """Where the entries of a legend begin: beside each other, in as many lines as they need."""
    places, x, y = [], 14, 42
    for name, _ in legend:
        step = 38 + 7 * len(name)
        if x + step > width and x > 14:
            x, y = 14, y + LEGEND_LINE
        places.append((x, y))
        x += step
    return places


def chart(title, below, panels, legend, floor=None, draw=panel):
    """Panels, each made by `draw`, in a grid under a title and a legend."""
    rows = math.ceil(len(panels) / PER_ROW)
    columns = min(PER_ROW, len(panels))
    width = max(columns, 2) * WIDTH + 20
    places = legend_places(legend, width)
    head = HEAD + (max((y for _, y in places), default=42) - 42)
    drawing = Drawing(width, head + rows * HEIGHT + 24)
    drawing.text(14, 24, title, size=15, weight="600")
    for (name, colour), (x, y) in zip(legend, places, strict=True):
        drawing.line(x, y, x + 18, y, colour, 2.5)
        drawing.text(x + 23, y + 4, name)
    for index, (name, across, series) in enumerate(panels):
        draw(drawing, 6 + index % PER_ROW * WIDTH, head + index // PER_ROW * HEIGHT, name, across, series, floor)
    drawing.text(14, head + rows * HEIGHT + 12, below, size=10, colour="#6b7078")
    return str(drawing)
