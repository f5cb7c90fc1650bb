"""What is made of the figures: the tables of README.md and docs/speed.md, and the chart.

Results are what `run.py` writes as JSON: how they came about, and under "figures"
{table: {what: {who: [value, ...]}}}, each single measurement.
"""

import statistics
import textwrap

START, END = "<!-- benchmarks -->\n", "<!-- /benchmarks -->\n"
CHART = "docs/speed.svg"
CHARTED = {  # the tables, and those of their rows that the chart shows
    "generating, tokens/s": (
        "40 new tokens",
        "200 new tokens",
        "16 rows, 40 new tokens each",
        "a prompt of 1,024 tokens",
    ),
    "encoding, MB/s": ("English to ids, at first sight", "the same text again"),
}
BRIEF = CHARTED | {"starting, s": None}  # what the README shows; of the last one all rows
OWN, OTHERS, INK = "#c2410c", "#a8b1bd", "#1f2933"  # colours


def rounded(value):
    """Three digits, or all that come before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def cell(values):
    """The median, and the least and the most of several."""
    text = rounded(statistics.median(values)) if values else ""
    spread = f" ({rounded(min(values))} to {rounded(max(values))})" if len(values) > 1 else ""
    return text + spread


def table(name, rows):
    """A table in Markdown, with a column for everyone in it."""
    everyone = list(dict.fromkeys(who for by_who in rows.values() for who in by_who))
    lines = [[name, *everyone], ["---", *("---:" for _ in everyone)]]
    for what, by_who in rows.items():
        lines.append([what, *(cell(by_who.get(who, [])) for who in everyone)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def conditions(results):
    """How the figures came about, in words."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    settings = " ".join(f"{name}={value}" for name, value in machine["settings"].items())
    return (
        f"Medians of {results['rounds']} turns, with the least and the most in brackets, on "
        f"{machine['machine']}, {machine['SIMD']}, {machine['system']}; BLAS: {machine['BLAS']}; "
        f"threads: {machine['threads']}{settings and f' ({settings})'}; {versions}; "
        f"{machine['date']}. Models but `tales` have {results['shape']} and random weights in "
        f"float32. The English text: {results['text']}."
    )


def brief(figures):
    """The tables and rows that the README shows."""
    return {
        name: {what: figures[name][what] for what in rows or figures[name] if what in figures[name]}
        for name, rows in BRIEF.items()
        if name in figures
    }


def block(results, *, is_whole=False):
    """What stands between the marks of the README, or of docs/speed.md, which has all tables."""
    figures = results["figures"] if is_whole else brief(results["figures"])
    chart = f"![How fast picogpt and others generate and encode: the figures below]({CHART})"
    paragraphs = [
        *([chart] if charted(results) and not is_whole else []),
        textwrap.fill(conditions(results), 100, break_long_words=False, break_on_hyphens=False),
        f"```\n$ {results['command']}\n```",
        *(table(name, rows) for name, rows in figures.items()),
    ]
    return "\n\n".join(paragraphs) + "\n"


def replaced(text, results, *, is_whole=False):
    """A page with a new block."""
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    return before + START + block(results, is_whole=is_whole) + END + after


def charted(results):
    """-> [(title, {who: values})]"""
    figures = results["figures"]
    return [
        (f"{what[0].upper()}{what[1:]}, {name.rpartition(' ')[2]}", figures[name][what])
        for name, rows in CHARTED.items()
        for what in rows
        if what in figures.get(name, {})
    ]


def draw(results, path):
    """Writes the chart: for each task a bar for everyone, as long as the median."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = charted(results)
    style = {
        "svg.fonttype": "none",  # text remains text
        "svg.hashsalt": "picogpt",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
        "text.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(style):
        n_rows = (len(panels) + 1) // 2
        figure = Figure((8.4, 1.7 * n_rows + 0.5), facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        for i, (title, by_who) in enumerate(panels):
            axes = figure.add_subplot(n_rows, 2, i + 1)
            for who, values in by_who.items():
                middle, least, most = statistics.median(values), min(values), max(values)
                is_own = who == "picogpt"
                spread = [[middle - least], [most - middle]] if len(values) > 1 else None
                bar = {"xerr": spread, "error_kw": {"linewidth": 1, "capsize": 2, "ecolor": INK}}
                axes.barh(who, middle, color=OWN if is_own else OTHERS, height=0.7, **bar)
                axes.annotate(
                    rounded(middle),
                    (most, who),
                    xytext=(5, 0),
                    textcoords="offset points",
                    verticalalignment="center_baseline",
                    fontweight="bold" if is_own else "normal",
                )
            axes.set_xlim(0, 1.2 * max(map(max, by_who.values())))
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
            axes.invert_yaxis()
            axes.spines[["top", "right", "bottom"]].set_visible(False)
            axes.tick_params(bottom=False, labelbottom=False, left=False)
        machine = results["machine"]
        figure.supxlabel(
            "Longer is better. Medians, and lines from the least to the most. "
            f"{machine['machine']}, threads: {machine['threads']}; {machine['date']}.",
            fontsize=8,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
