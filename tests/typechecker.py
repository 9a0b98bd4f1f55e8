"""The checker behind the suite's run-time type checks: beartype, with int accepted where float is asked (PEP 484)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
