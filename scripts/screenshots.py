"""Make the screenshots of the README from the demo's run on photographs.

    apt-get install chromium
    .venv/bin/python scripts/screenshots.py

Writes docs/images/sheet.jpg, report-light.png and report-dark.png. The demo takes half a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
MOST = 150_000  # bytes of a file
SCHEMES = {"dark": 0, "light": 1}  # values of chromium's setting
SIZE = "1180,870"


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made, sheet = Path(folder) / "sheet.png", IMAGES / "sheet.jpg"
        wdstrain(folder, "demo", "--dir", ".")
        wdstrain(folder, "show", "photos", "--random", "-n", "12", "-o", str(made))
        with Image.open(made) as picture:
            picture.convert("RGB").save(sheet, quality=85)
        pages = [screenshot(Path(folder) / "photos-run" / "report.html", name) for name in SCHEMES]
    for image in (sheet, *pages):
        size = image.stat().st_size
        if size > MOST:
            sys.exit(f"{image} has {size} bytes, more than {MOST}")
        print(f"{image}: {size} bytes")


def wdstrain(folder: str, *words: str) -> None:
    run = [sys.executable, "-m", "wdstrain", *words]
    subprocess.run(run, cwd=folder, check=True, stdout=sys.stderr)


def screenshot(page: Path, scheme: str) -> Path:
    """Write the first screen of a page as PNG, in the light or dark color scheme."""
    image = IMAGES / f"{page.stem}-{scheme}.png"
    with tempfile.TemporaryDirectory() as profile:
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--window-size={SIZE}",
            f"--screenshot={image}",
        ]
        subprocess.run(
            ["chromium", *options, page.as_uri()], check=True, capture_output=True, timeout=60
        )
    return image


if __name__ == "__main__":
    main()
