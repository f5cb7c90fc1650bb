"""Pictures of what happens inside: attention maps and the logit lens, drawn by matplotlib, and a
page to look at attention with."""

import html
import io
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .backend import to_numpy
from .encoder import Encoder
from .errors import PicogptError
from .generation import check_finite
from .tracing import logit_lens, trace

PICTURES, PAGES = (".png", ".svg", ".pdf"), (".html",)
MAX_LABELS = 60  # along an axis; of more tokens, only every second, third and so on is named
MAX_VIEW = 256  # tokens of a page, which holds all heads of all layers
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"  # two for a share
MAX_LENS = 120  # tokens, each with a cell wide enough for a word
BLANKS = str.maketrans({" ": "·", "\n": "⏎", "\t": "⇥"})
LENS_COLUMNS = 12  # tokens side by side; the others come below
COLORS = "Blues"  # light for little, also for the colour-blind
FONT = 7  # points
INCH_PER_LABEL = FONT / 72 * 1.25


def attention_plot(
    text: str | Iterable[int],
    encoder: Encoder,
    params: dict[str, Any],
    n_head: int,
    *,
    layer: int | None = None,
    head: int | str = "all",
) -> Any:
    """Draws where each token of a text looks, and how much.

    Args:
        text: at least one token, and no more than the window takes; or its ids.
        encoder, params: as `load` returns them.
        n_head: number of attention heads, `hparams["n_head"]`.
        layer: from 0; None: the last.
        head: from 0; "all" for a grid of them, "mean" for their average.

    Returns:
        A matplotlib figure, which notebooks show. Row i is how token i divides its attention among
        those up to itself; a row sums to 1.

    Raises:
        PicogptError: the text does not fit, there is no such layer or head, or matplotlib is not
            installed.

    >>> from picogpt import attention_plot, load
    >>> encoder, hparams, params = load("tales")
    >>> figure = attention_plot("Once upon a time", encoder, params, hparams["n_head"], layer=0)
    >>> [axes.get_title() for axes in figure.axes[:2]]
    ['layer 0, head 0', 'layer 0, head 1']
    """
    n_layer = len(params["blocks"])
    layer = n_layer - 1 if layer is None else layer
    if type(layer) is not int or not 0 <= layer < n_layer:
        raise PicogptError(f"layer: is {layer!r:.40}; expected 0 to {n_layer - 1}")
    if head not in ("all", "mean") and (type(head) is not int or not 0 <= head < n_head):
        raise PicogptError(f"head: is {head!r:.40}; expected 0 to {n_head - 1}, all or mean")
    ids = encoder.encode(text) if isinstance(text, str) else list(text)
    (traced,) = trace(ids, params, n_head, keep=f"h{layer}.attn.weights").values()
    weights = check_finite(to_numpy(traced))
    if head == "all":
        maps = {f"head {i}": weights[i] for i in range(n_head)}
    elif head == "mean":
        maps = {f"mean of {n_head} heads": weights.mean(0)}
    else:
        maps = {f"head {head}": weights[head]}
    figure = _figure()
    labels = _labels(encoder, ids)
    n_shown = min(len(ids), MAX_LABELS)
    side = max(1.6 if len(maps) > 1 else 3.2, n_shown * INCH_PER_LABEL)  # of a map, in inches
    n_rows, n_columns = _grid(len(maps))
    figure.set_size_inches((side + 0.15) * n_columns + 1.6, (side + 0.3) * n_rows + 1.2)
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True)
    future = np.triu(np.ones((len(ids), len(ids)), bool), 1)
    shown = range(0, len(ids), math.ceil(len(ids) / MAX_LABELS))
    named = {"labels": [_short(labels[i]) for i in shown], "fontsize": FONT, "parse_math": False}
    for axes, (name, map_) in zip(grid.flat, maps.items(), strict=False):
        image = axes.imshow(np.ma.masked_array(map_, future), cmap=COLORS, vmin=0, vmax=1)
        axes.set_facecolor("0.92")
        axes.set_title(f"layer {layer}, {name}", fontsize=FONT + 1, pad=3)
        axes.set_xticks(shown, **named, rotation=90)
        axes.set_yticks(shown, **named)
        axes.tick_params(length=2, pad=2)
    for i, axes in enumerate(grid.flat):
        axes.tick_params(labelbottom=i >= len(maps) - n_columns)  # where nothing is under it
        axes.set_visible(i < len(maps))
    figure.supxlabel("token looked at", fontsize=FONT + 1)
    figure.supylabel("token that looks", fontsize=FONT + 1)
    _add_bar(figure, image, grid, "share of its attention")
    return figure


