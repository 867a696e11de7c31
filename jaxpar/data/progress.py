"""A progress bar that leaves no trace."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class Bar(tqdm):
    """A bar that is gone when it is closed, so that a line printed next has a line of its own.

    ``tqdm`` leaves it there when it was shown (by ``reset``, or a new description) before its ``delay`` was over.
    """

    shown = False

    def display(self, *arguments: Any, **options: Any) -> Any:
        """Show the bar."""
        self.shown = True
        return super().display(*arguments, **options)

    def clear(self, *arguments: Any, **options: Any) -> None:
        """Take the bar off the screen, if it is there."""
        if self.shown:
            super().clear(*arguments, **options)

    def close(self) -> None:
        """Take the bar off the screen; nothing is shown any more."""
        self.clear()
        super().close()
