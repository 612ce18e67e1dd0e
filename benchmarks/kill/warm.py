"""Everything that a run imports, for the process that the others are forked from. No number is computed here: no thread starts."""

import sklearn.cluster
from transformers import AutoModelForCausalLM

import freemoe.domain_experts.build
import freemoe.hookmoe.trim
import freemoe.tomoe.convert

READY = (
    sklearn.cluster,
    AutoModelForCausalLM,
    freemoe.domain_experts.build,
    freemoe.hookmoe.trim,
    freemoe.tomoe.convert,
)
