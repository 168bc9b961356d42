"""The command line: explains plans, prints kernels, accounts for decodings, measures policies and other libraries,
runs models, generates trees, shows cached policies, and reports on this machine.
"""

from __future__ import annotations

import io
import os
import sys
import traceback as tracebacks
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer

from treegen.cli import (
    bench_command,
    cache_commands,
    doctor,
    generate_commands,
    plan_commands,
    run_command,
    target_commands,
    tune_command,
    warm_command,
)
from treegen.ir.errors import TreegenError, TreegenWarning
from treegen.version import VERSION

# The base class of errors about unknown options, missing arguments and wrong values. typer does not export it.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(plan_commands.explain)
app.command()(plan_commands.emit)
app.command("io")(plan_commands.account_workload)
app.command()(target_commands.profile)
app.command()(tune_command.tune)
app.command()(warm_command.warm)
app.command()(bench_command.bench)
app.command()(run_command.run)
app.command()(plan_commands.strategies)
app.command("targets")(target_commands.list_targets)
app.command()(doctor.doctor)
app.add_typer(generate_commands.app, name="generate")
app.add_typer(cache_commands.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"treegen {VERSION}")
        raise typer.Exit


@app.callback()
def program(
    context: typer.Context,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print the traceback of an error as well.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A kernel compiler for tree attention."""
    if isinstance(context.obj, dict):
        context.obj["traceback"] = traceback


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Warnings of treegen are printed to stderr, one line each.

    Returns:
        The exit code. It is 2, after one line on stderr, where arguments or files are wrong, or where the command needs
        a package that is not installed.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the encoding may have no characters for drawings
    settings: dict[str, Any] = {}
    shown, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        code = app(args=arguments, prog_name="treegen", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (TreegenError, ModuleNotFoundError) as error:
        if settings.get("traceback"):
            tracebacks.print_exc()
        message = _absence(error) if isinstance(error, ModuleNotFoundError) else str(error)
    except _UsageError as error:
        # Without a command the message is the help, or empty where that is printed already.
        message = error.format_message()
        if not message or "\n" in message:
            print(message, end="", file=sys.stderr)
            return 2
    except (BrokenPipeError, SystemExit):
        # The reader of our output has gone (`| head`), which typer may have noticed first. Buffered output is thrown
        # away, or the interpreter would fail on it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno is None:  # not about a file: a package's shared library cannot be loaded
            raise
        message = f"output cannot be written: {error.strerror}"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        warnings.formatwarning = shown
    print(f"treegen: error: {message}", file=sys.stderr)
    return 2


def _absence(error: ModuleNotFoundError) -> str:
    """Describes a missing package. Raises the error again if the module belongs to treegen."""
    package = (error.name or "treegen").partition(".")[0]
    if package == "treegen":
        raise error
    return f"{package} = not installed: this command needs it; install {package}"


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Formats a warning. Those of treegen leave out the line of code that raised them."""
    if issubclass(category, TreegenWarning):
        return f"treegen: warning: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


if __name__ == "__main__":
    sys.exit(main())
