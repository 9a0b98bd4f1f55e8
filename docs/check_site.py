"""Measures in Chromium what is cut on the pages of a built site: `python docs/check_site.py site [--pictures FOLDER]`.

Ends with 1 if, 1400 or 400 pixels wide, a page, a code block, a table or a picture is wider than its place and cannot
be scrolled, or if, 1400 wide, a table of our pages or a line of at most 120 characters is not whole.
"""

import argparse
import base64
import itertools
import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

MEASURE = """(async () => {
  await new Promise(ready => setTimeout(ready, 250));
  const found = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  for (const one of document.querySelectorAll(".md-content :is(pre > code, table, img)")) {
    const lines = one.tagName == "CODE" ? one.textContent.trimEnd().split("\\n") : [];
    const rows = one.scrollHeight / parseFloat(getComputedStyle(one).lineHeight) - 2;
    const short = lines.length && Math.max(...lines.map(line => line.length)) <= 120;
    let box = one, said = one.tagName + ": " + one.textContent.trim().slice(0, 70);
    while (box !== document.body && box.scrollWidth <= box.clientWidth + 1) box = box.parentElement;
    const scrolls = ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    if (box !== document.body && !scrolls) found.push("cut " + said);
    const whole = box === document.body && !(short && rows > lines.length);
    if (WIDE && !whole && (short || one.tagName == "TABLE")) found.push("not whole " + said);
  }
  return found;
})()"""


def main() -> int:
    """Print what is cut, page by page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="folder for a picture of every page")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = ["chromium", "--headless", "--no-sandbox", "--remote-debugging-port=0", f"--user-data-dir={folder}"]
        browser = subprocess.Popen([*command, "about:blank"], stderr=subprocess.DEVNULL)
        try:
            return look(flags.site.resolve(), flags.pictures, Path(folder) / "DevToolsActivePort")
        finally:
            browser.terminate()
            browser.wait()


def look(site: Path, pictures: Path | None, port: Path) -> int:
    """Measure every page in two widths; 1 if something is cut."""
    while not port.exists() or not port.read_text():
        time.sleep(0.1)
    targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"))
    address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
    with connect(address, max_size=None) as socket:
        numbers, bad = itertools.count(), 0

        def ask(method: str, **params: object) -> dict:
            number = next(numbers)
            socket.send(json.dumps({"id": number, "method": method, "params": params}))
            return next(one for one in map(json.loads, socket) if one.get("id") == number)["result"]

        for page, width in itertools.product(sorted(site.rglob("*.html")), (1400, 400)):
            ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            ask("Page.navigate", url=page.as_uri())
            script = MEASURE.replace("WIDE", str(width == 1400 and page.parent.name != "results").lower())
            found = ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)["result"]["value"]
            bad += len(found)
            name = page.relative_to(site).with_suffix("").as_posix()
            print("".join(f"{name} at {width}: {one}\n" for one in found), end="", flush=True)
            if pictures:
                pictures.mkdir(exist_ok=True)
                shot = ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
                pictures.joinpath(f"{name.replace('/', '.')}.{width}.png").write_bytes(base64.b64decode(shot))
    print(f"{bad} of what is shown is cut")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
