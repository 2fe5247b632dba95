"""From text to token shards to batches.

Every command imports this package first, so that Windows is refused here, in a sentence: locks,
limits and signals are those of Linux and macOS.
"""

import sys

from errors import exit_with

if sys.platform == "win32":
    exit_with("this runs on Linux and macOS; on Windows use WSL: learn.microsoft.com/windows/wsl")
