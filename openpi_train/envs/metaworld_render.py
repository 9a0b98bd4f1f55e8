"""Headless rendering of a MuJoCo simulation with EGL or OSMesa, whichever the machine has.

Shadows, reflections and multisampling are off, which makes software renderers twelve times as fast.
"""

import functools
import importlib
from typing import Any

import numpy as np
from jaxtyping import UInt8

mujoco: Any = importlib.import_module("mujoco")  # a compiled module without type information
_BACKENDS = ("egl", "osmesa")
# The process's OpenGL context, created when first needed.
_contexts: list[Any] = []


class View:
    """A camera of a model, for square pictures of `size` pixels. Raises RuntimeError if rendering is impossible."""

    def __init__(self, model: Any, camera: str, size: int):
        _make_current()
        self.size, self._model, self._frame = size, model, mujoco.MjrRect(0, 0, size, size)
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        model.vis.quality.shadowsize = model.vis.quality.offsamples = 0
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(camera).id
        self._scene = mujoco.MjvScene(model, maxgeom=2000)
        self._drawn = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._drawn)

    def picture(self, data: object) -> UInt8[np.ndarray, "size size 3"]:
        """The camera's current picture."""
        _make_current()
        mujoco.mjv_updateScene(
            self._model, data, mujoco.MjvOption(), None, self._camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
        )
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = 0
        pixels = np.empty((self._frame.height, self._frame.width, 3), np.uint8)
        mujoco.mjr_render(self._frame, self._scene, self._drawn)
        mujoco.mjr_readPixels(pixels, None, self._frame, self._drawn)
        # Rows are ordered bottom to top, and Meta-World's camera is upside down.
        return np.ascontiguousarray(pixels[:, ::-1])


@functools.cache
def why_not() -> str:
    """Why rendering is impossible here, and what to do; empty if it is possible."""
    problems = []
    for name in _BACKENDS:
        try:
            # MuJoCo renders into its own frame buffers, so the context's size does not matter.
            _contexts.append(importlib.import_module(f"mujoco.{name}").GLContext(16, 16))
            return ""
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            problems.append(f"{name}: {error}")
    return (
        f"this machine cannot render without a display ({'; '.join(problems)}): install libegl1 or libosmesa6, or "
        "omit the environment's image_size, if the policy uses states alone"
    )


def _make_current() -> None:
    if problem := why_not():
        raise RuntimeError(problem)
    _contexts[0].make_current()