def lens_plot(
    text: str | Iterable[int], encoder: Encoder, params: dict[str, Any], n_head: int
) -> Any:
    """Draws what each layer would say after each token of a text, by `logit_lens`.

    Args:
        text: at least one token, at most 120; or its ids.
        encoder, params, n_head: as for `attention_plot`.

    Returns:
        A matplotlib figure, which notebooks show: a column for each token, a row for each layer,
        the last on top.

    Raises:
        PicogptError: the text does not fit, or matplotlib is not installed.

    >>> from picogpt import lens_plot, load
    >>> encoder, hparams, params = load("tales")
    >>> figure = lens_plot("Once upon a time", encoder, params, hparams["n_head"])
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['Once', '·upon', '·a', '·time']
    """
    ids = encoder.encode(text) if isinstance(text, str) else list(text)
    if len(ids) > MAX_LENS:
        raise PicogptError(f"text is {len(ids)} tokens; the picture has room for {MAX_LENS}")
    best, likely = logit_lens(ids, params, n_head)
    figure = _figure()
    n_layer, labels = len(best) - 1, _labels(encoder, ids)
    starts = range(0, len(ids), LENS_COLUMNS)
    n_columns = min(len(ids), LENS_COLUMNS)
    figure.set_size_inches(0.8 * n_columns + 2.1, (0.26 * (n_layer + 1) + 0.4) * len(starts) + 0.7)
    grid = figure.subplots(len(starts), 1, squeeze=False)[:, 0]
    for axes, start in zip(grid, starts, strict=True):
        part = slice(start, start + LENS_COLUMNS)
        image = axes.imshow(likely[::-1, part], cmap=COLORS, vmin=0, vmax=1, aspect="auto")
        for row in range(n_layer + 1):
            layer = n_layer - row
            for column, label in enumerate(_labels(encoder, best[layer, part])):
                color = "white" if likely[layer, start + column] > 0.5 else "black"
                style = {"color": color, "fontsize": FONT, "ha": "center", "va": "center"}
                axes.text(column, row, _short(label), **style, parse_math=False)
        shown = [_short(label) for label in labels[part]]
        axes.set_xticks(range(len(shown)), shown, fontsize=FONT, parse_math=False)
        axes.set_xlim(-0.5, n_columns - 0.5)
        axes.set_frame_on(len(shown) == n_columns)
        names = [*(f"layer {i}" for i in reversed(range(n_layer))), "embedding"]
        axes.set_yticks(range(n_layer + 1), names, fontsize=FONT)
        axes.tick_params(length=2, pad=2)
    figure.supxlabel("token of the text, and above it what would follow", fontsize=FONT + 1)
    _add_bar(figure, image, grid, "probability")
    return figure


class AttentionView(str):
    """A page of HTML that needs nothing else; notebooks show it in a frame.

    >>> from picogpt import AttentionView
    >>> AttentionView("<p>small")._repr_html_()
    '<iframe srcdoc="&lt;p&gt;small" style="width: 100%; height: 40rem; border: 0"></iframe>'
    """

    __slots__ = ()

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 40rem; border: 0"
        return f'<iframe srcdoc="{html.escape(str(self))}" style="{style}"></iframe>'


