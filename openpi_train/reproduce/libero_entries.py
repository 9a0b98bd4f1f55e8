"""pi0.5 on LIBERO's four suites: openpi's published weights, and openpi's training from its base model."""

from openpi_train.reproduce.reproduction import PublishedFigure, Reproduction

_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
_PUBLISHED = PublishedFigure(
    success=0.9685,
    source="openpi's pi05_libero, 50 episodes of each of the 40 tasks, a new chunk after 5 actions: mean of the four "
    "suites in its examples/libero",
)


def _evaluations(checkpoint: str) -> dict[str, str]:
    return {suite: f"eval {checkpoint} --env libero:{suite} --episodes 50 --held-out 0 --videos 0" for suite in _SUITES}


ENTRIES = (
    Reproduction(
        name="pi05_libero",
        what="openpi's published pi0.5 does the 40 tasks of four suites of LIBERO",
        evaluations=_evaluations("gs://openpi-assets/checkpoints/pi05_libero --experiment pi05_libero"),
        extra="libero",
        module="libero",
        machine="1 GPU of 24 GB",
        published=_PUBLISHED,
    ),
    Reproduction(
        name="pi05_libero_trained",
        what="pi0.5 trained on LIBERO from openpi's base model does the 40 tasks of four suites",
        data={"{data}": "hf download physical-intelligence/libero --repo-type dataset --local-dir {data}"},
        train="pi05_libero --data.datasets.0.source.path {data}",
        evaluations=_evaluations("{run}"),
        extra="libero",
        module="libero",
        machine="8 GPUs of 80 GB",
        published=_PUBLISHED,
    ),
)
