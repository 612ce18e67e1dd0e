"""lm-eval with the model ``freemoe``: ``import freemoe.lm_eval`` from Python, ``python -m freemoe.lm_eval`` as its own command.

lm-eval looks for models in no entry points, so ``lm_eval --model freemoe`` by itself knows only the models that it brings.
"""

from __future__ import annotations

from freemoe.evals.tasks.harness.rows import require_lm_eval

require_lm_eval()

from freemoe.compat.lm_eval import lm_eval_main  # noqa: E402
from freemoe.domain_experts.hosting.lm_eval_model import FreeMoELM  # noqa: E402

__all__ = ["FreeMoELM"]

if __name__ == "__main__":
    lm_eval_main()()
