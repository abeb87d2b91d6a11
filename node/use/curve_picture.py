"""The curve of a run's evaluations as a picture (SVG 1.1) for the model's card."""

from collections.abc import Callable, Sequence

from farflock.node.train.evaluation_curve import EvaluatedPoint

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 24, 40  # margins
INK, LINE = "#444444", "#1f77b4"


def curve_picture(points: Sequence[EvaluatedPoint]) -> bytes:
    """Return the loss over the run's tokens, with a band of one standard error each way; at least
    one point is needed."""
    low = min(point.loss - point.standard_error for point in points)
    high = max(point.loss + point.standard_error for point in points)
    last = max(point.tokens for point in points)
    x_of, y_of = _scale(0, last, LEFT, WIDTH - RIGHT), _scale(low, high, HEIGHT - BOTTOM, TOP)

    def path(sign: int, ordered: Sequence[EvaluatedPoint]) -> str:
        places = (
            (x_of(each.tokens), y_of(each.loss + sign * each.standard_error)) for each in ordered
        )
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<path d="M{LEFT},{TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>',
        f'<polygon points="{path(1, points)} {path(-1, points[::-1])}" fill="{LINE}" '
        'fill-opacity="0.2"/>',
        f'<polyline points="{path(0, points)}" fill="none" stroke="{LINE}" stroke-width="2"/>',
        *(
            f'<circle cx="{x_of(each.tokens):.1f}" cy="{y_of(each.loss):.1f}" r="2" fill="{LINE}"/>'
            for each in points
        ),
        _text(LEFT - 6, y_of(high) + 4, f"{high:.3f}", "end"),
        _text(LEFT - 6, y_of(low) + 4, f"{low:.3f}", "end"),
        _text(LEFT, bottom + 16, "0", "middle"),
        _text(right, bottom + 16, f"{last:,}", "end"),
        _text((LEFT + right) / 2, HEIGHT - 8, "tokens", "middle"),
        _text(LEFT, TOP - 8, "held-out loss, nats a token", "start"),
        "</svg>",
    ]
    return "\n".join(elements).encode() + b"\n"


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """Return the map of `low` to `first` and `high` to `last`; of one value, to the middle."""
    if high <= low:
        return lambda value: (first + last) / 2
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}">{words}</text>'
