"""What the family exchanges with another project: the tensors of torch's `Sequential(Linear, Tanh, Linear)`.

actor.safetensors                    net.{0,2}.{weight,bias}
assets/<asset_id>/norm_stats.json    as beside openpi's checkpoints
"""

from cloning import CloningConfig

from openpi_train.interop import openpi, safetensors_file
from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.interop.openpi_torch import joined_params, layouts_of, needed
from openpi_train.interop.stored_leaves import Stored
from openpi_train.interop.torch_names import lay_out_tensors, tensors_of
from openpi_train.runtime.exits import UsageError

FILE = "actor.safetensors"
_PARTS = {"hidden": "net.0", "outputs": "net.2"}
_TENSORS = {"kernel": ("weight", "i o -> o i"), "bias": ("bias", "o -> o")}


def layout(name, shape):
    """The tensor of a parameter, by its path, and how their dims follow from each other."""
    part, leaf = name.split("/")
    tensor, dims = _TENSORS[leaf]
    return lay_out_tensors(f"{_PARTS[part]}.{tensor}", dims, shape)


def open_actor(place, model):
    model, tensors = needed(model, place), safetensors_file.open_file(place, FILE)
    params = joined_params(place, tensors, layouts_of(model, layout), model)
    return Stored(where=str(place), format="actor", params=params, norm_stats=openpi.read_norm_stats(place))


def prepare_actor(stored, model):
    if not isinstance(model, CloningConfig):
        raise UsageError("actor.safetensors is for behaviour cloning: give the experiment of such a policy")

    def write(directory):
        directory.mkdir(parents=True)
        with tensors_of(stored.params, directory, layout) as tensors:
            safetensors_file.write_file(directory / FILE, tensors)
        openpi.write_norm_stats(directory, stored.norm_stats)

    return write


CLONING = Exchange(
    family="cloning",
    models=(CloningConfig,),
    formats=(
        Format(
            name="actor",
            summary="behaviour cloning's: a folder with actor.safetensors",
            recognises=lambda place: place.has(FILE),
            open=open_actor,
            prepare=prepare_actor,
        ),
    ),
)
