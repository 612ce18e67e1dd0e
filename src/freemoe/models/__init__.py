"""Models as data: families, weights, the one owner of hooks, and what switches weights off and on again."""
