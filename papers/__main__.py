"""Prints a Markdown table of the settings of each recipe and stage: `python -m papers`. The source
is that of the paper's own values; docs/papers.md says which values are ours.
"""

from papers import PAPERS


def main() -> None:
    """Prints the table. A variant shows only what it changes: in all stages, or after the number
    of one.
    """
    print("paper | stage | settings | source\n--- | --- | --- | ---")
    for name, paper in PAPERS.items():
        rows = [(name, stage, settings) for stage, settings in paper.stages.items()]
        rows += [(f"{name}:{variant}", "", own) for variant, own in paper.variants.items()]
        for named, stage, settings in rows:
            shown = ", ".join(f"{key} {value}" for key, value in settings.items())
            print(named, stage, shown, paper.source, sep=" | ")


if __name__ == "__main__":
    main()
