"""What the sandbox is tried with: programs by name, as text, in a room for each thing that they go for.

``OUTSIDE`` (a folder that is not theirs), ``VICTIM`` (a process that is not theirs), ``PORT`` and ``MARK`` (a name that is looked
for afterwards) stand before each as assignments. Behind each stands a test that fails, so that none may pass. They do no harm
where they succeed: they leave a file, stop a process that was started for it, reach a socket that waits for them.
"""
