"""DeepSpeed's JSON configs, read as flags of ours. Read next: `translation.py`, `unmapped.py`."""

from openpi_train.interop.deepspeed.translation import Translation, translate, translate_file

__all__ = ["Translation", "translate", "translate_file"]
