"""Push-T of gym-pusht. Its demonstrations are people's: there is no scripted expert, so they are fetched."""

from openpi_train.reproduce.reproduction import PublishedFigure, Reproduction

ENTRIES = (
    Reproduction(
        name="pusht_dp",
        what="a diffusion policy from images pushes the T onto its target, from 206 human demonstrations",
        data={
            "{data}/pusht/pusht_cchi_v7_replay.zarr": "curl -L --create-dirs -o {data}/pusht.zip "
            "https://diffusion-policy.cs.columbia.edu/data/training/pusht.zip && unzip -d {data} {data}/pusht.zip"
        },
        train="pusht_dp --data.datasets.0.source.path {data}/pusht/pusht_cchi_v7_replay.zarr",
        # `img` is the store's name of the camera.
        evaluations={"pusht": "eval {run} --env pusht --env.cameras img=pixels --episodes 500 --held-out 0 --videos 0"},
        extra="pusht",
        module="gym_pusht",
        machine="1 GPU",
        published=PublishedFigure(
            success=0.642,
            source="diffusion_policy's own code in gym-pusht, 500 episodes of 300 steps, a coverage of 0.95 at any "
            "step: LeRobot's model card of diffusion_pusht",
        ),
    ),
)
