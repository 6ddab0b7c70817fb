"""A browser for tests of the live page: Debian's Chromium, and axe, which checks accessibility.

In: packages of the distribution, and one wheel from PyPI, pinned by its digest. Out: the browser
and its environment, and axe's script. They lie in the user's cache, need no root, and change
nothing of the machine.

`make browser-tools` installs them; otherwise the first test that needs them does.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from tests.support.needs import NEEDS
from tests.support.project.cache import made_once
from tests.support.project.debian import BROWSER, unpack_browser

# A package that brings axe-core's script; nothing else of it is used.
AXE = (
    "axe-playwright-python==0.1.8"
    " --hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8"
)
DOWNLOAD_S = 300.0
# The browser finds fonts and libraries in the folder before those of the machine.
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>{folder}/usr/share/fonts</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir>{folder}/font-cache</cachedir>
  <alias binding="strong"><family>system-ui</family><prefer>
    <family>Inter</family></prefer></alias>
  <alias binding="strong"><family>monospace</family><prefer>
    <family>DejaVu Sans Mono</family></prefer></alias>
</fontconfig>
"""


def browser_program() -> Path:
    """The browser's program; fetched if needed."""
    unpacked = _unpacked() / "usr" / "lib" / "chromium" / "chromium"
    own = shutil.which("chromium")
    if not unpacked.exists():
        assert own is not None, "the machine has a chromium package, but no program of it"
        return Path(own)
    return unpacked


def browser_environment() -> dict[str, str]:
    """The variables with which the browser finds its libraries and fonts."""
    folder = _unpacked()
    libraries = folder / "usr" / "lib" / f"{os.uname().machine}-linux-gnu"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'pulseaudio'}",
        "FONTCONFIG_FILE": str(folder / "fonts.conf"),
    }


def axe_script() -> str:
    """The source of axe-core, which a page runs."""
    folder = made_once("axe", hashlib.sha256(AXE.encode()).hexdigest()[:16], _fetch_axe)
    return (folder / "axe.min.js").read_text(encoding="utf-8")


def _unpacked() -> Path:
    digest = hashlib.sha256("\n".join([*BROWSER, FONTS]).encode())
    return made_once("browser", digest.hexdigest()[:16], _unpack)


def _unpack(folder: Path) -> None:
    unpack_browser(folder, _log)
    (folder / "fonts.conf").write_text(FONTS.format(folder=folder))
    _log("fetched")


def _fetch_axe(folder: Path) -> None:
    _log("fetching axe")
    (folder / "requirements.txt").write_text(AXE)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run(
        [*command, "--dest", str(folder), "-r", str(folder / "requirements.txt")],
        check=True,
        timeout=DOWNLOAD_S,
    )
    [wheel] = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("axe.min.js")]
        (folder / "axe.min.js").write_bytes(archive.read(name))


def _log(line: str) -> None:
    print(f"browser tools: {line}", file=sys.stderr, flush=True)


def main() -> None:
    if not NEEDS["browser"].present():
        _log(f"this machine lacks {NEEDS['browser'].meaning}: tests that need it will skip")
        return
    browser_program()
    axe_script()


if __name__ == "__main__":
    main()