def attention_view(
    text: str | Iterable[int], encoder: Encoder, params: dict[str, Any], n_head: int
) -> AttentionView:
    """Makes a page on which to see where each token looks, in all heads of all layers.

    Args:
        text: at least one token, at most 256; or its ids.
        encoder, params, n_head: as for `attention_plot`.

    Returns:
        The page, a string, which notebooks show. It asks nothing of the network. Shares are rounded
        to a 4,095th: for `tales`, 100 tokens make half a megabyte.

    Raises:
        PicogptError: the text does not fit.

    >>> from pathlib import Path
    >>> from picogpt import attention_view, load
    >>> encoder, hparams, params = load("tales")
    >>> page = attention_view("Once upon a time", encoder, params, hparams["n_head"])
    >>> Path("attention.html").write_text(page, encoding="utf-8") > 5000  # characters
    True
    """
    ids = encoder.encode(text) if isinstance(text, str) else list(text)
    if len(ids) > MAX_VIEW:
        raise PicogptError(f"text is {len(ids)} tokens; the page has room for {MAX_VIEW}")
    maps = trace(ids, params, n_head, keep="*.attn.weights").values()
    weights = check_finite(np.stack([to_numpy(map_) for map_ in maps]))
    i, j = np.tril_indices(len(ids))
    shares = np.rint(4095 * weights[:, :, i, j]).astype(int).ravel()
    digits = np.frombuffer(DIGITS.encode(), np.uint8)[np.stack([shares // 64, shares % 64], 1)]
    data = {
        "tokens": [_visible(encoder.token_bytes(int(token))) for token in ids],
        "n_layer": len(weights),
        "n_head": n_head,
        "shares": digits.tobytes().decode(),
    }
    from importlib import resources

    page = resources.files("picogpt").joinpath("attention.html").read_text(encoding="utf-8")
    # No tag may begin in the data: a script ends at the first `</script`, wherever it stands.
    return AttentionView(page.replace("{{DATA}}", json.dumps(data).replace("<", "\\u003c")))


def save_picture(figure: Any, path: str | Path) -> None:
    """Writes a figure to a .png, .svg or .pdf, or a page to an .html, all of it or nothing.

    Raises:
        PicogptError: the name ends in something else, or the file cannot be written.
    """
    path = check_picture(path, PAGES if isinstance(figure, AttentionView) else PICTURES)
    if isinstance(figure, AttentionView):
        data = io.BytesIO(figure.encode())
    else:
        from matplotlib import rc_context

        data = io.BytesIO()
        when = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[path.suffix[1:]]
        with rc_context({"svg.hashsalt": "picogpt"}):  # the same file each time
            figure.savefig(data, format=path.suffix[1:], metadata=when)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_bytes(data.getvalue())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PicogptError(f"{path}: {error.strerror}; the picture is not written") from None


def check_picture(path: str | Path, kinds: tuple[str, ...] = PICTURES) -> Path:
    """Returns a path that a picture, or a page, can be written to.

    Raises:
        PicogptError: its name ends in none of these kinds, or its folder does not exist.
    """
    path = Path(path)
    if path.suffix not in kinds:
        expected = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        raise PicogptError(f"{path}: ends in {path.suffix!r}; expected {expected}")
    if not path.parent.is_dir():
        raise PicogptError(f"{path.parent}: no such folder; expected one for {path.name}")
    return path


def _grid(n: int) -> tuple[int, int]:
    """Rows and columns for n maps: no place empty if that is nearly square, else as good as one."""
    least = math.ceil(math.sqrt(n))
    n_columns = next((k for k in range(least, 2 * least + 1) if n % k == 0), least)
    return math.ceil(n / n_columns), n_columns


def _short(label: str) -> str:
    return label if len(label) <= 11 else f"{label[:10]}…"


def _add_bar(figure: Any, image: Any, grid: Any, name: str) -> None:
    bar = figure.colorbar(image, ax=grid, shrink=0.7, aspect=30)
    bar.set_label(name, fontsize=FONT + 1)
    bar.ax.tick_params(labelsize=FONT)


def _figure() -> Any:
    """An empty figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PicogptError('matplotlib: is not installed; run "pip install matplotlib"') from None
    figure = Figure(dpi=150, layout="constrained")

    def png() -> bytes:
        data = io.BytesIO()
        figure.savefig(data, format="png")
        return data.getvalue()

    figure._repr_png_ = png  # type: ignore[attr-defined]  # which notebooks ask for
    return figure


def _labels(encoder: Encoder, ids: Iterable[int]) -> list[str]:
    """Tokens as they can be drawn: blanks made visible, and escapes for what the font lacks."""
    from matplotlib.font_manager import findfont, get_font

    has = get_font(findfont("DejaVu Sans")).get_char_index
    pieces = (_visible(encoder.token_bytes(int(token))) for token in ids)
    return ["".join(c if has(ord(c)) else ascii(c)[1:-1] for c in piece) for piece in pieces]


def _visible(piece: bytes) -> str:
    """A token with its blanks visible, and escapes for what is not text."""
    characters = piece.decode("utf-8", "backslashreplace").translate(BLANKS)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in characters)
