"""The version of the plugin contract, and what a plugin's statement of it means.

"MAJOR.MINOR". A greater minor number adds: new optional methods and fields with defaults, new modules; whatever was
written for a lower one goes on working. A greater major number may change or remove, and a plugin has to be looked at.
A plugin states the version it was written for, as a literal, in `contract`: "1.0", or 1 for "1.0". It is taken where
the major numbers are equal and the plugin's minor number is not above qengine's.
"""

from __future__ import annotations

import re

CONTRACT_VERSION = "1.0"
"""Version of both plugin contracts."""

Version = tuple[int, int]


def parse_contract(stated: object) -> Version | None:
    """(major, minor) of what a plugin states: an int or "MAJOR.MINOR". None when it is neither."""
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated, 0
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", stated) if isinstance(stated, str) else None
    return (int(match[1]), int(match[2])) if match else None


def written_for(stated: object) -> str:
    """The stated version as text, for tables and errors."""
    version = parse_contract(stated)
    if version is not None:
        return f"{version[0]}.{version[1]}"
    return "none stated" if stated is None else repr(stated)[:40]


def accepts_contract(stated: object) -> bool:
    """Whether a plugin that states this runs with this qengine."""
    version, ours = parse_contract(stated), parse_contract(CONTRACT_VERSION)
    assert ours is not None
    return version is not None and version[0] == ours[0] and version[1] <= ours[1]
