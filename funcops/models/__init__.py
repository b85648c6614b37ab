"""Language models: `DecoderConfig` says what one is, `decoder` makes a chain of it."""

from funcops.models.decoder import *
from funcops.models.hf import *
