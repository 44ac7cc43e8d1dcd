"""The report as a browser lays it out, on a phone and on a desk: nothing sticks out or collides.

Runs where Chromium or Chrome is installed (Debian: apt-get install chromium).
"""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest

from scripts import report
from scripts.render_results import RESULTS
from scripts.report_page import html_page
from tests.scripts.test_report import RECORDS, record

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed")

# Every folded table is opened. Two texts of a plot may touch, and overlap by a pixel of rounding.
MEASURE = """
document.querySelectorAll("details").forEach(d => { d.open = true });
const box = e => e.getBoundingClientRect();
const plots = [...document.querySelectorAll("svg")].map(svg => {
  const outer = box(svg), texts = [...svg.querySelectorAll("text")];
  const outside = texts.filter(t => box(t).left < outer.left - 1 || box(t).right > outer.right + 1
    || box(t).top < outer.top - 1 || box(t).bottom > outer.bottom + 1);
  const hit = (a, b) => a.left + 1 < b.right && b.left + 1 < a.right && a.top + 3 < b.bottom
    && b.top + 3 < a.bottom;
  const pairs = texts.flatMap((a, i) => texts.slice(i + 1).filter(b => hit(box(a), box(b)))
    .map(b => a.textContent + " | " + b.textContent));
  const scale = outer.width / svg.viewBox.baseVal.width;
  return { title: svg.querySelector("title").textContent, width: outer.width, pairs,
    outside: outside.map(t => t.textContent),
    letters: Math.min(...texts.map(t => parseFloat(getComputedStyle(t).fontSize) * scale)) };
});
const tables = [...document.querySelectorAll(".scroll")].map(scroll => {
  const first = scroll.querySelector("td"), before = box(first).left;
  scroll.scrollLeft = 60;
  return { head: scroll.textContent.slice(0, 60), right: box(scroll).right,
    moved: box(first).left - before,
    first: scroll.scrollWidth > scroll.clientWidth ? box(first).width / box(scroll).width : 0 };
});
const luminance = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
  .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b };
const paper = luminance(getComputedStyle(document.body).backgroundColor);
const contrast = ["p", "td", ".good", ".bad", "dl"].map(name => document.querySelector(name))
  .filter(e => e).map(e => luminance(getComputedStyle(e).color))
  .map(ink => (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05));
const measured = { width: innerWidth, page: document.documentElement.scrollWidth, plots, tables,
  paper, contrast: Math.min(...contrast),
  fetched: performance.getEntriesByType("resource").map(entry => entry.name) };
const out = document.createElement("pre");
out.id = "measured";
out.textContent = JSON.stringify(measured);
parent.document.body.append(out);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The records of the repository, and one of each other kind."""
    records = report.read_records([RESULTS])
    known = {made["name"] for made in records}
    records += [record(name, rows) for name, rows in RECORDS.items() if name not in known]
    gap = {"mean_abs": [0.01], "max_abs": 0.02}
    curve = {k: gap for k in ("flash_to_sdpa", "sdpa_to_sdpa", "flash_to_flash")}
    lines = {name: [(i, 11.0 - i / 20) for i in range(1, 101)] for name in ("flash", "sdpa")}
    curve |= dict(model="gpt2_1k", dropout_p=0.1, flash_minus_sdpa=0.0, flash_within_noise=True)
    rows = RECORDS["compare_attention"]
    made = record("compare_attention_dropout", rows, loss_curves=[{**curve, "curves": lines}])
    html = html_page("title", *report.build([*records, made]))
    html = html.replace("</body>", f"<script>{MEASURE}</script></body>")
    folder = tmp_path_factory.mktemp("page")
    for width in (390, 1280):  # in a frame, since a window has a least width
        style = f"border: 0; width: {width}px; height: 900px"
        frame = f'<iframe style="{style}" srcdoc="{escape(html)}"></iframe>'
        (folder / f"{width}.html").write_text(f"<!DOCTYPE html><body>{frame}</body>")
    return folder


def measure(folder, width, *flags):
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom", *flags]
    command += [f"--user-data-dir={folder}/profile", "--window-size=1400,1000", "--hide-scrollbars"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", (folder / f"{width}.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return json.loads(unescape(re.search('<pre id="measured">(.*?)</pre>', dom, re.S)[1]))


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out_or_collides(page, width):
    found = measure(page, width)
    assert found["width"] == width and found["page"] <= width
    assert found["fetched"] == []
    assert len(found["plots"]) > 10 and len(found["tables"]) > 10
    for plot in found["plots"]:
        assert plot["outside"] == [] and plot["pairs"] == [], plot
        assert plot["letters"] >= 10 and plot["width"] >= 300, plot
    for table in found["tables"]:
        assert table["right"] <= width, table
        assert abs(table["moved"]) < 1, table
        assert table["first"] < 0.6, table


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_the_paper(page, scheme):
    """4.5 is the least contrast of WCAG 2.2 (1.4.3) for text."""
    found = measure(page, 390, *(["--force-dark-mode"] if scheme == "dark" else []))
    assert (found["paper"] < 0.1) == (scheme == "dark")
    assert found["contrast"] >= 4.5
