"""`recording` and `compare`: what each step of a run computed, in a few bytes, and where two runs first differ."""

from funcops.adapters.recording.compare import Comparison as Comparison
from funcops.adapters.recording.compare import Difference as Difference
from funcops.adapters.recording.compare import compare as compare
from funcops.adapters.recording.recorded import Recorded as Recorded
from funcops.adapters.recording.recorded import Recording as Recording
from funcops.adapters.recording.recorded import recording as recording
