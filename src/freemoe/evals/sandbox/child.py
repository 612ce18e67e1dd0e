"""The inside of the sandbox, as a script: never imported. Its first argument is the folder that freemoe stands in."""

import sys

# Only the sandbox's own modules are loaded, not what freemoe itself loads: a program waits for them every time.
for name in ("freemoe", "freemoe.evals"):
    package = type(sys)(name)
    package.__path__ = [f"{sys.argv[1]}/{name.replace('.', '/')}"]
    sys.modules[name] = package

from freemoe.evals.sandbox.inside import main  # noqa: E402

main()
