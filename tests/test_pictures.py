"""Pictures: what is drawn is what was computed, and every token can be named."""

import sys
import warnings
from itertools import chain

import numpy as np
import pytest

from picogpt import (
    Encoder,
    PicogptError,
    attention_plot,
    lens_plot,
    load,
    logit_lens,
    pictures,
    trace,
)
from picogpt.pictures import check_picture, save_picture

TEXT = "the king  $x$\n日本"


@pytest.fixture
def model(model_folder):
    encoder, hparams, params = load(model_folder())
    return encoder, params, hparams["n_head"]


def maps(figure):
    return [axes for axes in figure.axes if axes.images and axes.get_visible()]


def names(labels):
    return [label.get_text() for label in labels]


def test_all_heads_of_the_last_layer(model):
    encoder, params, n_head = model
    ids = encoder.encode(TEXT)
    figure = attention_plot(TEXT, *model)
    weights = trace(ids, params, n_head)["h1.attn.weights"]
    assert len(maps(figure)) == 4
    for i, axes in enumerate(maps(figure)):
        assert axes.get_title() == f"layer 1, head {i}"
        drawn = axes.images[0].get_array()
        assert np.array_equal(drawn.filled(0), weights[i])
        assert (drawn.mask == ~np.tri(len(ids), dtype=bool)).all()
        assert axes.images[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    ("head", "title"), [(2, "layer 0, head 2"), ("mean", "layer 0, mean of 4 heads")]
)
def test_one_head_or_the_mean(model, head, title):
    encoder, params, n_head = model
    (axes,) = maps(attention_plot(TEXT, *model, layer=0, head=head))
    weights = trace(encoder.encode(TEXT), params, n_head)["h0.attn.weights"]
    wanted = weights[2] if head == 2 else weights.mean(0)
    assert axes.get_title() == title
    assert np.array_equal(axes.images[0].get_array().filled(0), wanted)


def test_tokens_are_named_with_blanks_visible_and_escapes(model):
    (axes,) = maps(attention_plot(TEXT, *model, head=0))
    shown = names(axes.get_yticklabels())
    assert shown == names(axes.get_xticklabels())
    assert "".join(shown) == r"the·king··$x$⏎\xe6\x97\xa5\xe6\x9c\xac"
    assert not any(label.get_parse_math() for label in axes.get_yticklabels())


@pytest.mark.parametrize(("n", "n_named"), [(5, 5), (30, 30), (31, 16), (32, 16)])
def test_labels_are_thinned_where_they_are_too_many(model, monkeypatch, n, n_named):
    monkeypatch.setattr(pictures, "MAX_LABELS", 30)
    (axes,) = maps(attention_plot([5] * n, *model, head=0))
    assert len(axes.get_xticklabels()) == len(axes.get_yticklabels()) == n_named


def test_labels_do_not_overlap(model):
    """A label is as high as 7 points; on each axis as many fit as are there."""
    figure = attention_plot(list(range(32)), *model)
    figure.draw_without_rendering()
    axes = maps(figure)[0]
    height = axes.get_window_extent().height / figure.dpi * 72  # points
    assert height / len(axes.get_yticklabels()) >= pictures.FONT


@pytest.mark.parametrize(
    ("n", "grid"),
    [(1, (1, 1)), (8, (2, 4)), (12, (3, 4)), (16, (4, 4)), (20, (4, 5)), (25, (5, 5)), (7, (3, 3))],
)
def test_the_grid_has_no_empty_places_if_it_can(n, grid):
    assert pictures._grid(n) == grid


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 2}, "layer: is 2; expected 0 to 1"),
        ({"layer": -1}, "layer: is -1; expected 0 to 1"),
        ({"layer": 1.0}, "layer: is 1.0; expected 0 to 1"),
        ({"layer": True}, "layer: is True; expected 0 to 1"),
        ({"head": True}, "head: is True; expected 0 to 3, all or mean"),
        ({"head": 1.0}, "head: is 1.0; expected 0 to 3, all or mean"),
        ({"head": 4}, "head: is 4; expected 0 to 3, all or mean"),
        ({"head": "x"}, "head: is 'x'; expected 0 to 3, all or mean"),
    ],
)
def test_no_such_layer_or_head(model, options, message):
    with pytest.raises(PicogptError) as error:
        attention_plot(TEXT, *model, **options)
    assert str(error.value) == message


