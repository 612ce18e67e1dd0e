"""Tables, figures and one self-contained HTML page from an artefact's ``result.json``; no model is loaded here."""
