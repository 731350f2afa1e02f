"""
Compiles and runs probe.cu, and keeps its numbers.

    python -m benchmarks.gpu.probe CAPABILITY [--out FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.document import ROOT, Document, default_path
from benchmarks.gpu.machine import missing, program

SOURCE = Path(__file__).with_name("probe.cu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", help="such as 90; native: of the GPU that is there")
    parser.add_argument("--out", type=Path, default=default_path(), help="gpu.json, wherever it is")
    a = parser.parse_args()
    document, nvcc = Document(a.out), program("nvcc")
    arch = "native" if a.capability == "native" else f"sm_{a.capability}"
    if not nvcc:
        print(missing())
        return 1
    with tempfile.TemporaryDirectory() as folder:
        probe = str(Path(folder) / "probe")
        words = [nvcc, "-O3", "-std=c++17", f"-I{ROOT / 'csrc'}", f"-arch={arch}", "-o", probe, str(SOURCE)]
        subprocess.run(words, check=True)
        with subprocess.Popen([probe], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                name, _, said = line.strip().partition(" ")
                if said.startswith("failed"):
                    document.put("failed", {f"probe {name}": said})
                else:
                    document.put("probe", {name: float(said)})
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
