"""Measures in Chromium what is cut on the pages of a built site: `python docs/check_site.py SITE`.

Ends with 1 if, 1400 or 400 pixels wide, a page, code, a table or a picture is wider than its place and cannot be
scrolled, or if, 1400 wide, a table of our pages or code of at most 120 characters a line is not whole.
"""

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

MEASURE = """(async () => {
  if (document.readyState != "complete") await new Promise(ready => addEventListener("load", ready));
  await new Promise(ready => setTimeout(ready, 100));
  const found = document.documentElement.scrollWidth > innerWidth ? ["the page"] : [];
  const overflow = box => getComputedStyle(box).overflowX;
  for (const one of document.querySelectorAll(".md-content :is(pre > code, table, img)")) {
    const lines = one.tagName == "CODE" ? one.textContent.trimEnd().split("\\n") : [];
    const short = lines.length && Math.max(...lines.map(line => line.length)) <= 120;
    const rows = Math.round(one.scrollHeight / parseFloat(getComputedStyle(one).lineHeight)) - 1;
    const right = one.getBoundingClientRect().left + Math.max(one.scrollWidth, one.offsetWidth) - 1;
    let box = one, said = one.tagName + " " + JSON.stringify(one.textContent.slice(0, 70));
    while (box && (overflow(box) == "visible" || right < box.getBoundingClientRect().right)) box = box.parentElement;
    if (box && !["auto", "scroll"].includes(overflow(box))) found.push("cut " + said);
    const wanted = WIDE && (short || one.tagName == "TABLE");
    if (wanted && (box || rows > lines.length && short)) found.push("not whole " + said);
  }
  return found;
})()"""

site = Path(sys.argv[1]).resolve()
pages = sorted(site.rglob("*.html")) or sys.exit(f"{site} has no pages: make docs")
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as browser_tab:
    flags = ["--headless", "--no-sandbox", "--hide-scrollbars", "--remote-debugging-port=0"]
    browser = subprocess.Popen(["chromium", *flags, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
    browser_tab.callback(browser.wait)
    browser_tab.callback(browser.terminate)
    while not (port := Path(profile) / "DevToolsActivePort").exists() or not port.read_text():
        time.sleep(0.1)
    targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"))
    address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
    socket = browser_tab.enter_context(connect(address, max_size=None))
    numbers, bad = itertools.count(), 0

    def ask(method: str, **params: object) -> dict:
        socket.send(json.dumps({"id": (number := next(numbers)), "method": method, "params": params}))
        return next(one for one in map(json.loads, socket) if one.get("id") == number)["result"]

    for page, width in itertools.product(pages, (1400, 400)):
        name = page.relative_to(site).with_suffix("").as_posix()
        ask("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
        ask("Page.navigate", url=page.as_uri())
        script = MEASURE.replace("WIDE", str(width == 1400 and not name.startswith("results/")).lower())
        found = ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)["result"]["value"]
        bad += len(found)
        print("".join(f"{name} at {width}: {one}\n" for one in found), end="", flush=True)
print(f"{len(pages)} pages: {bad} of what they show is cut")
raise SystemExit(bad > 0)
