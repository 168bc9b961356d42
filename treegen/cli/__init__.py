"""The command line: explain a tree, print its kernels, account for decodings, measure policies, compare with peers,
list what there is, generate trees, look into the policy cache, report what this machine has.
"""

from __future__ import annotations

import io
import os
import sys
import traceback as tracebacks
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from treegen.cli import bench, cache, devices, doctor, plans, trees, tuning, warming
from treegen.ir.errors import TreegenError

# The root of unknown options, missing arguments and values of a wrong type: typer raises it but does not export it.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(plans.explain)
app.command()(plans.emit)
app.command("io")(plans.account_workload)
app.command()(devices.profile)
app.command()(tuning.tune)
app.command()(warming.warm)
app.command()(bench.bench)
app.command()(plans.strategies)
app.command("targets")(devices.list_targets)
app.command()(doctor.doctor)
app.add_typer(trees.app, name="generate")
app.add_typer(cache.app, name="cache")


@app.callback()
def program(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print where an error comes from as well.")] = False,
) -> None:
    """A kernel compiler for tree attention."""
    if isinstance(context.obj, dict):
        context.obj["traceback"] = traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 2, and one line on stderr, when something is wrong with the
    arguments or with what they name.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a drawing, where the encoding has no lines
    settings: dict[str, Any] = {}
    try:
        code = app(args=arguments, prog_name="treegen", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except TreegenError as error:
        if settings.get("traceback"):
            tracebacks.print_exc()
        message = str(error)
    except _UsageError as error:
        # Without a command the message is the help: all of it, or nothing when it is printed already.
        message = error.format_message()
        if not message or "\n" in message:
            print(message, end="", file=sys.stderr)
            return 2
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone (`| head`), which typer may have noticed first. What is still buffered goes
        # nowhere, so that the interpreter does not fail on it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        message = f"output cannot be written: {error.strerror}"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(f"treegen: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
