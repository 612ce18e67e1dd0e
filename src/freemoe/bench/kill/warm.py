"""Everything that a run imports, for the process that the others are forked from. No number is computed here: no thread starts."""

import sklearn.cluster
import transformers.models.auto.modeling_auto

import freemoe.domain_experts.build
import freemoe.hookmoe.trim
import freemoe.tomoe.convert

READY = (
    sklearn.cluster,
    transformers.models.auto.modeling_auto,
    freemoe.domain_experts.build,
    freemoe.hookmoe.trim,
    freemoe.tomoe.convert,
)
