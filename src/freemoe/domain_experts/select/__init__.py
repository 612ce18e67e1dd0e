"""Which candidate replaces the base: search on reference documents, and the guarded choice."""
