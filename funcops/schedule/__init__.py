"""Pipeline schedules as data: per rank a list of actions on (stage, microbatch)."""

from funcops.schedule.actions import Action as Action
from funcops.schedule.actions import Schedule as Schedule
from funcops.schedule.chunked import dualpipe_v as dualpipe_v
from funcops.schedule.chunked import interleaved_1f1b as interleaved_1f1b
from funcops.schedule.chunked import interleaved_zb as interleaved_zb
from funcops.schedule.chunked import zb_v as zb_v
from funcops.schedule.delay import delay_w as delay_w
from funcops.schedule.draw import draw as draw
from funcops.schedule.fewer_ranks import fold as fold
from funcops.schedule.generators import gpipe as gpipe
from funcops.schedule.generators import one_f_one_b as one_f_one_b
from funcops.schedule.generators import zb_h1 as zb_h1
from funcops.schedule.generators import zb_h2 as zb_h2
from funcops.schedule.measure import measure as measure
from funcops.schedule.measure import measure_stages as measure_stages
from funcops.schedule.run import Ran as Ran
from funcops.schedule.run import run as run
from funcops.schedule.simulate import Costs as Costs
from funcops.schedule.simulate import Network as Network
from funcops.schedule.simulate import Simulated as Simulated
from funcops.schedule.simulate import simulate as simulate
