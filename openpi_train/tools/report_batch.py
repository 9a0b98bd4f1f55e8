"""A report's sample batch: rows as the model gets them. Read next: `report.py`."""

import io

import numpy as np
from PIL import Image

from openpi_train.data.opened import OpenedDatasets
from openpi_train.data.tokens import open_tokenizer
from openpi_train.envs.video import side_by_side
from openpi_train.experiment import Experiment
from openpi_train.policy.experiment_json import experiment_from_json
from openpi_train.tools import figures
from openpi_train.tools.page import figure, note, text
from openpi_train.tools.page import figures as beside
from openpi_train.tools.run_files import Missing, RunFiles

_ROWS = 4


def sample_batch(run: RunFiles, like: Experiment | None) -> str:
    """The first training rows of the run. Raises DataError where the data are not here."""
    experiment = experiment_from_json(run.experiment, like)
    data = experiment.open_data()
    if not isinstance(data, OpenedDatasets):
        raise Missing(f"no sample batch: rows of {type(data).__name__} are not shown here.")
    config = experiment.demonstrations
    rows = data.train.batch(np.arange(min(_ROWS, data.train.num_samples)))[0]
    tokenizer = open_tokenizer(experiment.policy, config.tokenizer, offline=config.offline)
    cameras = [name for name in rows if name.startswith("image/")]
    parts = []
    for index, place in enumerate(data.train.describe(np.arange(len(rows["state"])))):
        shown = []
        if cameras:
            pictures = [_as_bytes(rows[name][index]) for name in cameras]
            shown.append(
                figure(_png(side_by_side(pictures)), ", ".join(n.removeprefix("image/") for n in cameras), ".png")
            )
        chunk, own = rows["actions"][index], rows["dim_mask"][index]
        steps = np.flatnonzero(rows["action_mask"][index])
        lines = {str(dim): (steps.tolist(), chunk[steps, dim].tolist()) for dim in np.flatnonzero(own)}
        drawn = figures.lines(lines, unit="normalised", x_label="control step of the chunk")
        shown.append(figure(drawn, "action chunk, by dimension"))
        tokens = rows["prompt_tokens"][index][rows["prompt_mask"][index]]
        said = tokenizer.decode(tokens.tolist()) if len(tokens) else "(this model reads no text)"
        state = np.array2string(np.ravel(rows["state"][index]), precision=2, suppress_small=True, max_line_width=200)
        parts.append(f"<h3>{text(place)}</h3>{note(f'prompt: {said}')}{note(f'state: {state}')}{beside(shown)}")
    lead = "The first training rows: resized, normalised and tokenised, before random changes to images."
    return note(lead) + "".join(parts)


def _as_bytes(image: np.ndarray) -> np.ndarray:
    """A row's picture for people; of several control steps the present one."""
    image = image if image.ndim == 3 else image[-1]
    return image if image.dtype == np.uint8 else np.round((image + 1) * 127.5).astype(np.uint8)


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, format="PNG")
    return file.getvalue()
