"""The type of what is read from JSON, or written as such: settings, manifests, records, metadata of other projects."""

from collections.abc import Mapping
from typing import Any

# By key: None, flags, numbers, strings, and lists and objects of these. Whoever reads an entry checks its type.
JsonObject = Mapping[str, Any]
