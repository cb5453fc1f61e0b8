"""How the tools' command lines begin and end: flags in, one message out instead of a traceback."""

import sys
from collections.abc import Callable
from pathlib import Path

from absl import app, flags

_HELP = ("help", "helpshort", "helpfull", "helpxml", "?", "h")


def run(main: Callable[[list[str]], None]) -> None:
    """Calls ``main`` with what the command line has beside flags.

    Help ends with 0. A wrong flag, a ValueError or an OSError of ``main``, which say all that there is to say, end with 1
    and their text behind the tool's name, and an interrupt likewise.
    """
    name = Path(sys.argv[0]).stem

    def parse(arguments: list[str]) -> list[str]:
        try:
            return flags.FLAGS(arguments)
        except flags.Error as error:
            sys.exit(f"{name}: {error}")
        except SystemExit as end:  # absl ends with 1 behind its help, too
            is_help = any(argument.lstrip("-").removesuffix("=true") in _HELP for argument in arguments[1:])
            sys.exit(0 if is_help else end.code)

    def call(arguments: list[str]) -> None:
        try:
            main(arguments[1:])
        except (ValueError, OSError) as error:
            sys.exit(f"{name}: {error}")
        except KeyboardInterrupt:
            sys.exit(f"{name}: interrupted")

    app.run(call, flags_parser=parse)


def no_arguments(arguments: list[str]) -> None:
    """Raises ValueError if there is anything beside flags."""
    if arguments:
        raise ValueError(f"unknown argument {arguments[0]}")
