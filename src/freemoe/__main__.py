"""`python -m freemoe`, for launchers that start modules."""

from freemoe.cli import main

if __name__ == "__main__":
    main()
