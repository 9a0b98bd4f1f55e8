"""ManiSkill's PushCube and StackCube, by imitation of the scripted experts of `envs/maniskill_experts.py`.

ManiSkill's own baselines learn them from its motion planner's demonstrations; its repository has their commands and no
success rates, so none is compared. PushCube is learnt from pictures of its camera, in which the cube is two pixels wide
and its goal ten. StackCube is learnt from states, poses of the cubes included: it has two cameras, with which a control
step takes ten times as long on a CPU.

Command: python -m openpi_train reproduce maniskill_push_act
Hardware: 2 CPU cores, busy, one device. Time: 8.5 CPU min, 19 min of wall time. Result: 24 of 100 episodes (16.7 to
33.2 %, seed 42; 2026-12-01, commit ef396574). The settings of `maniskill_stack_act`, run by hand, did 16 of 50 (20.8
to 45.8 %). The others are not measured.
"""

import dataclasses

from openpi_train.reproduce.reproduction import Reproduction


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
    """A task: how it is simulated, and how many demonstrations are made."""

    id: str
    what: str
    make: str
    episodes: int
    # Control steps of an evaluation's episode: twice as many as a demonstration has, or more.
    max_steps: int


_PUSH = _Task(
    id="PushCube-v1",
    what="from pictures pushes ManiSkill's cube to its goal",
    make="sensor_configs={'width':64,'height':64}",
    episodes=64,
    max_steps=50,
)
_STACK = _Task(
    id="StackCube-v1", what="from states stacks ManiSkill's cubes", make="obs_mode=state", episodes=192, max_steps=100
)
# Of all policies.
_TRAINED = (
    "--data.datasets.0.robot.rate-hz 20 --model.action-horizon 8 --ema-decay 0.99 --num-workers 0 --log-interval 50 "
    "--lr-schedule.kind cosine --lr-schedule.warmup-steps 50 --eval.num-rows 256"
)
_ACT = (
    "act --model.no-use-vae --model.dim-model 64 --model.n-heads 4 --model.dim-feedforward 128 "
    "--model.n-encoder-layers 2 --model.dropout 0 --model.dtype float32 --lr-schedule.peak-lr 1e-3"
)
_DIFFUSION = (
    "diffusion --model.n-obs-steps 1 --model.n-action-steps 8 --model.denoiser mlp "
    "--model.diffusion-step-embed-dim 64 --objective.noise-schedule.prediction-type sample --objective.sampler ddim "
    "--eval.num-sample-steps 10 --lr-schedule.peak-lr 1e-3"
)
_PI0 = (
    "pi0_bridge_traj_tiny --data.robot recorded --data.tokenizer bytes --model.max-token-len 64 "
    "--model.language.width 64 --model.language.depth 2 --model.language.mlp-dim 128 --model.action-expert.width 64 "
    "--model.action-expert.depth 2 --model.action-expert.mlp-dim 128 --model.siglip.width 64 --model.siglip.depth 1 "
    "--model.siglip.mlp-dim 128 --model.siglip.patch-size 8 --lr-schedule.peak-lr 2e-3"
)
_ACT_PICTURES = "--model.image-height 64 --model.image-width 64 --model.backbone-widths 16 32"
_DIFFUSION_PICTURES = "--model.pooling spatial_softmax --model.num-keypoints 16 --model.encoder-widths 16 32"


def _imitated(name: str, policy: str, task: _Task, train: str, steps: int, minutes: float | None) -> Reproduction:
    return Reproduction(
        name=f"maniskill_{name}",
        what=f"{policy} {task.what}, from {task.episodes} scripted demonstrations",
        data={
            "{data}.zarr": f"data collect maniskill:{task.id} --out {{data}}.zarr --episodes-per-task {task.episodes} "
            f'--env.make "{task.make}"'
        },
        train=f"{train} --dataset {{data}}.zarr {_TRAINED} --num-train-steps {steps} --save-interval {steps} "
        f"--eval.interval {steps}",
        evaluations={
            task.id: f'eval {{run}} --env maniskill:{task.id} --env.make "{task.make}" --episodes 100 --execute 4 '
            f"--max-steps {task.max_steps} --held-out 0 --videos 0"
        },
        extra="maniskill",
        module="mani_skill",
        minutes=minutes,
    )


_DP = "a diffusion policy"

ENTRIES = (
    _imitated("push_act", "a small ACT", _PUSH, f"{_ACT} --batch-size 32 {_ACT_PICTURES}", 600, 19),
    _imitated("push_dp", _DP, _PUSH, f"{_DIFFUSION} --batch-size 32 {_DIFFUSION_PICTURES}", 1200, None),
    _imitated("push_pi0", "a small pi0", _PUSH, f"{_PI0} --batch-size 32 --model.action-dim 25", 1200, None),
    _imitated("stack_act", "a small ACT", _STACK, f"{_ACT} --batch-size 64", 4000, None),
    _imitated("stack_dp", _DP, _STACK, f"{_DIFFUSION} --batch-size 128", 4000, None),
    _imitated("stack_pi0", "a small pi0", _STACK, f"{_PI0} --batch-size 64 --model.action-dim 48", 4000, None),
)
