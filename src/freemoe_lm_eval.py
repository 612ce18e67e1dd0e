"""Start-up hook that makes ``lm_eval --model freemoe`` work from the shell.

lm-eval has no entry points for models, so this adds freemoe's name to its list when that list is made. A line in
``freemoe_lm_eval.pth`` imports this at every start of Python, so it imports nothing and never raises.
"""

import sys

MODELS = "lm_eval.models"
TARGET = "freemoe.domain_experts.lm_eval_model:FreeMoELM"


class Finder:
    """Watches for the import of lm-eval's models, once."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """Leave every import to the other finders, and follow that of lm-eval's models."""
        if name != MODELS:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(cls)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register
        return spec


def register():
    """Add the name to lm-eval's list; the class is loaded when it is asked for."""
    try:
        from lm_eval.api.registry import model_registry

        if "freemoe" not in model_registry:
            model_registry.register("freemoe", target=TARGET)
    except Exception:
        pass  # another lm-eval than this was written for must work as if freemoe were not there


sys.meta_path.insert(0, Finder)
