"""The page on which people compare clips, for all runs below a folder.

    python -m pbrl.label runs/                       # opens the browser
    python -m pbrl.label runs/ --export answers.csv  # or .parquet: all answers

It shares nothing with a run but the files in its folder: either may be stopped and started again at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import secrets
import socket
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import csv, parquet

from pbrl.report.text import spreadsheet_cell
from pbrl.run.answer_table import SCHEMA, answer_table
from pbrl.run.command_line import wrapped
from pbrl.run.files import write_atomically
from pbrl.run.questions import ANNOTATOR, QuestionsError, asking_folders
from pbrl.run.settings import ConfigurationError

TOKEN_FILE = ".label_token"  # the same address after a restart; nobody else may read it


class LabelError(RuntimeError):
    """The page cannot be served; the message says what to do."""


def token_of(folder: Path) -> str:
    """The secret part of the page's address: random, and kept in the folder for the next time."""
    path = folder / TOKEN_FILE
    with contextlib.suppress(FileNotFoundError):
        found = path.read_text().strip()
        if path.stat().st_mode & 0o077 == 0 and path.stat().st_uid == os.getuid() and re.fullmatch(r"[\w-]{43}", found):
            return found
        path.unlink()
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token + "\n")
    return token


def listen(host: str, port: int) -> socket.socket:
    """A socket at that address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise LabelError(f"cannot listen at {host}, port {port}: {error.strerror}; try another --port") from None
    return listening


def serve(options: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    try:
        import uvicorn

        from pbrl.label.desk import Desk
        from pbrl.label.server import application, is_loopback
    except ImportError as error:
        raise LabelError(f"{error}; the page needs: pip install -c constraints.txt -e '.[label]'") from None

    folder: Path = options.folder
    token = token_of(folder)
    with listen(options.host, options.port) as listening:
        port = listening.getsockname()[1]
        name = f"[{options.host}]" if ":" in options.host else options.host
        name = {"0.0.0.0": socket.gethostname(), "[::]": socket.gethostname()}.get(name, name)
        address = f"http://{name}:{port}/"
        desk = Desk(folder, secret=token, address=address)
        app = application(desk, token=token, host=options.host, port=port, annotator=options.annotator or "")
        if not is_loopback(options.host):
            print(
                f"Anyone who can reach {options.host} and knows the address below can answer, and the network between "
                "can read it: nothing is encrypted. Without --host, only this machine is served; from another one, "
                f"ssh -L {port}:127.0.0.1:{port} leads here safely."
            )
        asking = "1 run asks" if len(desk.runs()) == 1 else f"{len(desk.runs())} runs ask"
        print(f"{asking} questions below {folder}; new ones are noticed. The page is at")
        print(f"\n    {address}?token={token}\n", flush=True)
        if options.browser:
            webbrowser.open(f"{address}?token={token}")
        config = uvicorn.Config(
            app,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            log_level="warning",
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def export(folder: Path, file: Path) -> None:
    """Write all answers of all runs below a folder as one table."""
    if file.suffix not in (".csv", ".parquet"):
        raise LabelError(f"--export takes a file that ends in .csv or .parquet, not {file}")
    tables = [answer_table(run) for run in asking_folders(folder)]
    table, content = pa.concat_tables([SCHEMA.empty_table(), *tables]), pa.BufferOutputStream()
    if file.suffix == ".csv":
        for number, field in enumerate(SCHEMA):
            if pa.types.is_string(field.type):  # a name of a run or a person may be anything
                cells = [each and spreadsheet_cell(each) for each in table[field.name].to_pylist()]
                table = table.set_column(number, field, pa.array(cells, field.type))
        csv.write_csv(table, content)
    else:
        parquet.write_table(table, content)
    write_atomically(file, content.getvalue().to_pybytes())
    print(f"{len(table)} answers of {len(tables)} runs are in {file}")


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(
        "python -m pbrl.label", description=wrapped(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a run's folder, or one with runs below it, such as runs/")
    parser.add_argument("--port", type=int, default=8765, help="8765 by default; 0: any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="by default 127.0.0.1: this machine alone")
    parser.add_argument("--no-browser", dest="browser", action="store_false", help="do not open one")
    parser.add_argument("--annotator", help="who answers; by default the page asks for a name")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write all answers to a .csv or .parquet, and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve or export, and answer what goes wrong with a sentence."""
    logging.basicConfig(level=logging.WARNING, format="pbrl.label: %(message)s", stream=sys.stderr)
    options = parser().parse_args(arguments)
    try:
        if not options.folder.is_dir():
            raise LabelError(f"{options.folder} is not a folder: name one with runs below it")
        if options.annotator is not None and not ANNOTATOR.fullmatch(options.annotator):
            raise LabelError("--annotator takes 1 to 40 letters, digits, spaces and . @ + - _")
        if options.export is not None:
            export(options.folder, options.export)
        else:
            serve(options)
    except (LabelError, QuestionsError, ConfigurationError, OSError) as error:
        raise SystemExit(f"pbrl.label: {error}") from None


if __name__ == "__main__":
    main()
