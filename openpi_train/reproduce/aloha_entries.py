"""gym-aloha's cube transfer, from LeRobot's dataset of people's demonstrations in the simulator."""

from openpi_train.reproduce.reproduction import PublishedFigure, Reproduction

ENTRIES = (
    Reproduction(
        name="aloha_act",
        what="ACT from one camera hands a cube from arm to arm, from 50 human demonstrations",
        data={
            "{data}": "hf download lerobot/aloha_sim_transfer_cube_human --repo-type dataset --local-dir {data}",
            "resnet18-f37072fd.pth": "curl -LO https://download.pytorch.org/models/resnet18-f37072fd.pth",
        },
        train="act_aloha_sim --data.datasets.0.source.path {data} --weight-loader.params-path resnet18-f37072fd.pth",
        evaluations={"transfer_cube": "eval {run} --env aloha:transfer_cube --episodes 500 --held-out 0 --videos 0"},
        extra="aloha",
        module="gym_aloha",
        machine="1 GPU",
        published=PublishedFigure(
            success=0.876,
            source="LeRobot's ACT, 500 episodes of 400 steps, all 100 actions of a chunk executed: its model card of "
            "act_aloha_sim_transfer_cube_human",
        ),
    ),
)
