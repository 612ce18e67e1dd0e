"""What freemoe promises, measured: `python -m benchmarks NAME`."""

from benchmarks.cli import app
from freemoe.cli import run_program

if __name__ == "__main__":
    run_program(app, "python -m benchmarks")
