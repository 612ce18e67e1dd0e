"""Every private or moving name of transformers, lm-eval and PEFT that freemoe touches, in one place each.

A name that the installed release does not have is an error that says which release is installed and which are tried. None of
the three is imported before it is needed; ``caches`` is, because classes stand on what it takes.
"""
