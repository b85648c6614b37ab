from funcops.backend.declare import Kernel as Kernel
from funcops.backend.declare import kernel as kernel
from funcops.backend.declare import operators as operators
from funcops.backend.declare import tracing as tracing
from funcops.backend.declare import wide as wide
from funcops.backend.select import backend as backend
from funcops.backend.select import gemm as gemm
from funcops.backend.select import wants_triton as wants_triton
