"""`python -m mxdiag`, and the console command.

Nothing heavy is imported at the top: Ctrl-C must be answered from the first moment on.
"""

import os
import signal


def _stop(_number: int, _frame: object) -> None:
    """End at once: an exception may be lost in an import, and nothing has been begun yet."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Run the command line; its own handler of Ctrl-C takes over once it is imported."""
    try:  # noqa: SIM105 (nothing may be imported before this)
        signal.signal(signal.SIGINT, _stop)
    except ValueError:  # not in the main thread, which Ctrl-C is for
        pass
    from mxdiag.cli import main as run

    run()


if __name__ == "__main__":
    main()
