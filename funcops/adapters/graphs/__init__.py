"""CUDA graphs for pure functions; on machines without CUDA the same interface over a recorder."""

from funcops.adapters.graphs.cache import GraphCache, cut_rows, pad_rows
from funcops.adapters.graphs.callables import make_graphed_callables
from funcops.adapters.graphs.check import check_capturable
from funcops.adapters.graphs.faults import Fault
from funcops.adapters.graphs.graphed import Graphed, Report, graphed
from funcops.adapters.graphs.graphed_op import GraphedOp, InFlight, graphed_op

__all__ = ["Fault", "GraphCache", "Graphed", "GraphedOp", "InFlight", "Report"]
__all__ += ["check_capturable", "cut_rows", "graphed", "graphed_op", "make_graphed_callables", "pad_rows"]
