"""python -m breakable_cuda_graphs demo | doctor

The hard problem: these two are run where nothing is known to work. So nothing is imported here
before it is needed, and what is missing is an answer, not a traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command == "demo":
        from . import demo

        return demo.main(simulated=options.simulated, neutral=options.neutral)
    from . import doctor

    return doctor.main()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m breakable_cuda_graphs",
        description="Captured CUDA graphs with eager Python between them.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="capture, replay and check a small program",
        description="Capture, replay and check a small program: on the GPU where torch or the driver "
        "reaches one, else on a simulated device. The exit status is 1 if a result is wrong.",
    )
    demo.add_argument(
        "--simulated", action="store_true", help="use the simulated device even where a GPU is"
    )
    demo.add_argument("--neutral", action="store_true", help="use the driver alone, without torch")
    commands.add_parser(
        "doctor",
        help="say what works on this machine",
        description="Say what works on this machine, and what to do about what does not. The exit "
        "status is 1 if something that is installed cannot be used.",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
