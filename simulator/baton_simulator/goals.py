"""What a good answer is."""

from __future__ import annotations

from typing import Final

GOAL_TTFT_S: Final = 2.0
GOAL_TPOT_S: Final = 0.05
