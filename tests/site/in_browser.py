"""The built pages in a browser: what a reader searches, and faults of every page.

    make docs-test

It needs Chromium and its driver, which `make docs-test` installs on Debian where they
are missing. `make test` does not collect this file. The pages lie in a folder for their
version, as `mike` publishes them. Other hosts are out of reach: a page works without.
"""

import functools
import http.server
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver  # pyright: ignore[reportMissingImports]
from selenium.common.exceptions import (  # pyright: ignore[reportMissingImports]
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.common.by import By  # pyright: ignore[reportMissingImports]
from selenium.webdriver.support.ui import (  # pyright: ignore[reportMissingImports]
    WebDriverWait,
)

BUILT = Path(os.environ.get("SITE", "out/site")).absolute()
PAGES = sorted(
    str(path.parent.relative_to(BUILT)) for path in BUILT.glob("**/index.html")
)
WIDTHS = {"phone": 390, "desktop": 1280}
SCHEMES = {"light": "default", "dark": "slate"}
# What the theme takes from another host: the stars of the repository.
ALLOWED = ("https://api.github.com/repos/",)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the pages in a folder, beside the list of versions that mike writes.

    Yields the address of the home page, with `/` at the end.
    """
    assert PAGES, f"there are no pages in {BUILT}: run `make docs`"
    root = tmp_path_factory.mktemp("published")
    (root / "latest").symlink_to(BUILT)
    versions = [{"version": "latest", "title": "latest", "aliases": []}]
    (root / "versions.json").write_text(json.dumps(versions), "utf-8")
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(root)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{found.server_port}/latest/"
        found.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            options.binary_location = found
            break
    else:
        pytest.fail("there is no Chromium: apt-get install chromium chromium-driver")
    for argument in (
        "--headless=new",
        "--no-sandbox",  # CI runs as root, and these are our own pages
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = shutil.which("chromedriver")
    service = webdriver.ChromeService(executable_path=driver) if driver else None
    found = webdriver.Chrome(options=options, service=service)
    found.set_page_load_timeout(60)
    yield found
    found.quit()


def look(browser: Any, width: int, scheme: str = "light", height: int = 900) -> None:
    """Set the width of the window, and the colours that the reader prefers."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
    metrics["mobile"] = width < 600
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def forget_colours(browser: Any, server: str) -> None:
    """Forget which colours were chosen: the theme keeps them, while a page is open."""
    # Cleared by a page of the same origin: from outside, what the last page stored may
    # arrive after it.
    browser.get(server.removesuffix("latest/") + "versions.json")
    browser.execute_script("localStorage.clear()")


def console_errors(browser: Any) -> list[str]:
    """Return the errors and warnings since the last call."""
    return [
        entry["message"]
        for entry in browser.get_log("browser")
        if entry["level"] in ("SEVERE", "WARNING")
        and not any(address in entry["message"] for address in ALLOWED)
    ]


def wide_parts(browser: Any, width: int) -> list[str]:
    """Return what is cut off at the right, or makes the page scroll to the side.

    The theme hides what is too wide for the page. A part may scroll by itself.
    """
    return browser.execute_script(
        """
        const width = arguments[0], found = [];
        const scrolls = part => getComputedStyle(part).overflowX != "visible";
        for (const part of document.querySelectorAll("body *")) {
          const box = part.getBoundingClientRect();
          if (!part.checkVisibility() || !box.width || box.right <= width + 1) continue;
          let above = part.parentElement;
          while (above != document.body && !scrolls(above)) above = above.parentElement;
          if (above == document.body)
            found.push(`${part.tagName}.${part.className} to ${box.right}: ` +
                       part.textContent.trim().slice(0, 40));
        }
        return found.slice(0, 5);
        """,
        width,
    )


# What is typed, by the page that is among the first four to be found.
SEARCHED = {
    "faq": (
        "autocast disabled; jupyter; TraceContextError; running_var nan; decay masks; "
        "batchnorm half; schedule_free; is a loss scale needed in bfloat16; bfloat16 "
        "or float16; from float16 to bfloat16; keep one layer in float32; param_dtype"
    ),
    "recipes/serving": "export; KV cache",
    "trouble/dtypes": (
        "x64; recompiles every step; scan body function carry input and carry output "
        "must have equal types; lax.dot_general requires arguments to have the same "
        "dtypes; dynamic_update_slice requires arguments to have the same dtypes"
    ),
    "coming_from/torch_amp": "allow_tf32; model.half(); GradScaler",
    "how/loss_scaling": "gradients are zero in float16",
    "recipes/linen": "has_aux; float32 parameters in TrainState; dropout rng",
    "coming_from": "16-mixed",
    "coming_from/jmp": "jmp same results bitwise",
    "checkpoints": "load old checkpoint with DynamicScale; overwrite checkpoint",
    "trouble/memory": (
        "out of memory; does my model fit in 8GB; largest batch size that fits; VRAM"
    ),
    "trouble/speed": (
        "mixed precision slower; explain casts by hand; float32 product forgot to cast"
    ),
    "trouble/skipped": (
        "loss scale keeps halving; which layer overflows; TooManySkippedStepsError"
    ),
    "trouble/differs": "validation loss worse than float32",
    "recipes/accumulation": "gradient accumulation",
    "recipes/clipping": "gradient clipping",
    "recipes/ema": "EMA of the weights",
    "recipes/equinox": (
        "expected arrays, numbers or functions; serialising an equinox export; "
        "eqx.nn.State BatchNorm"
    ),
    "recipes/float16_gpus": "fp16",
    "recipes/gradient_penalty": "hessian",
    "recipes/half_parameters": "master weights; stochastic rounding",
    "recipes/nnx": "nnx bf16 training",
    "recipes/plain_functions": "cast_to_compute tuple batch",
    "recipes/recomputation": "nn.remat; gradient checkpointing",
    "recipes/scans_and_ensembles": "lax.scan over layers",
    "recipes/schedules": "logging; learning rate",
    "recipes/sensitive": "neural ODE; RK4",
    "recipes/sharding": "train on multiple gpus; DDP",
    "memory": "8-bit adam; half precision optimizer state",
    "reference": "python -m jmp_lite",
    "reference/optimisers": "optax chain; apply_if_finite",
    "coming_from/flax_dynamic_scale": "DynamicScale",
    "trouble/nan": "loss is nan",
    "recipes/fine_tuning": "LoRA",
}


@pytest.mark.parametrize(
    ("words", "page"),
    [(words, page) for page, typed in SEARCHED.items() for words in typed.split("; ")],
)
def test_what_a_reader_types_leads_to_the_page(
    words: str, page: str, browser: Any, server: str
) -> None:
    look(browser, WIDTHS["desktop"])
    browser.get(server)
    field = browser.find_element(By.CSS_SELECTOR, ".md-search__input")
    # What the header hides is scrolled into view.
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", field)
    field.click()
    field.send_keys(words)
    found: list[str] = []

    def pages(browser: Any) -> bool:
        selector = ".md-search-result__item > a"
        links = browser.find_elements(By.CSS_SELECTOR, selector)
        addresses = [link.get_attribute("href").partition("?")[0] for link in links]
        found[:] = [a.removeprefix(server).strip("/") for a in addresses]
        return page in found[:4]

    try:
        changing = [StaleElementReferenceException]  # the page, as it searches
        WebDriverWait(browser, 20, ignored_exceptions=changing).until(pages)
    except TimeoutException:
        pytest.fail(f"{words!r} leads to {found[:4]}")


def hidden_cells(browser: Any) -> list[str]:
    """Return cells of tables that are seen only after scrolling.

    They are wider than the column of the page's text, or than their own table has room.
    """
    return browser.execute_script(
        """
        const found = [];
        const column = document.querySelector("article").getBoundingClientRect();
        for (const cell of document.querySelectorAll("article :is(th, td)")) {
          if (!cell.checkVisibility()) continue;
          const box = cell.getBoundingClientRect();
          const table = cell.closest("table").getBoundingClientRect();
          if (Math.max(box.right, table.right) > column.right + 1
              || cell.scrollWidth > cell.clientWidth + 1)
            found.push(cell.textContent.trim().slice(0, 40) + ` to ${box.right}`);
        }
        return found.slice(0, 5);
        """
    )


def brightness(browser: Any, picture: Any) -> float:
    """Return how bright the margin of a picture is, as it is shown, 0 to 255."""
    # At the top of the window, the header would be in front of it.
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", picture)
    return browser.execute_async_script(
        """
        const [shown, done] = arguments, image = new Image();
        image.onload = () => {
          const canvas = document.createElement("canvas").getContext("2d");
          canvas.drawImage(image, 0, 0);
          const [r, g, b] = canvas.getImageData(8, 8, 1, 1).data;
          done((r + g + b) / 3);
        };
        image.src = `data:image/png;base64,${shown}`;
        """,
        picture.screenshot_as_base64,
    )


@pytest.mark.parametrize("preferred", SCHEMES)
@pytest.mark.parametrize("page", ["how/formats", "how/loss_scaling", "convergence"])
def test_a_figure_is_as_dark_as_its_page(
    page: str, preferred: str, browser: Any, server: str
) -> None:
    forget_colours(browser, server)
    look(browser, WIDTHS["desktop"], preferred, height=2000)  # a picture is seen whole
    browser.get(f"{server}{page}/")
    body = browser.find_element(By.TAG_NAME, "body")
    WebDriverWait(browser, 20).until(
        lambda _: body.get_attribute("data-md-color-scheme") == SCHEMES[preferred]
    )
    # Also where the reader has chosen other colours than those of the device.
    choose = "document.body.setAttribute('data-md-color-scheme', arguments[0])"
    for chosen, scheme in SCHEMES.items():
        browser.execute_script(choose, scheme)
        pictures = browser.find_elements(By.CSS_SELECTOR, "article p img")
        assert pictures
        for picture in pictures:
            is_dark = brightness(browser, picture) < 64
            is_light = brightness(browser, picture) > 192
            name = picture.get_attribute("src")
            assert (is_dark, is_light) == (chosen == "dark", chosen != "dark"), name


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_whole_and_fits(page: str, browser: Any, server: str) -> None:
    browser.get_log("browser")
    for name, width in WIDTHS.items():
        look(browser, width)
        browser.get(server if page == "." else f"{server}{page}/")
        assert wide_parts(browser, width) == [], name
        assert hidden_cells(browser) == [], name
    heading = browser.find_element(By.CSS_SELECTOR, "article h1")
    assert heading.text.removesuffix("¶").strip()
    paragraphs = browser.find_elements(By.CSS_SELECTOR, "article p")
    texts = browser.execute_script(
        "return arguments[0].map(p => p.textContent)", paragraphs
    )
    raw = ("::", "](", "<!--", "```")  # markup that nothing has read
    assert [text for text in texts if any(mark in text for mark in raw)] == []
    assert console_errors(browser) == []  # also of a picture that is not there
