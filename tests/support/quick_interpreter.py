"""Triton's interpreter with a third of its work left out."""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.runtime import interpreter


def install() -> None:
    """For every call of a device function the interpreter looks through triton.language and replaces what it finds
    there by its own, though all of it was replaced when the kernel was launched. With this it is done once a launch.
    Nothing happens under a Triton whose interpreter has other parts."""
    if not hasattr(interpreter, "_LangPatchScope") or not hasattr(interpreter, "_patch_lang"):
        return
    plain = interpreter._patch_lang
    modules: dict[Any, set[Any]] = {}
    done: set[Any] = set()
    """Modules that the running kernel or a function that it has called already has patched."""

    def patch_lang(fn: Any) -> Any:
        if fn not in modules:
            modules[fn] = {v for v in fn.__globals__.values() if v is interpreter.tl or v is core}
        if done and modules[fn] <= done:
            return interpreter._LangPatchScope()
        outermost = not done
        scope = plain(fn)
        done.update(modules[fn])
        if outermost:
            restore = scope.restore

            def restore_and_forget() -> None:
                done.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_lang
