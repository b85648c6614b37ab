"""CUDA graphs for pure functions; on machines without CUDA, a recorder with the same interface."""

from funcops.adapters.graphs.beside import run_beside
from funcops.adapters.graphs.branches import branch, wgrads_beside
from funcops.adapters.graphs.cache import GraphCache, cut_rows, pad_rows
from funcops.adapters.graphs.callables import make_graphed_callables
from funcops.adapters.graphs.conditional import when
from funcops.adapters.graphs.graphed import Graphed, Report, graphed
from funcops.adapters.graphs.graphed_op import GraphedOp, InFlight, graphed_op
from funcops.adapters.graphs.hooks import Hooks, register_hooks
from funcops.adapters.graphs.topology import GraphData, GraphNode, graph_data, graph_diff
from funcops.adapters.graphs.without_gpu.check import check_capturable
from funcops.adapters.graphs.without_gpu.faults import Fault
from funcops.adapters.graphs.without_gpu.memory import GraphMemory, ScheduleMemory, graph_memory, schedule_memory

__all__ = ["Fault", "GraphCache", "Graphed", "GraphedOp", "InFlight", "Report"]
__all__ += ["check_capturable", "cut_rows", "graphed", "graphed_op", "make_graphed_callables", "pad_rows"]
__all__ += ["GraphData", "GraphNode", "Hooks", "branch", "graph_data", "graph_diff", "graph_memory"]
__all__ += ["GraphMemory", "register_hooks", "run_beside", "when", "wgrads_beside"]
__all__ += ["ScheduleMemory", "schedule_memory"]
