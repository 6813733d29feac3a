"""Wrong implementations: each is a correct one with one fault, of a kind that has been seen.

The rule is the one that the kit must name first. Where two rules say the same of a fault, both
are given. Each module adds its faults to the zoo when it is imported.
"""

from __future__ import annotations

from . import gradients, manners, masking, rows, scores, shapes, softmax
from .faults import ZOO

__all__ = ["ZOO", "gradients", "manners", "masking", "rows", "scores", "shapes", "softmax"]
