"""Prints a Markdown table of the settings of each recipe and stage: `python -m papers`. The source
is that of the paper's own values; docs/papers.md says which values are ours.
"""

from papers import PAPERS, record_of


def main() -> None:
    """Prints the table. A variant shows only the settings that differ from its paper's."""
    print("paper | stage | settings | source\n--- | --- | --- | ---")
    for name, paper in PAPERS.items():
        for variant in ("", *paper.variants):
            for stage, settings in record_of(name, variant).stages.items():
                usual = paper.stages.get(stage, {}) if variant else {}
                changed = [key for key in usual | settings if settings.get(key) != usual.get(key)]
                shown = ", ".join(f"{key} {settings.get(key, 'by default')}" for key in changed)
                named = f"{name}:{variant}".strip(":")
                print(named, stage, shown or "the same", paper.source, sep=" | ")


if __name__ == "__main__":
    main()
