"""The papers' tables and figures: `python -m reproduce TABLE`."""

from freemoe.cli import run_program
from reproduce.cli import app

if __name__ == "__main__":
    run_program(app, "python -m reproduce")
