"""A camera whose newest picture is always at hand, read by OpenCV in a thread of its own."""

import threading
import time

import cv2
import numpy as np

# A picture may be this old before the camera counts as lost.
_OLDEST_S = 1.0


class CameraError(RuntimeError):
    """The camera gives no pictures; the text says what to check."""


class Camera:
    """`source` is a number (0 for /dev/video0), a device, or the address of a stream. Close it at the end.

    Raises CameraError if it cannot be opened.
    """

    def __init__(self, source: str):
        self._source, self._stops = source, threading.Event()
        self._capture = cv2.VideoCapture(int(source) if source.isdigit() else source)
        is_read, picture = self._capture.read()
        if not is_read:
            self._capture.release()
            raise CameraError(f"camera {source} gives no picture: is it in, and not used by another program?")
        self._newest: tuple[np.ndarray, float] = picture, time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def read(self) -> np.ndarray:
        """The newest picture, uint8 [height, width, 3], RGB. Raises CameraError if none came for a second."""
        picture, taken_s = self._newest
        if time.monotonic() - taken_s > _OLDEST_S:
            raise CameraError(f"camera {self._source} has given no picture for {_OLDEST_S:g} s: check its cable")
        return cv2.cvtColor(picture, cv2.COLOR_BGR2RGB)

    def close(self) -> None:
        """End the thread."""
        self._stops.set()
        self._thread.join()
        self._capture.release()

    def _watch(self) -> None:
        while not self._stops.is_set():
            is_read, picture = self._capture.read()
            if not is_read:
                return
            self._newest = picture, time.monotonic()
