"""Parallelism as functions: meshes as plain data, collectives and parallel layers as ops, communication in flight as a value.

Meshes        Mesh, Axis
In flight     gather_start, scatter_sum_start, sum_over_start, all_to_all_start; finish (InFlight)
Programs      handshake, check_program, record (Program, Collective)
Collectives   gather, scatter_sum, sum_over, copy_to, gather_same, slice_of, all_to_all, shift
Layers        column_linear, row_linear
"""

from funcops.dist.handshake import Collective as Collective
from funcops.dist.handshake import Program as Program
from funcops.dist.handshake import check_program as check_program
from funcops.dist.handshake import handshake as handshake
from funcops.dist.handshake import record as record
from funcops.dist.in_flight import InFlight as InFlight
from funcops.dist.in_flight import all_to_all_start as all_to_all_start
from funcops.dist.in_flight import finish as finish
from funcops.dist.in_flight import gather_start as gather_start
from funcops.dist.in_flight import scatter_sum_start as scatter_sum_start
from funcops.dist.in_flight import sum_over_start as sum_over_start
from funcops.dist.mesh import Axis as Axis
from funcops.dist.mesh import Mesh as Mesh
from funcops.dist.ops.all_to_all import *
from funcops.dist.ops.column_linear import *
from funcops.dist.ops.copy_to import *
from funcops.dist.ops.gather import *
from funcops.dist.ops.gather_same import *
from funcops.dist.ops.row_linear import *
from funcops.dist.ops.scatter_sum import *
from funcops.dist.ops.shift import *
from funcops.dist.ops.slice_of import *
from funcops.dist.ops.sum_over import *
