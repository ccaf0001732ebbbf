"""Version of the package, for the build and for everything that reports it."""

__version__ = "0.1.0"
