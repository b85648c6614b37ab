"""`funcops.contract`: what the author of an op imports. It lives in `funcops.engine`.

from funcops.contract import OpConfig, Residuals, config, dgrad_of, forward, make_op, saved
"""

from funcops.engine.contract.accumulators import accumulate as accumulate
from funcops.engine.contract.by_config import ByConfig as ByConfig
from funcops.engine.contract.needs import Needs as Needs
from funcops.engine.contract.op import Op as Op
from funcops.engine.contract.op import OpConfig as OpConfig
from funcops.engine.contract.op import config as config
from funcops.engine.contract.op import dgrad_of as dgrad_of
from funcops.engine.contract.op import forward as forward
from funcops.engine.contract.op import init_of as init_of
from funcops.engine.contract.op import make_op as make_op
from funcops.engine.contract.op import raw_of as raw_of
from funcops.engine.contract.op import recompute_of as recompute_of
from funcops.engine.contract.op import wgrad_of as wgrad_of
from funcops.engine.contract.pausing import Flying as Flying
from funcops.engine.contract.pausing import landed as landed
from funcops.engine.contract.pausing import pausing as pausing
from funcops.engine.contract.pausing import take_turns as take_turns
from funcops.engine.contract.schema import DGRAD as DGRAD
from funcops.engine.contract.schema import RECOMPUTE as RECOMPUTE
from funcops.engine.contract.schema import WGRAD as WGRAD
from funcops.engine.contract.schema import Inputs as Inputs
from funcops.engine.contract.schema import Pending as Pending
from funcops.engine.contract.schema import Residuals as Residuals
from funcops.engine.contract.schema import saved as saved
from funcops.engine.contract.walk import Inside as Inside
from funcops.engine.errors import FLOATS as FLOATS
from funcops.engine.errors import check as check
