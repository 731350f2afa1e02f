"""What tests share: programs, references, faults, processes for ranks, and the emulated CUDA engine."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
"""The repository."""
