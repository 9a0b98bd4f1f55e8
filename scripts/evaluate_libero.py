"""Success rates of a served policy on LIBERO (Liu et al. 2023), by a client that runs in LIBERO's own environment.

    python scripts/evaluate_libero.py --suite libero_spatial libero_goal --out libero.json

It needs Python 3.8 or later, LIBERO, numpy, msgpack and websockets, and nothing of openpi_train. The policy is at the
other end of openpi's websocket protocol: `python -m openpi_train serve RUN`, or openpi's own server.
`docs/howto/evaluate.md` tells how to use it.

What is sent and done is as in openpi's `examples/libero/main.py`: published initial states in their order, ten control
steps in which objects fall, both pictures turned by 180 degrees, five actions of each chunk. Interface and names are
those of LIBERO at revision 4f0dd18 (`benchmark/__init__.py`, `envs/env_wrapper.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MISSING: ImportError | None = None
try:
    import msgpack
    import numpy as np
    from websockets.exceptions import ConnectionClosed, WebSocketException
    from websockets.sync.client import connect
except ImportError as error:  # told by `main`, after --help
    MISSING = error

# Control steps of each suite, somewhat more than its longest demonstration has.
SUITES = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
# At first objects fall: nothing is moved for so many control steps, and the gripper is open.
WAITING_STEPS, NO_MOTION = 10, [0.0] * 6 + [-1.0]
ACTION_DIM = 7
OBSERVED = ("image", "wrist_image", "state", "prompt")


class Problem(Exception):
    """What the user can mend; the message says how."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate, print a table and write the results. Returns 0, or 2 with a message."""
    flags = flags_of(arguments)
    if MISSING is not None:
        return told(f"{MISSING}. In LIBERO's environment: pip install numpy msgpack 'websockets>=11'")
    try:
        results = opened_results(flags)
        policy = ServedPolicy(flags.url, api_key(flags.api_key_file), flags.wait_s)
        try:
            check_policy(policy.metadata)
            check_server(results, policy.metadata)
            evaluate(flags, policy, results)
        finally:
            policy.close()
    except ConnectionClosed as error:
        return told(f"the server closed the connection ({error}); --resume continues when it is back")
    except Problem as error:
        return told(str(error))
    except ImportError as error:
        return told(f"{error}: run it in the environment in which LIBERO is installed (docs/howto/evaluate.md)")
    print(table(results))
    return 0


def flags_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's flags."""
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0], formatter_class=form)
    parser.add_argument("--suite", nargs="+", required=True, choices=list(SUITES), help="suites of tasks")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="file of the results, JSON")
    parser.add_argument("--resume", action="store_true", help="continue what is in --out")
    parser.add_argument("--url", default="ws://127.0.0.1:8000", help="the policy's server; wss:// for TLS")
    parser.add_argument("--api-key-file", type=pathlib.Path, help="default: the variable OPENPI_TRAIN_API_KEY, if set")
    parser.add_argument("--wait-s", type=float, default=600.0, help="seconds to wait for the server to be ready")
    parser.add_argument("--tasks", type=at_least(0), nargs="+", help="numbers of tasks of each suite (default: all)")
    parser.add_argument("--trials", type=at_least(1), default=50, help="episodes of each task")
    parser.add_argument("--execute", type=at_least(1), default=5, help="actions of a chunk that are executed")
    parser.add_argument("--max-steps", type=at_least(1), help="control steps of an episode (default: the suite's)")
    parser.add_argument("--image-size", type=at_least(1), default=256, help="pixels; demonstrations have 256")
    parser.add_argument("--seed", type=at_least(0), default=7, help="of the simulator; the trial's number is added")
    flags = parser.parse_args(arguments)
    flags.suite = list(dict.fromkeys(flags.suite))
    return flags


