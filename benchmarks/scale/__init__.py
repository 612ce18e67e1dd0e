"""What more workers bring: the same bytes, how much sooner, and on paper for a base and a cluster that are not here."""
