from funcops.engine.backend.declare import Kernel as Kernel
from funcops.engine.backend.declare import kernel as kernel
from funcops.engine.backend.declare import operators as operators
from funcops.engine.backend.declare import tracing as tracing
from funcops.engine.backend.declare import wide as wide
from funcops.engine.backend.select import backend as backend
from funcops.engine.backend.select import gemm as gemm
from funcops.engine.backend.select import wants_triton as wants_triton
