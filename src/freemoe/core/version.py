"""The package's version, in a module of its own: the rooms below the public names need it too."""

__version__ = "0.1.0"
