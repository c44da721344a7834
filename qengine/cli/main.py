"""The `qengine` command. Nothing is imported until Ctrl-C has an answer: imports take a good part of a second."""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run one command. 0: done; 2: something the user gave cannot work (one line on stderr); 130: interrupted; 141:
    the reader of the output has gone."""
    try:
        from qengine.cli.commands import run_command

        return run_command(argv)
    except KeyboardInterrupt:
        print("qengine: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        if argv is None:  # the process ends: Ctrl-C while the interpreter tidies up would print a traceback
            import signal

            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    sys.exit(main())
