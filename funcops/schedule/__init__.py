"""Pipeline schedules as data: for each rank a list of actions on (stage, microbatch)."""

from funcops.schedule.actions import Action, Schedule
from funcops.schedule.at import At
from funcops.schedule.choices import Choice, stage_choices
from funcops.schedule.chunked import dualpipe_v, interleaved_1f1b, interleaved_zb, zb_v
from funcops.schedule.collectives import Collective, Link
from funcops.schedule.compiled import compile_stages
from funcops.schedule.decoder import Decoder
from funcops.schedule.delay import delay_w
from funcops.schedule.draw import draw
from funcops.schedule.fewer_ranks import fold
from funcops.schedule.generators import gpipe, one_f_one_b, zb_h1, zb_h2
from funcops.schedule.gpus import GPU, GPUS
from funcops.schedule.layout import Layout
from funcops.schedule.lend import Lent, lend
from funcops.schedule.level import Leveled, level
from funcops.schedule.measure import measure, measure_stages
from funcops.schedule.mixture import Mixture
from funcops.schedule.moved import Moved
from funcops.schedule.plan import Plan, plan_parallel
from funcops.schedule.predict import Predicted, predict
from funcops.schedule.run import Ran, run
from funcops.schedule.simulate import Costs, Network, Simulated, simulate

__all__ = ["Action", "At", "Choice", "Collective", "Costs", "Decoder", "GPU", "GPUS", "Layout"]
__all__ += ["Lent", "Leveled", "Link", "Mixture", "Moved", "Network", "Plan", "Predicted", "Ran", "Schedule", "Simulated"]
__all__ += [
    "compile_stages",
    "delay_w",
    "draw",
    "dualpipe_v",
    "fold",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zb",
    "lend",
    "level",
    "measure",
]
__all__ += [
    "measure_stages",
    "one_f_one_b",
    "plan_parallel",
    "predict",
    "run",
    "simulate",
    "stage_choices",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
