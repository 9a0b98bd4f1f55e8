"""Runs a command where Vulkan is: `python tests/vulkan.py FOLDER COMMAND ...`.

Where no Vulkan driver is installed Mesa's is unpacked into the folder, from Debian's backports: its own, 22.3.6 of
Debian 12, lacks what ManiSkill asks for. Nothing is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

BACKPORTS = "deb [signed-by={}] http://deb.debian.org/debian bookworm-backports main\n"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Newer than Debian 12's, and what they need besides.
NEWER, OTHERS = ("mesa-vulkan-drivers", "libdrm2", "libdrm-amdgpu1"), ("libvulkan1", "libllvm15", "libelf1")
LIBRARIES = ("libxcb-present0", "libxcb-randr0", "libxcb-shm0", "libxcb-sync1", "libxcb-xfixes0")
DRIVER = "usr/share/vulkan/icd.d/lvp_icd.json"


def unpack(folder: Path) -> Path:
    """Mesa's Vulkan on the CPU in this folder; the file that describes the driver."""
    found = folder / DRIVER
    if found.is_file():
        return found
    lists, packages = folder / "apt", folder / "packages"
    for path in (lists / "partial", packages):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(BACKPORTS.format(KEYS))
    own = [f"Dir::Etc::sourcelist={folder / 'sources.list'}", "Dir::Etc::sourceparts=-", f"Dir::State::lists={lists}"]
    backports = [word for one in own for word in ("-o", one)]
    for words in ([*backports, "update"], [*backports, "download", *NEWER], ["download", *OTHERS, *LIBRARIES]):
        subprocess.run(["apt-get", "-qq", *words], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    library = next(folder.rglob("libvulkan_lvp.so"))
    description = json.loads(found.read_text())
    description["ICD"]["library_path"] = str(library)
    found.write_text(json.dumps(description))
    return found


if __name__ == "__main__":
    place, command = Path(sys.argv[1]).resolve(), sys.argv[2:]
    if not any(Path("/usr/share/vulkan/icd.d").glob("*.json")):
        driver = unpack(place)
        libraries = str(next(place.rglob("libvulkan.so.1")).parent)
        os.environ |= {"VK_ICD_FILENAMES": str(driver), "LD_LIBRARY_PATH": libraries}
    os.execvp(command[0], command)
