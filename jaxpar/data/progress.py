"""A progress bar that leaves no trace."""

from __future__ import annotations

from tqdm import tqdm


class Bar(tqdm):
    """A bar that is gone when it is closed, so that a line printed next has a line of its own.

    ``tqdm`` leaves it there when it was shown (by ``reset``, or a new description) before its ``delay`` was over.
    """

    def close(self) -> None:
        """Take the bar off the screen; nothing is shown any more."""
        self.clear()
        super().close()
