"""A schedule played with kernels and transfers of whole seconds, against times drawn by hand."""

import pytest

from openpi_train.planning.gpu.schedule import Played, play
from openpi_train.planning.hlo_text import HloInstruction, read_hlo

SECONDS = {"exponential": 3.0, "negate": 2.0, "all-gather-start": 4.0, "all-reduce": 5.0}


def played(lines: str, loop: str = "") -> Played:
    body = f"%body (p: f32[8]) -> f32[8] {{\n{loop}\n}}\n" if loop else ""

    def kernel_s(_: str, one: HloInstruction) -> float | None:
        return SECONDS.get(one.opcode)

    def transfer_s(_: str, one: HloInstruction) -> float | None:
        return SECONDS[one.opcode] if one.opcode.startswith("all-") and not one.opcode.endswith("-done") else None

    return play(read_hlo(f"{body}ENTRY %m (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"), kernel_s, transfer_s)


START = "%s = f32[8]{0} all-gather-start(%p)"
DONE = "%d = f32[8]{0} all-gather-done(%s)"
LONG, SHORT = "%e = f32[8]{0} exponential(%p)", "%n = f32[8]{0} negate(%p)"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([START, LONG, DONE], (4.0, 1.0)),  # of 4 seconds 3 are hidden
        ([START, LONG, SHORT, DONE], (5.0, 0.0)),
        ([LONG, START, DONE, SHORT], (9.0, 4.0)),
        # Two transfers share the link: the second one begins when the first ends, after 4 seconds.
        ([START, START.replace("%s", "%s2"), LONG, DONE, DONE.replace("%s", "%s2")], (8.0, 5.0)),
        # Kernels wait for what is not started and ended apart.
        (["%r = f32[8]{0} all-reduce(%p), to_apply=%add", LONG], (8.0, 5.0)),
        ([START + ', backend_config={"collective_backend_config":{"is_sync":true}}', LONG, DONE], (7.0, 4.0)),
    ],
)
def test_what_kernels_wait_for_is_exposed(lines, expected):
    found = played("\n".join(f"  {line}" for line in lines))
    assert (found.total_s, found.exposed_s) == expected


def test_every_turn_of_a_loop_waits():
    loop = "\n".join(f"  {line}" for line in (START, LONG, DONE))
    trips = 'backend_config={"known_trip_count":{"n":"7"}}'
    found = played(f"  %w = f32[8]{{0}} while(%p), condition=%c, body=%body, {trips}\n  {SHORT}", loop)
    assert found == Played(7 * 4.0 + 2.0, 7 * 1.0)
