"""Records the small programs of `recorded/`, compiled by XLA's GPU compiler. Needs jax's CUDA plugin (0.10.2), no GPU.

    .venv-gpu/bin/python tests/planning/gpu/record_hlo.py

`layers.hlo`: three layers of a product and a tanh on two H100, their weights gathered layer by layer in bfloat16, their
gradients reduce-scattered in float32, then an update. `attention.hlo`: cuDNN's attention and its gradient on one. What
the account does not read is left out of the texts: the tables of source lines, and most of the libraries' settings.
"""

import os
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[2])]

from openpi_train.planning.gpu import plugin

KINDS = ("layers", "attention")
NUM_LAYERS, ROWS, WIDTH = 3, 256, 512
# The libraries' settings are kept on lines with these words.
_READ = ("known_trip_count", 'is_sync":true', "__cublas", "__cudnn")
BATCH, TOKENS, HEADS, HEAD_WIDTH = 2, 64, 4, 128


def layers(mesh):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def layer(x, part):
        with jax.named_scope("gather"):
            weight = jax.lax.all_gather(part.astype(jnp.bfloat16), "fsdp", axis=0, tiled=True)
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ weight), None

    def step(parts, x):
        def loss(parts):
            out, _ = jax.lax.scan(layer, x, parts)
            return (out.astype(jnp.float32) ** 2).sum()

        with jax.named_scope("gradient"):
            gradient = jax.grad(loss)(parts)
        with jax.named_scope("optimizer"):
            return parts - 0.1 * gradient

    def on_device(parts, x):
        return step(parts, x)

    cut, rows = PartitionSpec(None, "fsdp"), PartitionSpec("fsdp")
    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(cut, rows), out_specs=cut)
    shardings = tuple(NamedSharding(mesh, spec) for spec in (cut, rows))
    parts = jax.ShapeDtypeStruct((NUM_LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((2 * ROWS, WIDTH), jnp.bfloat16)
    jitted = jax.jit(mapped, in_shardings=shardings, out_shardings=shardings[0], donate_argnums=0)
    return jitted.lower(parts, x).compile()


def attention(mesh):
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    def loss(query, key, value):
        with jax.named_scope("attention"):
            out = jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
        return (out.astype(jnp.float32) ** 2).sum()

    heads = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, HEAD_WIDTH), jnp.bfloat16)
    one = NamedSharding(mesh, PartitionSpec())
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)), in_shardings=one, out_shardings=one).lower(*[heads] * 3).compile()


def shortened(text: str) -> str:
    """The text without what the account does not read."""
    head, _, computations = text.partition("\n\n%")
    text = f"{head.splitlines()[0]}\n\n%{computations}"
    text = re.sub(r' ?(?:stack_frame_id=\d+|(?:scheduling|deduplicated)_name="[^"]*")', "", text)
    text = re.sub(r", (?:frontend_attributes|sharding)=\{[^}]*\}", "", text).replace(", metadata={}", "")
    settings = ", backend_config="
    kept = (line if any(word in line for word in _READ) else line.partition(settings)[0] for line in text.splitlines())
    return "\n".join(kept) + "\n"


def main() -> None:
    plugin.set_environment(os.environ, 2, 1)
    import jax
    from jax.sharding import Mesh

    from openpi_train.planning.gpu.targets import TARGETS

    (target,) = (one for one in TARGETS if one.kind == "h100")
    for kind, make, num_devices in zip(KINDS, (layers, attention), (2, 1), strict=True):
        with plugin.pretended(target):
            mesh = Mesh(plugin.devices(target, 80 * 2**30, num_devices, 1), ("fsdp",))
            with jax.set_mesh(mesh):
                compiled = make(mesh)
        (FOLDER / "recorded" / f"{kind}.hlo").write_text(shortened(compiled.as_text()))


if __name__ == "__main__":
    main()
