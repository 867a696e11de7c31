"""The pictures in this folder that show what jaxpar makes of runs.

    python docs/screenshots.py runs/a runs/b ...

writes ``docs/report.png``: the top of the report of these runs, in a window 1200 pixels wide, light theme. Needs
Chromium (``--chromium PATH`` where it is not called that) and Pillow, which matplotlib brings.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

from jaxpar.report.page import write_report

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def photograph(
    page: Path, picture: Path, width: int, height: int, chromium: str = "chromium", dark: bool = False
) -> None:
    """Write what a browser window of this size shows of the page, without the empty part below its end."""
    theme = "--blink-settings=preferredColorScheme=" + ("0" if dark else "1")
    with tempfile.TemporaryDirectory() as profile:
        where = (f"--user-data-dir={profile}", f"--window-size={width},{height}", f"--screenshot={picture}")
        command = [chromium, *FLAGS, theme, *where, page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(picture) as image:
        whole = image.convert("RGB")
    background = Image.new("RGB", whole.size, whole.getpixel((0, whole.height - 1)))
    box = ImageChops.difference(whole, background).getbbox() or (0, 0, *whole.size)
    cropped = whole.crop((0, 0, width, min(box[3] + 24, whole.height)))
    cropped.quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--chromium", default="chromium", help="the browser's command")
    parser.add_argument("--width", type=int, default=1200, help="of the window, in pixels")
    parser.add_argument("--height", type=int, default=1500, help="of the window, in pixels")
    parser.add_argument("--dark", action="store_true", help="the dark theme")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "report.png", help="the picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = write_report(options.runs, Path(folder) / "report.html")
        photograph(page, options.output.absolute(), options.width, options.height, options.chromium, options.dark)
    print(f"{options.output}: {options.output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
