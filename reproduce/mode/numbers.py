"""What the papers' tables say, typed from their texts: facts, the same in MoDE and Free-MoE where both have a table."""

from __future__ import annotations

COLUMNS = ("mmlu", "mbpp pass@1", "mbpp pass@10", "humaneval pass@1", "humaneval pass@10", "gsm8k", "mathqa")
"""Columns of Table 1, in its order."""

# MoDE and Free-MoE, Table 1: model -> baseline, expert (DENoise, DOWP), mixture (MoDE, Free-MoE).
_MAIN = {
    "llama-2-7b": """
        45.81 19.24 23.60 14.45 19.51 20.24 25.33
        47.83 21.32 26.40 15.73 20.73 22.21 27.34
        47.34 20.58 25.80 14.51 19.51 20.79 26.13
    """,
    "llama-2-13b": """
        52.34  9.68 13.00 18.66 28.05 31.77 24.86
        53.18 11.52 16.00 19.45 29.88 34.42 27.57
        52.93 12.39 14.80 19.13 29.27 33.86 26.34
    """,
    "llama-2-70b": """
        66.87 45.22 66.15 30.52 59.34 59.47 35.12
        68.89 47.15 66.98 31.71 60.72 61.83 35.96
        68.12 45.93 66.34 31.22 60.01 60.56 35.33
    """,
    "gemma-7b": """
        63.56  2.94  9.00 15.31 20.12 57.92 37.12
        65.30  6.20 15.80 16.77 22.56 59.59 39.57
        65.05  5.85 13.90 12.93 18.29 59.29 38.79
    """,
    "gemma-2-9b": """
        69.71  8.36  9.80 12.87 18.90 68.46 50.75
        71.07  8.52 10.80 15.12 22.56 69.98 51.22
        70.90  8.28 10.40 14.33 20.73 69.45 50.97
    """,
}

# Tables 7 to 11, a cluster a line: its samples (of the test split), then its figure under the ten bands of BANDS.
_CLUSTERS = {
    "mmlu": """
        2047 57.79 58.72 58.96 59.26 59.99 59.94 60.67 60.23 60.77 60.92
        1518 35.57 34.72 34.32 35.70 35.38 35.31 35.84 35.44 36.17 35.77
        895 23.02 24.02 22.57 23.35 23.02 22.01 22.46 22.68 22.79 22.57
        1586 48.93 47.92 49.37 48.99 49.87 49.50 49.43 50.44 50.88 51.01
        212 27.83 28.77 28.30 25.94 28.77 26.89 27.83 26.89 27.36 26.89
        1477 59.58 59.04 60.39 59.51 60.12 60.80 60.93 61.61 61.61 61.75
        322 35.09 32.92 33.85 34.78 33.54 34.78 33.54 34.16 35.09 35.09
        434 27.65 25.58 29.95 26.96 26.96 27.19 28.11 29.72 27.19 29.49
        2016 55.21 55.36 55.46 55.51 56.15 55.56 56.35 57.04 57.19 57.44
        1839 46.66 47.53 46.82 46.49 47.36 47.74 47.36 48.02 48.45 48.29
        1174 30.92 30.15 31.26 31.09 30.49 30.15 30.83 32.03 32.28 31.86
        522 42.34 45.21 44.25 42.91 46.74 45.40 46.74 47.32 46.36 47.13
    """,
    "gsm8k": """
        240 12.92 15.00 15.83 18.75 13.75 17.08 16.67 17.50 15.83 16.67
        8 0.00 12.50 12.50 37.50 25.00 12.50 12.50 37.50 0.00 12.50
        225 17.78 21.78 18.22 24.00 22.67 22.67 22.22 21.78 20.44 24.00
        361 18.28 16.90 19.67 20.50 19.94 23.82 21.05 23.82 21.61 23.82
        113 13.27 17.70 9.73 15.04 15.93 19.47 17.70 13.27 17.70 16.81
        193 12.44 10.88 12.95 13.99 15.03 17.62 20.73 18.65 17.10 19.69
        6 33.33 16.67 50.00 33.33 33.33 16.67 33.33 33.33 16.67 50.00
        173 16.18 14.45 17.92 23.12 17.34 19.08 17.34 19.65 18.50 19.65
    """,
    "mathqa": """
        289 19.03 19.72 20.42 23.53 26.99 28.72 26.30 22.84 26.30 22.15
        318 24.53 24.84 24.21 22.96 31.45 23.58 29.87 29.25 26.42 25.79
        453 20.75 22.30 27.15 22.96 24.06 25.39 23.18 26.49 25.39 22.96
        107 24.30 27.10 28.97 20.56 28.04 27.10 28.04 20.56 22.43 20.56
        238 24.37 20.17 29.83 21.01 22.69 29.41 22.69 27.31 29.41 28.15
        269 26.77 20.45 24.91 25.65 29.37 27.14 25.65 21.56 23.79 29.00
        659 24.28 19.58 20.49 21.40 20.64 22.91 21.55 18.97 20.64 19.88
        652 20.09 21.47 21.32 24.08 22.70 22.70 25.92 24.54 23.47 22.55
    """,
    "humaneval pass@1": """
        44 11.82 17.05 15.68 14.77 15.00 16.36 17.05 15.23 15.45 14.77
        75 8.27 9.47 10.80 10.67 13.07 15.33 12.67 13.20 13.47 13.33
        45 6.89 12.22 11.11 9.33 14.22 14.00 15.11 14.00 14.89 15.11
    """,
    "humaneval pass@10": """
        44 18.18 25.00 25.00 18.18 22.73 18.18 25.00 18.18 20.45 20.45
        75 10.67 14.67 13.33 12.00 18.67 18.67 16.00 17.33 17.33 16.00
        45 8.89 15.56 15.56 13.33 15.56 15.56 17.78 15.56 20.00 17.78
    """,
    "mbpp pass@1": """
        185 35.68 34.32 33.89 38.16 34.05 35.19 37.51 34.65 36.65 36.38
        53 17.74 15.47 20.19 27.92 22.83 25.47 23.96 20.75 19.62 22.08
        262 7.29 6.18 5.84 6.34 6.56 8.09 6.56 6.45 7.75 7.52
    """,
    "mbpp pass@10": """
        185 40.54 43.24 42.16 42.16 40.54 41.08 44.32 39.46 42.70 42.16
        53 24.53 26.42 28.30 32.08 28.30 35.85 30.19 26.42 26.42 33.96
        262 9.16 9.16 9.92 9.16 10.31 11.83 9.92 10.31 11.83 11.45
    """,
}

