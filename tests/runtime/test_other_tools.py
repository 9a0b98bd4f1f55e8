"""What other tools' variables and keys ask and nothing does is told once; errors name the keys that set our flags."""

import pytest

from openpi_train.doors import hydra_overrides
from openpi_train.doors.config_file import ConfigFile
from openpi_train.doors.deepspeed import unmapped
from openpi_train.doors.posttraining import without_flag
from openpi_train.doors.ript import without_ript_flag
from openpi_train.doors.vla import without_vla_flag
from openpi_train.runtime import other_tools
from openpi_train.runtime.exits import IndivisibleError, UsageError

# The tables of keys that ask for what is not done, and those of the reasons why keys have no flag.
TABLES = {
    "deepspeed": (unmapped.NOT_DONE, unmapped.UNMAPPED),
    "posttraining": (without_flag.NOT_DONE, without_flag.WITHOUT_FLAG),
    "ript": (without_ript_flag.NOT_DONE, without_ript_flag.WITHOUT_RIPT_FLAG),
    "vla": (without_vla_flag.NOT_DONE, without_vla_flag.WITHOUT_VLA_FLAG),
    "hydra": (hydra_overrides._NOT_DONE, hydra_overrides._NO_EFFECT),
}
GUIDES = ("NCCL_TIMEOUT", "CUDA_LAUNCH_BLOCKING", "TORCH_DISTRIBUTED_DEBUG", "DEEPSPEED_LOG_LEVEL")


def test_one_text_has_all_that_is_asked_and_what_to_give_instead():
    other_tools.note_not_done({"performance.max_memory_per_gpu_gb: 24": "a fraction"})
    text = other_tools.warning({**dict.fromkeys(GUIDES, "1"), "NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"})
    assert text is not None
    first, *lines = text.splitlines()
    assert first == "5 keys and variables ask for what is not done:"
    assert [line.split(" -> ")[0].strip() for line in lines[:-1]] == [
        "NCCL_TIMEOUT=1",
        "TORCH_DISTRIBUTED_DEBUG=1",
        "DEEPSPEED_LOG_LEVEL=1",
        "CUDA_LAUNCH_BLOCKING=1",
    ]
    assert lines[-1] == "  performance.max_memory_per_gpu_gb: 24 -> a fraction"


def test_nothing_is_told_where_nothing_is_asked():
    assert other_tools.warning({"NCCL_DEBUG": "INFO", "CUDA_LAUNCH_BLOCKING": "0", "NCCL_TIMEOUT": ""}) is None


@pytest.mark.parametrize("tool", TABLES)
def test_what_is_not_done_has_a_reason_too_and_no_flag(tool):
    not_done, reasons = TABLES[tool]
    for key in (entry.partition("=")[0] for entry in not_done):
        above = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
        assert any(name in reasons for name in above), key


def test_only_values_that_ask_are_told():
    instead = {"a.device": "x", "b": "y", "c": "z", "d=nvme": "w", "e": "v"}
    config = {"a": {"device": "none"}, "b": False, "c": 3, "d": "nvme", "e": "auto", "f": 1}
    file = ConfigFile(config, instead, "a tool", open_word=None)
    assert file.not_done(instead) == {"c: 3": "z", 'd: "nvme"': "w"}
    file.flag("some-flag", 3, "c")
    assert file.not_done(instead) == {'d: "nvme"': "w"}


def test_an_error_ends_with_the_keys_of_the_flags_that_it_names():
    other_tools.note_keys("zero2.json", {"--batch-size": "train_batch_size", "--grad-accum": "accum", "--x": "y"})
    with pytest.raises(IndivisibleError) as told, other_tools.errors_in_their_keys():
        raise IndivisibleError("--batch-size 32 does not divide; try --batch-size 64, or another --grad-accum.")
    assert str(told.value).splitlines()[1:] == [
        "in the keys of zero2.json:",
        "  --batch-size: train_batch_size",
        "  --grad-accum: accum",
    ]
    with pytest.raises(UsageError, match=r"^no --flag of theirs$"), other_tools.errors_in_their_keys():
        raise UsageError("no --flag of theirs")
