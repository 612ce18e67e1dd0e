"""The papers' tables and figures: what they print, what runs here in their place, and the two side by side."""
