"""Protocol -> what the tiny world has to know of its paper."""

from world.toy import Tiny

TWO_FACTS = {"one_hop": 0.5, "two_hop": 0.5}

# search, read the summary (or the fallback), write \boxed{...}
UR2 = Tiny(
    end="{asked} \\boxed{{ {answer}}}<eos>",
    read=" \\boxed{{ {answer}}}",
    summarised=True,
)

PAPERS_TINY = {
    "ur2": UR2,
    "ur2_search": UR2,
    # the same over the passage itself
    "r1_searcher": Tiny(end="{thought}</think>\n\n<answer> {answer}</answer>"),
    # two passages a search; copy the one that counts as evidence, answer from it
    "r_search": Tiny(
        end="{evidence}<answer> {answer}</answer>",
        layout="facts",
        kinds=TWO_FACTS,
        steps=300,
    ),
    # think, search, reflect, answer
    "when_to_search": Tiny(
        opening="<think>{asked}</think>",
        between="<reflect>{note}</reflect>",
        no_note=" none",
        end="<reflect>{asked} {answer}</reflect><answer> {answer}</answer>",
        end_at_once="<answer> {answer}</answer>",
    ),
    # four numbered references in the prompt; cite, analyse, answer
    "arena": Tiny(
        citation="<relevance>[{numbers}]",
        analysis="<analysis>{note}{thought}</analysis>",
        end="{citation}</relevance>{analysis}<answer> {answer}</answer>",
        layout="facts",
        kinds=TWO_FACTS,
        practice=0.65,
        steps=900,
        decay_from=0.75,
    ),
}
