"""CUDA graphs for pure functions; on machines without CUDA the same interface over a recorder."""

from funcops.adapters.graphs.cache import GraphCache as GraphCache
from funcops.adapters.graphs.cache import cut_rows as cut_rows
from funcops.adapters.graphs.cache import pad_rows as pad_rows
from funcops.adapters.graphs.callables import make_graphed_callables as make_graphed_callables
from funcops.adapters.graphs.check import check_capturable as check_capturable
from funcops.adapters.graphs.faults import Fault as Fault
from funcops.adapters.graphs.graphed import Graphed as Graphed
from funcops.adapters.graphs.graphed import Report as Report
from funcops.adapters.graphs.graphed import graphed as graphed
from funcops.adapters.graphs.graphed_op import GraphedOp as GraphedOp
from funcops.adapters.graphs.graphed_op import InFlight as InFlight
from funcops.adapters.graphs.graphed_op import graphed_op as graphed_op
