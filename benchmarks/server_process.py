"""A server in a process of its own, as `serve` starts it. Read next: `serving.py`, `serving_texts.py`."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import ROOT


@dataclasses.dataclass(frozen=True)
class ServerProcess:
    """A server that is ready: its port, its memory and files, and how fast it tells its health."""

    port: int
    process: subprocess.Popen[str]

    def memory_mb(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6

    def peak_mb(self) -> float:
        """The peak of resident memory since `forget_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6

    def forget_peak(self) -> None:
        """Reset the peak."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def open_files(self) -> int:
        """Its open files, sockets included."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def health_ms(self) -> float:
        """How long /healthz takes."""
        started = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=60) as response:
            assert response.read() == b"OK\n"
        return 1e3 * (time.perf_counter() - started)


@contextlib.contextmanager
def asked_for_health(server: ServerProcess) -> Iterator[list[float]]:
    """Query /healthz continuously in the background; yields the list of latencies in ms."""
    found: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            found.append(server.health_ms())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def running(run: str | Path, *flags: str) -> Iterator[ServerProcess]:
    """Start a server process and yield it when it is ready."""
    command = [sys.executable, "-m", "openpi_train", "serve", str(run), "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stderr=errors, text=True)
        try:
            text = ""
            while "ready after" not in text:
                assert process.poll() is None, text
                time.sleep(0.2)
                errors.seek(0)
                text = errors.read()
            yield ServerProcess(int(text.split("://127.0.0.1:")[1].split(",")[0]), process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "the server did not end in an orderly way"
        finally:
            process.kill()
            process.wait()
