"""Pipeline schedules as data: per rank a list of actions on (stage, microbatch)."""

from funcops.schedule.actions import Action as Action
from funcops.schedule.actions import Schedule as Schedule
from funcops.schedule.generators import gpipe as gpipe
from funcops.schedule.generators import one_f_one_b as one_f_one_b
from funcops.schedule.generators import zb_h1 as zb_h1
from funcops.schedule.generators import zb_h2 as zb_h2
from funcops.schedule.simulate import Costs as Costs
from funcops.schedule.simulate import Simulated as Simulated
from funcops.schedule.simulate import simulate as simulate
