"""Pipeline schedules on the processes of a group: `Pipeline` for a staged chain, `split_stage` for modules under
torch.distributed.pipelining's own schedules, and `BucketedMean` for gradients of data-parallel replicas."""

from funcops.adapters.bucketed_mean import BucketedMean
from funcops.adapters.pipelining.modules import split_stage
from funcops.adapters.pipelining.pipeline import Pipeline, Stepped

__all__ = ["BucketedMean", "Pipeline", "Stepped", "split_stage"]
