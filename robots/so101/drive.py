"""Drive an SO-101 with a served policy, and record it, with a person's corrections, as a LeRobot dataset.

    python robots/so101/drive.py --task "put the cube into the box" --out corrections --units degrees \\
        --follower-port /dev/ttyACM0 --follower-calibration follower.json \\
        --leader-port /dev/ttyACM1 --leader-calibration leader.json --cameras front 0

Keys: Enter starts and ends an episode, space takes over with the leader arm and hands back, x drops the episode, q
ends.
The feature `is_intervention` of the dataset marks the steps of the person, without those in which the follower still
moved to where the leader was. Read next: `arm.py`; `docs/howto/real_arm.md` has all commands.
"""

import collections
import contextlib
import dataclasses
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import tyro
from arm import NAMES, Arm, ArmError, Units, read_calibration
from cameras import Camera, CameraError
from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from openpi_train.data.core import image
from openpi_train.data.formats.lerobot import LeRobotWriter
from openpi_train.policy import wire
from openpi_train.serve.asynchronous import AsynchronousActor

# Who moves the arm in a control step; None: the episode is over.
Who = Literal["policy", "person"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Drive an SO-101 with a served policy and record it."""

    # The instruction.
    task: str
    # Folder of the new dataset. Without it nothing is recorded.
    out: str | None = None
    # The units of the policy's dataset: "degrees" is LeRobot's use_degrees, its default since 2026; "range" -100..100.
    units: Units
    follower_port: str
    follower_calibration: str
    # The arm of the person who corrects.
    leader_port: str | None = None
    leader_calibration: str | None = None
    # By name, as in the policy's dataset: a number, a device or the address of a stream.
    cameras: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The largest difference of a goal and the present position, in units, of every joint.
    max_relative_target: float = 5.0
    num_episodes: int = 20
    # Longest duration of an episode.
    episode_s: float = 60.0
    server: str = "ws://127.0.0.1:8000"
    # The server's --api-key-file.
    api_key_file: str | None = None


class Picture(Protocol):
    """What a camera is here."""

    def read(self) -> np.ndarray:
        """The newest picture, uint8 [height, width, 3]."""
        ...


class Episode:
    """What happened, control step by control step. Pictures are kept as JPEG until they are written."""

    def __init__(self) -> None:
        self.states: list[np.ndarray] = []
        self.actions: list[np.ndarray] = []
        self.is_intervention: list[bool] = []
        self.pictures: dict[str, list[bytes]] = collections.defaultdict(list)

    def add(self, state: np.ndarray, action: np.ndarray, by_person: bool, pictures: Mapping[str, np.ndarray]) -> None:
        """Add a control step: state [6], the action [6] that was sent, and a picture of every camera."""
        self.states.append(state)
        self.actions.append(action)
        self.is_intervention.append(by_person)
        for name, picture in pictures.items():
            self.pictures[name].append(image.encode(picture))

    def write(self, writer: LeRobotWriter, task: str) -> None:
        """Write it as the next episode."""
        columns = {
            "observation.state": np.stack(self.states),
            "action": np.stack(self.actions),
            "is_intervention": np.array(self.is_intervention),
        }
        frames = {f"observation.images.{name}": map(image.decode, kept) for name, kept in self.pictures.items()}
        writer.add_episode(columns, frames, task=task)


class Observer:
    """Makes observations for the server, with the `history` of control steps that its policy sees."""

    def __init__(self, follower: Arm, cameras: Mapping[str, Picture], task: str, history: int = 1):
        self._follower, self._cameras, self._task, self._history = follower, cameras, task, history
        self._seen: collections.deque[dict[str, np.ndarray]] = collections.deque(maxlen=history)

    def reset(self) -> None:
        """Forget the steps before: a new episode begins."""
        self._seen.clear()

    def look(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The present state [6] and pictures; they become part of the history."""
        state, pictures = self._follower.read(), {name: camera.read() for name, camera in self._cameras.items()}
        now = {"state": state} | {f"observation/images/{name}": picture for name, picture in pictures.items()}
        self._seen.extend([now] * (1 if self._seen else self._history))
        return state, pictures

    def observation(self) -> dict[str, Any]:
        """What was seen, as the server expects it."""
        now = self._seen[-1]
        if self._history > 1:
            now = {key: np.stack([one[key] for one in self._seen]) for key in now}
        return {**now, "prompt": self._task}


def run_episode(
    actor: AsynchronousActor,
    observer: Observer,
    follower: Arm,
    leader: Arm | None,
    ask: Callable[[], Who],
    *,
    num_steps: int,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Episode:
    """Drive for at most `num_steps` control steps at the actor's rate, and return what happened.

    `ask` is called once per step, and says who moves the arm. A person moves it with the leader: the follower goes
    there at most `max_relative_target` per step, and the steps count as an intervention from when it is there on. When
    the person hands back, the policy begins with a new action chunk.
    """
    episode, by_person = Episode(), False
    actor.reset()
    observer.reset()
    before: Who = "policy"
    due = clock()
    for _ in range(num_steps):
        who = ask()
        if who is None:
            break
        state, pictures = observer.look()
        if who == "person":
            assert leader is not None, "a person takes over with a leader arm"
            goal = leader.read()
            by_person = by_person or bool((np.abs(goal - state) <= follower.max_relative_target).all())
        else:
            if before == "person":
                actor.reset()
            goal, by_person = actor.act(observer.observation()), False
        sent = follower.write(goal, state)
        episode.add(state, sent, by_person, pictures)
        before = who
        due = max(due + 1 / actor.robot_hz, clock())
        if (left := due - clock()) > 0:
            sleep(left)
    return episode


class Keys:
    """The keys of the terminal, a context: Enter, space, x and q."""

    def __init__(self, has_leader: bool):
        self._has_leader, self._who, self.last = has_leader, "policy", ""

    def __enter__(self) -> "Keys":
        self._before = termios.tcgetattr(sys.stdin.fileno())
        tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    def wait(self) -> str:
        """The next key among Enter ("\\n") and q."""
        while (key := os.read(sys.stdin.fileno(), 1).decode(errors="replace")) not in ("\n", "q", ""):
            pass
        return key or "q"

    def start(self) -> None:
        """A new episode, which begins with the policy."""
        self._who, self.last = "policy", ""

    def who(self) -> Who:
        """Who moves the arm now; None after Enter, x or q, which is `last`."""
        while select.select([sys.stdin], [], [], 0)[0]:
            key = os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q"
            if key in ("\n", "x", "q"):
                self.last = key
                return None
            if key == " " and self._has_leader:
                self._who = "policy" if self._who == "person" else "person"
                print("you move the arm with the leader" if self._who == "person" else "the policy moves the arm")
        return "person" if self._who == "person" else "policy"


def features(cameras: Mapping[str, Picture]) -> dict[str, dict[str, Any]]:
    """The features of the dataset, named as LeRobot names those of an SO-101."""
    joints = {"dtype": "float32", "shape": [len(NAMES)], "names": list(NAMES)}
    videos = {
        f"observation.images.{name}": {
            "dtype": "video",
            "shape": list(camera.read().shape),
            "names": ["height", "width", "channels"],
        }
        for name, camera in cameras.items()
    }
    mark = {"dtype": "bool", "shape": [1], "names": None}
    return {"observation.state": joints, "action": joints, "is_intervention": mark, **videos}


def check_policy(about: Mapping[str, Any], cameras: Mapping[str, object]) -> None:
    """Raise ValueError if the served policy is of another robot or sees other cameras."""
    for what in ("state_names", "action_names"):
        if list(about[what]) != list(NAMES):
            raise ValueError(
                f"the policy's {what} are {', '.join(about[what])}, and those of an SO-101 {', '.join(NAMES)}: serve a "
                "policy that was trained on a dataset of this arm"
            )
    wanted = {key for key in about["observation"] if key.startswith("observation/images/")}
    given = {f"observation/images/{name}" for name in cameras}
    if lacking := sorted(wanted - given):
        names = " ".join(f"{key.removeprefix('observation/images/')} SOURCE" for key in lacking)
        raise ValueError(f"the policy sees {', '.join(lacking)}, too: add --cameras {names}")


def main(flags: Flags) -> None:
    """Drive episodes until q, or their number. Raises ArmError, CameraError, ValueError, OSError."""
    if (flags.leader_port is None) != (flags.leader_calibration is None):
        raise ValueError("a leader needs both --leader-port and --leader-calibration")
    if not sys.stdin.isatty():
        raise ValueError("start it in a terminal: keys say who moves the arm")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(open_server(flags))
        about = wire.decode(server.recv())
        check_policy(about, flags.cameras)
        cameras = {name: Camera(source) for name, source in flags.cameras.items()}
        for camera in cameras.values():
            stack.callback(camera.close)
        writer = None
        if flags.out is not None:
            writer = LeRobotWriter(
                flags.out, fps=about["control_hz"], features=features(cameras), robot_type="so101_follower"
            )
        follower = stack.enter_context(
            Arm(
                flags.follower_port,
                read_calibration(flags.follower_calibration),
                flags.units,
                max_relative_target=flags.max_relative_target,
            )
        )
        leader = None
        if flags.leader_port is not None and flags.leader_calibration is not None:
            calibration = read_calibration(flags.leader_calibration)
            leader = stack.enter_context(Arm(flags.leader_port, calibration, flags.units))

        def infer(observation: dict[str, Any]) -> dict[str, Any]:
            server.send(wire.encode(observation))
            return wire.decode(server.recv())

        actor = AsynchronousActor(infer, about)
        stack.callback(actor.close)
        observer = Observer(follower, cameras, flags.task, about["history"])
        observer.look()
        print("waiting for the first answers")
        actor.warm_up(observer.observation())
        keys = stack.enter_context(Keys(leader is not None))
        follower.torque_on()
        drive(flags, actor, observer, follower, leader, keys, writer)
        if writer is not None and writer.num_episodes:
            print(f"wrote {writer.finish()}: {writer.num_episodes} episodes")


def drive(
    flags: Flags,
    actor: AsynchronousActor,
    observer: Observer,
    follower: Arm,
    leader: Arm | None,
    keys: Keys,
    writer: LeRobotWriter | None,
) -> None:
    """Drive and write episode after episode, as the keys say."""
    for number in range(flags.num_episodes):
        print(f"episode {number}: arrange the scene, then Enter; q ends")
        if keys.wait() == "q":
            return
        keys.start()
        num_steps = round(flags.episode_s * actor.robot_hz)
        episode = run_episode(actor, observer, follower, leader, keys.who, num_steps=num_steps)
        kept = keys.last != "x" and len(episode.states) > 0
        if writer is not None and kept:
            episode.write(writer, flags.task)
        marked = sum(episode.is_intervention)
        print(f"{len(episode.states)} steps, {marked} of them yours{'' if kept else ': dropped'}; {actor.counts}")
        if keys.last == "q":
            return


def open_server(flags: Flags) -> ClientConnection:
    """A connection to the policy server. Raises ConnectionError if there is none."""
    headers = {}
    if flags.api_key_file is not None:
        headers["Authorization"] = f"Api-Key {Path(flags.api_key_file).read_text().strip()}"
    try:
        return connect(flags.server, max_size=None, additional_headers=headers)
    except (OSError, WebSocketException) as error:
        raise ConnectionError(
            f"no policy server at {flags.server} ({error}): start `python -m openpi_train serve RUN`"
        ) from error


if __name__ == "__main__":
    # A kill leaves the contexts, too, which take the torque off.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main(tyro.cli(Flags))
    except (ArmError, CameraError, ValueError, OSError, WebSocketException, wire.ServerError) as error:
        sys.exit(f"drive: {error}")
