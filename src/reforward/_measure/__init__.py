"""What a step really takes: peak bytes with their timeline and breakdown, and seconds."""

from reforward._measure.measure import measure
from reforward._measure.measurement import Breakdown, Measurement, PhaseSpan

__all__ = ["Breakdown", "Measurement", "PhaseSpan", "measure"]
