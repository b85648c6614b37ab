from funcops.adapters.pipelining.modules import split_stage as split_stage
from funcops.adapters.pipelining.pipeline import Pipeline as Pipeline
from funcops.adapters.pipelining.pipeline import Stepped as Stepped
from funcops.adapters.reduce import BucketedMean as BucketedMean