BANDS = ("50-55", "55-60", "60-65", "65-70", "70-75", "75-80", "80-85", "85-90", "90-95", "95-100")
"""Bands as the papers name them, in per cent of a ranking whose end is the least important weight."""

RATIOS = {"1": 47.75, "3": 47.83, "5": 47.79, "10": 47.83, "20": 45.33}
"""Table 3: width of a band in per cent -> MMLU. Free-MoE has no 20."""

NORMS = {
    "1": {"mmlu": 46.26, "mathqa": 26.13},
    "2": {"mmlu": 47.83, "mathqa": 27.34},
    "4": {"mmlu": 47.27, "mathqa": 26.57},
}
"""Table 2: p -> figures. Its column GSM8K cannot be read in the text that we have; Free-MoE has MMLU alone."""

SUBLAYERS = {
    "mlp": {"gsm8k": 21.61, "mathqa": 26.87},
    "attention": {"gsm8k": 23.42, "mathqa": 25.90},
    "both": {"gsm8k": 22.21, "mathqa": 27.34},
}
"""Table 4."""

PATCHES = {
    "1": (20.80, 26.00, 15.73, 20.73),
    "2": (19.88, 25.60, 15.67, 20.12),
    "4": (18.58, 24.00, 14.88, 20.73),
    "16": (18.40, 24.40, 13.97, 17.68),
}
"""Table 5: side of a patch -> MBPP and HumanEval, pass@1 and pass@10 of each."""

COUNTS = {"6": 47.27, "8": 47.50, "10": 47.46, "12": 47.79, "14": 47.27, "16": 47.65}
"""Table 6: number of clusters -> MMLU of the mixture. Free-MoE has 10, 12 and 14."""


def _numbers(text: str) -> list[list[float]]:
    return [[float(cell) for cell in line.split()] for line in text.split("\n") if line.strip()]


MAIN: dict[str, dict[str, dict[str, float]]] = {
    model: {
        name: dict(zip(COLUMNS, row, strict=True))
        for name, row in zip(("base", "expert", "routed"), _numbers(text), strict=True)
    }
    for model, text in _MAIN.items()
}
"""Table 1: model -> base, expert or routed -> column -> figure."""

CLUSTERS: dict[str, list[tuple[int, dict[str, float]]]] = {
    name: [(int(samples), dict(zip(BANDS, scores, strict=True))) for samples, *scores in _numbers(text)]
    for name, text in _CLUSTERS.items()
}
"""Tables 7 to 11: task (and metric) -> per cluster its samples, and its figure under each band."""


def gains(model: str, row: str) -> dict[str, float]:
    """Table 1's differences to the baseline in points."""
    base, own = MAIN[model]["base"], MAIN[model][row]
    return {column: round(own[column] - base[column], 2) for column in COLUMNS}


def under_one_band(name: str, band: str) -> float:
    """All clusters under one band: the mean of their figures, weighted by samples."""
    clusters = CLUSTERS[name]
    return sum(n * scores[band] for n, scores in clusters) / sum(n for n, _ in clusters)


def under_best_bands(name: str) -> float:
    """Each cluster under the band that is best on these very samples, weighted by samples."""
    clusters = CLUSTERS[name]
    return sum(n * max(scores.values()) for n, scores in clusters) / sum(n for n, _ in clusters)
