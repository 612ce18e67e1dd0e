"""What every run needs and no model: errors, registry, run folders with their journal, artefact folders, the machine."""
