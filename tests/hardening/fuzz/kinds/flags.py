"""Command lines of build, eval, convert and trim, up to the recipe that they stand for.

Accepted is a command line whose recipe, printed, can be read again.
"""

import contextlib
import io
from itertools import chain

import typer
import typer.main
from hypothesis import strategies as st

from freemoe.cli.build import COMMAND as BUILD
from freemoe.cli.convert import COMMAND as CONVERT
from freemoe.cli.evaluate import COMMAND as EVALUATE
from freemoe.cli.trim import COMMAND as TRIM
from freemoe.recipes import load_recipe
from tests.hardening.fuzz.case import Refused
from tests.hardening.fuzz.drawing import TEXTS

COMMANDS = {
    "build": ["freemoe-demo", "-d", "math=demo:math"],
    "eval": ["freemoe-demo", "-d", "math=demo:math"],
    "convert": ["freemoe-demo", "--text", "a.txt"],
    "trim": ["freemoe-demo-moe", "--text", "a.txt"],
}
_SETS = ("data.limit", "bands.step", "search.alpha", "seed", "threads", "train.steps", "training.steps")
_SETS += ("plan.act", "x", "a.b.c")
_VALUES = ("0:1:1e-9", "0:0.5:0.05", "1,2", "a=1,b=2", "0.1,0.2", "1e30", "nan", "inf", "9" * 40, "-9", "0x10")


def strategy(material):
    """A command and its arguments."""
    app = _click()
    values = st.one_of(
        st.sampled_from([t for t in TEXTS if t]),
        st.sampled_from(_VALUES),
        *[st.integers(1, 60).map(str)] * 3,
        st.floats(0.01, 0.9).map(lambda number: f"{number:.2g}"),
        st.integers(-5, 10**7).map(str),
        st.floats().map(str),
        st.text(max_size=10),
    )

    def of(command):
        options = [o for o in app.commands[command].params if o.param_type_name == "option"]
        quiet = [o for o in options if not {"--help", "--dry-run", "--json", "--print-recipe"} & set(o.opts)]
        flag = st.sampled_from([o.opts[0] for o in quiet if o.is_flag] or ["--quiet"]).map(lambda name: [name])
        valued = st.builds(
            lambda name, value, joined: [f"{name}={value}"] if joined and name.startswith("--") else [name, value],
            st.sampled_from([o.opts[0] for o in quiet if not o.is_flag]),
            values,
            st.booleans(),
        )
        path = st.builds(lambda name, value: ["--set", f"{name}={value}"], st.sampled_from(_SETS), values)
        more = st.one_of(valued, valued, valued, path, flag, values.map(lambda v: [v]))
        return st.lists(more, min_size=1, max_size=3).map(lambda parts: [command, *COMMANDS[command], *chain(*parts)])

    return st.one_of(*map(of, sorted(COMMANDS))).map(lambda arguments: {"arguments": arguments})


def _click():
    app = typer.Typer(name="freemoe", pretty_exceptions_enable=False)
    for command in (BUILD, CONVERT, EVALUATE, TRIM):
        command.register_command(app)
    return typer.main.get_command(app)


def attempt(what, material, folder):
    """Ask for the recipe that a command line stands for, and read it."""
    shown, told = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told):
            code = _click().main([*what["arguments"], "--print-recipe"], prog_name="freemoe", standalone_mode=False)
    except Exception as error:
        if hasattr(error, "format_message"):  # typer could not parse it
            raise Refused(str(error)[:300]) from None
        raise
    if code:
        raise Refused(told.getvalue()[-300:])
    (folder / "printed.yaml").write_text(shown.getvalue(), encoding="utf-8")
    load_recipe(folder / "printed.yaml")
