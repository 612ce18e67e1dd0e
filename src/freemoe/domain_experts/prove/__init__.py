"""What the experts do on the reported split, with intervals, a control and the oracle; and later evaluations."""
