"""Prints a Markdown table of the settings of each paper and stage: `python -m papers`."""

from collections import defaultdict

from papers import PAPERS


def main() -> None:
    """Prints a Markdown table of the settings of each paper and stage. A variant shows only the
    settings that differ from its paper's. Stages that show the same settings share a row.
    """
    print("paper | stage | settings | source\n--- | --- | --- | ---")
    for name, paper in PAPERS.items():
        for variant, own in {"": paper, **paper.variants}.items():
            stages = defaultdict(list)  # the settings, as text -> the stages that have them
            for stage, settings in own.stages.items():
                usual = paper.stages.get(stage, {}) if variant else {}
                changed = [key for key in usual | settings if settings.get(key) != usual.get(key)]
                shown = ", ".join(f"{key} {settings.get(key, 'by default')}" for key in changed)
                stages[shown or "the same"].append(str(stage))
            for shown, numbers in stages.items():
                named = f"{name}:{variant}".strip(":")
                print(named, ", ".join(numbers), shown, own.source, sep=" | ")


if __name__ == "__main__":
    main()
