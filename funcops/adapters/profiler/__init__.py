"""`profile`: a function's time, launches and bytes by the path of the step that runs."""

from funcops.adapters.profiler.actions import ScheduleTimes as ScheduleTimes
from funcops.adapters.profiler.profiles import Profile as Profile
from funcops.adapters.profiler.profiles import ProfileRow as ProfileRow
from funcops.adapters.profiler.profiles import profile as profile