def test_the_lens(model, monkeypatch):
    encoder, params, n_head = model
    monkeypatch.setattr(pictures, "LENS_COLUMNS", 8)
    ids = encoder.encode(TEXT)
    best, likely = logit_lens(ids, params, n_head)
    panels = maps(lens_plot(TEXT, *model))
    assert len(panels) == -(-len(ids) // 8)
    drawn = np.concatenate([axes.images[0].get_array() for axes in panels], 1)
    assert np.array_equal(drawn, likely[::-1])
    assert names(panels[0].get_yticklabels()) == ["layer 1", "layer 0", "embedding"]
    said = [names(axes.texts) for axes in panels]
    labels = pictures._labels(encoder, best[-1])
    assert list(chain(*(texts[: len(texts) // 3] for texts in said))) == labels
    with pytest.raises(PicogptError, match="text is 121 tokens; the picture has room for 120"):
        lens_plot([1] * 121, *model)


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files_are_whole_and_the_same_each_time(model, tmp_path, kind):
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    data = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(2):
            path = tmp_path / f"{i}.{kind}"
            save_picture(attention_plot("the 日 $\\frac", *model), path)
            data.append(path.read_bytes())
    assert data[0].startswith(starts[kind])
    assert data[0] == data[1]


def test_names_that_are_no_picture(tmp_path):
    with pytest.raises(PicogptError) as error:
        check_picture("x.gif")
    assert str(error.value) == "x.gif: ends in '.gif'; expected .png, .svg or .pdf"
    with pytest.raises(PicogptError) as error:
        check_picture(tmp_path / "no" / "x.png")
    assert str(error.value) == f"{tmp_path}/no: no such folder; expected one for x.png"


@pytest.mark.parametrize("draw", [attention_plot, lens_plot])
def test_without_matplotlib(model, monkeypatch, draw):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.font_manager"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PicogptError) as error:
        draw("the", *model)
    message = 'matplotlib: is not installed; run "pip install matplotlib"'
    assert str(error.value) == message


def test_long_tokens_are_cut_short(model):
    encoder, params, n_head = model
    long = Encoder({**encoder.encoder, "-" * 64: 300}, list(encoder._ranks))
    wide = {**params, "wte": np.concatenate([params["wte"], params["wte"][:1]])}
    (axes,) = maps(attention_plot([300, 5], long, wide, n_head, head=0))
    assert names(axes.get_xticklabels())[0] == "-" * 10 + "…"


def test_a_picture_that_cannot_be_written_leaves_the_old_one(model, tmp_path, monkeypatch):
    path = tmp_path / "pictures" / "x.png"
    path.parent.mkdir()
    path.write_bytes(b"old")
    figure = lens_plot("the", *model)

    def fail(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pictures.Path, "write_bytes", fail)
    with pytest.raises(PicogptError) as error:
        save_picture(figure, path)
    assert str(error.value) == f"{path}: No space left on device; the picture is not written"
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("draw", [attention_plot, lens_plot])
def test_damaged_weights_are_not_drawn(model, draw):
    encoder, params, n_head = model
    damaged = {**params, "wpe": np.full_like(params["wpe"], np.nan)}
    with pytest.raises(PicogptError, match="nan or infinite; the weights are damaged"):
        draw("the", encoder, damaged, n_head)


@pytest.mark.parametrize("draw", [attention_plot, lens_plot])
def test_notebooks_show_them(model, draw):
    assert draw("the", *model)._repr_png_().startswith(b"\x89PNG")
