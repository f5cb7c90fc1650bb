"""The page on which to see where tokens look: in a real browser, without a network."""

import json
import re
import shutil
from itertools import product

import numpy as np
import pytest

from picogpt import AttentionView, PicogptError, attention_view, load, pictures, trace
from picogpt.cli import main

TEXT = "the king </script><b> & 日"


@pytest.fixture
def model(model_folder):
    encoder, hparams, params = load(model_folder())
    return encoder, params, hparams["n_head"]


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_holds_all_shares(model):
    encoder, params, n_head = model
    page = attention_view(TEXT, *model)
    ids = encoder.encode(TEXT)
    assert attention_view(ids, *model) == page
    data = data_of(page)
    assert "".join(data["tokens"]) == r"the·king·</script><b>·&·\xe6\x97\xa5"
    assert (data["n_layer"], data["n_head"]) == (2, 4)
    shares = iter(data["shares"])
    for i, weights in enumerate(trace(ids, params, n_head, keep="*.attn.weights").values()):
        assert i < 2
        for head in weights:
            for row, share_row in enumerate(head):
                for share in share_row[: row + 1]:
                    high, low = (pictures.DIGITS.index(next(shares)) for _ in range(2))
                    assert abs((64 * high + low) / 4095 - share) <= 0.5 / 4095 + 1e-6
    assert next(shares, None) is None


def test_it_asks_nothing_of_the_network():
    encoder, hparams, params = load("tales")
    page = attention_view("Once upon a time", encoder, params, hparams["n_head"])
    assert not re.search(r"https?:|[:\"']//|\bsrc=|\bhref=|@import|url\(", page)


def test_a_hundred_tokens_stay_below_two_megabytes():
    encoder, hparams, params = load("tales")
    ids = np.random.default_rng(0).integers(256, 4000, size=100)
    page = attention_view(ids, encoder, params, hparams["n_head"])
    assert len(page.encode()) < 600_000


def test_too_long_a_text(model):
    with pytest.raises(PicogptError) as error:
        attention_view([1] * 257, *model)
    assert str(error.value) == "text is 257 tokens; the page has room for 256"
    encoder, params, n_head = model
    damaged = {**params, "wpe": np.full_like(params["wpe"], np.nan)}
    with pytest.raises(PicogptError, match="nan or infinite"):
        attention_view("the", encoder, damaged, n_head)


def test_a_notebook_shows_it_in_a_frame(model):
    page = attention_view("the", *model)
    assert isinstance(page, AttentionView)
    frame = page._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count("<") == 2


def test_the_command_writes_it(model_folder, tmp_path, capsys):
    folder, path = model_folder(), tmp_path / "x.html"
    assert main(["attention", TEXT, "--model", str(folder), "-o", str(path)]) == 0
    encoder, _, params = load(folder)
    assert path.read_text(encoding="utf-8") == attention_view(TEXT, encoder, params, 4)
    assert capsys.readouterr() == ("", "")
    assert main(["lens", "the", "--model", str(folder), "-o", str(path)]) == 1
    message = f"{path}: ends in '.html'; expected .png, .svg or .pdf"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, model, tmp_path):
    """The page of TEXT in the browser, and the shares [n_layer, n_head + 1, n_seq, n_seq]."""
    encoder, params, n_head = model
    path = tmp_path / "page.html"
    path.write_text(attention_view(TEXT, *model), encoding="utf-8")
    browser.get(path.as_uri())
    traced = trace(encoder.encode(TEXT), params, n_head, keep="*.attn.weights")
    weights = np.stack(list(traced.values()))
    return browser, np.concatenate([weights, weights.mean(1, keepdims=True)], 1)


def check(driver, shares, layer, head, token):
    """The shares shown are those of that token in that head."""
    buttons = driver.find_elements("css selector", ".token")
    assert len(buttons) == shares.shape[-1]
    pressed = [b.get_attribute("aria-pressed") for b in buttons]
    assert pressed == ["true" if j == token else "false" for j in range(len(buttons))]
    for j, button in enumerate(buttons):
        shown = button.find_element("tag name", "small").text
        label = button.get_attribute("aria-label")
        if j > token:
            assert (shown, label.endswith(", comes later")) == ("", True)
            continue
        share = 100 * shares[layer, head, token, j]
        assert abs(float(shown.rstrip("%")) - share) <= 0.05 + 0.02
        assert label.endswith(f", gets {shown}")
    name = "mean of all heads" if head == 4 else f"head {head}"
    said = driver.find_element("id", "said").text
    assert said.startswith(f"Layer {layer}, {name}: ")


def test_hover_focus_and_keys_show_the_right_shares(opened):
    from selenium.webdriver import ActionChains, Keys

    driver, shares = opened
    n = shares.shape[-1]
    check(driver, shares, 1, 0, n - 1)
    buttons = driver.find_elements("css selector", ".token")
    ActionChains(driver).move_to_element(buttons[2]).perform()
    check(driver, shares, 1, 0, 2)
    buttons[4].click()
    check(driver, shares, 1, 0, 4)
    keys = driver.switch_to.active_element
    for key, place in (
        (Keys.ARROW_RIGHT, (1, 0, 5)),
        (Keys.ARROW_DOWN, (1, 1, 5)),
        (Keys.PAGE_DOWN, (0, 1, 5)),
        (Keys.ARROW_UP, (0, 0, 5)),
        (Keys.ARROW_UP, (0, 4, 5)),  # the mean
        (Keys.ARROW_DOWN, (0, 0, 5)),
        (Keys.PAGE_UP, (1, 0, 5)),
        (Keys.ARROW_LEFT, (1, 0, 4)),
    ):
        driver.switch_to.active_element.send_keys(key)
        check(driver, shares, *place)
    assert keys.get_attribute("class").startswith("token")


def test_layer_and_head_are_chosen_by_menu_and_by_map(opened):
    from selenium.webdriver.support.ui import Select

    driver, shares = opened
    last = shares.shape[-1] - 1
    Select(driver.find_element("id", "layer")).select_by_visible_text("0")
    Select(driver.find_element("id", "head")).select_by_visible_text("mean")
    check(driver, shares, 0, 4, last)
    maps = driver.find_elements("css selector", ".map")
    assert [m.get_attribute("aria-label") for m in maps] == (
        [f"layer {layer}, head {head}" for layer, head in product(range(2), range(4))]
    )
    maps[6].click()
    check(driver, shares, 1, 2, last)
    assert driver.find_element("id", "layer").get_attribute("value") == "1"
    assert driver.find_element("id", "head").get_attribute("value") == "2"


def test_no_error_and_no_request(opened):
    driver, _ = opened
    assert driver.get_log("browser") == []
    asked = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            asked.add(message["params"]["request"]["url"].partition(":")[0])
    assert asked <= {"file", "data", "about", "chrome"}


def test_narrow_screens_need_no_scrolling_sideways(opened):
    driver, _ = opened
    driver.set_window_size(500, 800)
    width = driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= driver.execute_script("return window.innerWidth")
