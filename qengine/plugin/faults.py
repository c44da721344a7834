"""Whose code an exception comes from: a plugin that raises what its contract does not allow is named, not us."""

from __future__ import annotations

import traceback as tracebacks
from pathlib import Path

from qengine.errors import PluginError
from qengine.plugin.discovery import OWN_DISTRIBUTION, PluginRecord, first_line, list_plugins


def plugin_fault(e: BaseException) -> PluginError | None:
    """One line about an exception that a third-party plugin raised, or that was raised in what it called; None for any
    other. Its place is the plugin's last line on the way."""
    owners = {r.value.split(":")[0].split(".")[0]: r for r in list_plugins() if r.distribution != OWN_DISTRIBUTION}
    found: tuple[PluginRecord, tracebacks.FrameSummary] | None = None
    for frame, line in tracebacks.walk_tb(e.__traceback__):
        owner = owners.get(str(frame.f_globals.get("__name__", "")).split(".")[0])
        if owner is not None:
            code = frame.f_code
            found = owner, tracebacks.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
    if found is None:
        return None
    record, at = found
    return PluginError(
        f"plugin {record.name!r} of {record.origin} fails in {at.name} ({Path(at.filename).name}:{at.lineno}): "
        f"{first_line(e)}",
        hint=f"`qengine plugins check {record.name}` tries it alone",
    )