def at_least(least: int) -> Callable[[str], int]:
    """Reads a whole number from this one on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return read


def api_key(file: pathlib.Path | None) -> str | None:
    """The key that the server wants, if one is given."""
    if file is None:
        return os.environ.get("OPENPI_TRAIN_API_KEY") or None
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Problem(f"--api-key-file {file} cannot be read: {error}") from error


class ServedPolicy:
    """A policy behind openpi's websocket protocol: messages are msgpack, with maps for arrays."""

    def __init__(self, url: str, key: str | None = None, wait_s: float = 0.0):
        """Connects; waits so long for a server that is not ready. Raises Problem."""
        headers = {"Authorization": f"Api-Key {key}"} if key else None
        deadline = time.monotonic() + wait_s
        self._open = contextlib.ExitStack()
        while True:
            try:
                # Newer websockets want a context.
                connecting = connect(url, compression=None, max_size=None, additional_headers=headers)
                self._connection = self._open.enter_context(connecting)
                break
            except ConnectionRefusedError as error:
                if time.monotonic() >= deadline:
                    raise Problem(f"no server answers at {url}; start it, and give its address with --url") from error
                time.sleep(1)
            except (OSError, WebSocketException) as error:
                raise Problem(f"{url} cannot be connected to: {error} (--url, --api-key-file)") from error
        self.metadata = unpacked(self._connection.recv())

    def actions(self, observation: dict[str, Any]) -> np.ndarray:
        """The chunk of actions for an observation, [h, 7]. Raises Problem, with the server's words."""
        self._connection.send(packed(observation))
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise Problem(f"the server answers: {answer}")
        actions = np.asarray(unpacked(answer)["actions"], np.float64)
        if actions.ndim != 2 or actions.shape[1] != ACTION_DIM:
            shape = list(actions.shape)
            raise Problem(f"the server's actions have the shape {shape}; LIBERO's are [steps, {ACTION_DIM}]")
        return actions

    def close(self) -> None:
        """Close the connection."""
        self._open.close()


def packed(message: Any) -> bytes:
    """A message as openpi's protocol has it."""
    return msgpack.packb(message, default=_as_map)


def unpacked(message: bytes) -> Any:
    """The inverse of `packed`."""
    return msgpack.unpackb(message, object_hook=_as_array)


def _as_map(value: Any) -> dict[bytes, Any]:
    if isinstance(value, np.ndarray):
        shape = list(value.shape)
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": shape}
    if isinstance(value, np.generic):
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _as_array(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.frombuffer(value[b"data"], np.dtype(value[b"dtype"])).reshape(value[b"shape"])
    if b"__npgeneric__" in value:
        return np.dtype(value[b"dtype"]).type(value[b"data"])
    return value


def check_policy(metadata: dict[str, Any]) -> None:
    """Raises Problem for a policy that wants to see what LIBERO does not show. openpi's server does not say."""
    wanted = metadata.get("observation", {})
    names = [key[len("observation/") :] if key.startswith("observation/") else key for key in wanted]
    if others := sorted(set(names) - set(OBSERVED)):
        seen, shown = ", ".join(others), ", ".join(OBSERVED)
        raise Problem(f"the policy observes {seen}; LIBERO has {shown}: serve a policy that was trained on it")
    if metadata.get("history", 1) > 1:
        raise Problem(f"the policy observes {metadata['history']} control steps; this client sends one")


def check_server(results: dict[str, Any], metadata: dict[str, Any]) -> None:
    """Note what the server serves. Raises Problem for results of something else."""
    server = {name: metadata.get(name) for name in ("experiment", "checkpoint", "robot")}
    if results["server"] not in ({}, server):
        raise Problem(f"the results are of {results['server']}, and the server has {server}; give another --out")
    results["server"] = server


def observation(seen: dict[str, Any], instruction: str) -> dict[str, Any]:
    """What openpi's client sends of what LIBERO's simulator shows."""
    position, rotation = np.asarray(seen["robot0_eef_pos"]), axis_angle(np.asarray(seen["robot0_eef_quat"]))
    return {
        "observation/image": turned(seen["agentview_image"]),
        "observation/wrist_image": turned(seen["robot0_eye_in_hand_image"]),
        # Metres; axis times angle in rad; both fingers in metres.
        "observation/state": np.concatenate([position, rotation, np.asarray(seen["robot0_gripper_qpos"])]),
        "prompt": instruction,
    }


def turned(picture: Any) -> np.ndarray:
    """A picture [height, width, 3], turned by 180 degrees as in the published demonstrations."""
    return np.ascontiguousarray(np.asarray(picture, np.uint8)[::-1, ::-1])


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """The rotation of a unit quaternion x, y, z, w: its axis times its angle, 0 to 2 pi as robosuite has it."""
    cosine = min(max(float(quaternion[3]), -1.0), 1.0)
    sine = math.sqrt(1.0 - cosine**2)
    return np.zeros(3) if sine < 1e-9 else quaternion[:3] * (2 * math.acos(cosine) / sine)


def evaluate(flags: argparse.Namespace, policy: ServedPolicy, results: dict[str, Any]) -> None:
    """Run the episodes that `results` lacks, and write it after each. Raises Problem."""
    from libero.libero import benchmark

    for name in flags.suite:
        suite = benchmark.get_benchmark_dict()[name]()
        numbers = range(suite.n_tasks) if flags.tasks is None else flags.tasks
        if wrong := [number for number in numbers if number >= suite.n_tasks]:
            raise Problem(f"--tasks {wrong[0]}: {name} has the tasks 0 to {suite.n_tasks - 1}")
        episodes = results["suites"].setdefault(name, {"episodes": []})["episodes"]
        for number in numbers:
            evaluate_task(flags, policy, suite, name, number, episodes, lambda: write(flags.out, results))
    results["complete"] = True
    write(flags.out, results)


def evaluate_task(
    flags: argparse.Namespace,
    policy: ServedPolicy,
    suite: Any,
    name: str,
    number: int,
    episodes: list[dict[str, Any]],
    written: Callable[[], None],
) -> None:
    """Add the trials of a task to `episodes`, and call `written` after each. Raises Problem."""
    from libero.libero.envs import OffScreenRenderEnv

    task = suite.get_task(number)
    done = {one["trial"] for one in episodes if one["task"] == task.name}
    trials = [trial for trial in range(flags.trials) if trial not in done]
    if not trials:
        return
    starts = initial_states(suite, number, task)
    if flags.trials > len(starts):
        raise Problem(f"--trials {flags.trials}: LIBERO publishes {len(starts)} initial states of {task.name}")
    size, file = flags.image_size, libero_file("bddl_files", task, task.bddl_file)
    simulator = OffScreenRenderEnv(bddl_file_name=file, camera_heights=size, camera_widths=size)
    instruction, limit = str(task.language), flags.max_steps or SUITES[name]
    try:
        for trial in trials:
            simulator.seed(flags.seed + trial)
            success, steps = episode(simulator, starts[trial], instruction, policy, limit, flags.execute)
            episodes.append({"task": task.name, "trial": trial, "success": success, "steps": steps})
            written()
            print(f"{name}, {task.language}, trial {trial}: {'success' if success else 'failure'}", flush=True)
    finally:
        simulator.close()


def episode(
    simulator: Any, start: Any, instruction: str, policy: ServedPolicy, max_steps: int, execute: int
) -> tuple[bool, int]:
    """Whether an episode succeeds, and its control steps until then, or all. Raises Problem."""
    simulator.reset()
    seen = simulator.set_init_state(start)
    for _ in range(WAITING_STEPS):
        seen = simulator.step(NO_MOTION)[0]
    actions: list[np.ndarray] = []
    for step in range(max_steps):
        if not actions:
            chunk = policy.actions(observation(seen, instruction))
            if len(chunk) < execute:
                raise Problem(f"--execute {execute}: the policy's chunks have {len(chunk)} actions")
            actions = list(chunk[:execute])
        # The range of the arm's controller; the gripper is open at -1 and closed at 1.
        seen, _, success, _ = simulator.step(np.clip(actions.pop(0), -1.0, 1.0).tolist())
        if success:
            return True, step + 1
    return False, max_steps


def initial_states(suite: Any, number: int, task: Any) -> Any:
    """The published initial states of a task, [n, s]."""
    try:
        return suite.get_task_init_states(number)
    except pickle.UnpicklingError:
        # torch 2.6 and later refuse the file, which has numpy arrays, unless told to trust it as LIBERO does.
        import torch

        return torch.load(libero_file("init_states", task, task.init_states_file), weights_only=False)


def libero_file(what: str, task: Any, name: str) -> str:
    """A file of a task in one of LIBERO's folders."""
    from libero.libero import get_libero_path

    return str(pathlib.Path(get_libero_path(what)) / task.problem_folder / name)


def opened_results(flags: argparse.Namespace) -> dict[str, Any]:
    """The results so far. Raises Problem for a file that is there without --resume, or of other settings."""
    names = ("trials", "tasks", "execute", "max_steps", "image_size", "seed")
    settings = {name: getattr(flags, name) for name in names}
    if not flags.out.exists():
        if not flags.out.absolute().parent.is_dir():
            raise Problem(f"--out {flags.out}: there is no folder {flags.out.parent}; create it first")
        return {"complete": False, "settings": settings, "server": {}, "suites": {}}
    if not flags.resume:
        raise Problem(f"--out {flags.out} exists: give --resume to continue it, or another file")
    try:
        results = json.loads(flags.out.read_text(encoding="utf-8"))
        before = results["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Problem(f"--out {flags.out} has no results of this client: {error!r}") from error
    if changed := [name for name in names if before.get(name) != settings[name]]:
        made_with = ", ".join(f"{name} {before.get(name)}" for name in changed)
        raise Problem(f"--out {flags.out} was made with {made_with}; give the same, or another file")
    results["complete"] = False
    return results


def write(file: pathlib.Path, results: dict[str, Any]) -> None:
    """Write the results with the rates that follow from the episodes, whole or not at all."""
    for suite in results["suites"].values():
        names = dict.fromkeys(one["task"] for one in suite["episodes"])
        suite["tasks"] = {name: rate(one for one in suite["episodes"] if one["task"] == name) for name in names}
        suite["overall"] = rate(suite["episodes"])
    draft = file.with_name(f"{file.name}.tmp")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(draft, file)


def rate(episodes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Successes, trials, their share with its interval, and the mean control steps until success."""
    episodes = list(episodes)
    steps = [one["steps"] for one in episodes if one["success"]]
    low, high = wilson(len(steps), len(episodes))
    mean_steps = statistics.fmean(steps) if steps else None
    counts = {"successes": len(steps), "trials": len(episodes), "mean_steps": mean_steps}
    return dict(counts, rate=len(steps) / len(episodes) if episodes else 0.0, low=low, high=high)


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of a probability of success (Wilson 1927); (0, 1) for no trial."""
    if trials == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = successes / trials, z * z / trials
    middle, half = share + weight / 2, z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(0.0, (middle - half) / (1 + weight)), min(1.0, (middle + half) / (1 + weight))


def table(results: dict[str, Any]) -> str:
    """A line per task and per suite: successes, trials, rate with its interval."""
    lines = []
    for suite, found in results["suites"].items():
        for name, one in [*found["tasks"].items(), (suite, found["overall"])]:
            counts = f"{one['successes']}/{one['trials']}"
            lines.append(f"{counts:>9} {one['rate']:>6.1%}  ({one['low']:.1%} - {one['high']:.1%})  {name}")
    return "\n".join(lines)


def told(problem: str) -> int:
    """Print what is wrong. Returns the exit code of bad input."""
    print(f"evaluate_libero: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
