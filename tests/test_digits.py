"""Numbers of the product that a rewrite may not change, recorded in digits.json: the settings of
each recipe, rewards, advantages and losses, the first step of each recipe, what BM25 finds.

    python tests/test_digits.py    records them again: in a commit of its own that says why
"""

import json
import math
from dataclasses import asdict
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import chat_server, rows_of

import rollout
import train
from flags import resolve
from papers import PAPERS, PROTOCOLS, record_of
from policy import Batch, Policy, save_policy
from retriever import BM25
from rewards import example, reward_terms
from settings import ALGORITHMS, Settings
from update import ALGORITHMS as FORMULAS
from world.toy import make_model, make_tokenizer
from world.world import World

RECORDED = Path(__file__).with_name("digits.json")
WORLD = World(0)


def recipes() -> dict:
    """{recipe, variant, stage, tiny or not: settings that differ from the defaults}"""
    defaults, found = asdict(Settings()), {}
    for recipe, paper in PAPERS.items():
        for variant, tiny in product(["", *paper.variants], (False, True)):
            for stage in record_of(recipe, variant).stages:
                settings = asdict(resolve(recipe, stage, tiny, {"variant": variant}))
                changed = {k: v for k, v in settings.items() if v != defaults[k]}
                found[f"{recipe} {variant} {stage} {'tiny' * tiny}"] = changed
    return found


def embed(queries: list[str]) -> torch.Tensor:
    """Counts the words of two lengths, instead of an encoder."""
    counts = [[1.0, *(sum(len(w) == n for w in q.split()) for n in (4, 7))] for q in queries]
    return torch.nn.functional.normalize(torch.tensor(counts), dim=1)


def rewards() -> dict:
    """{reward, protocol, answer, searches: terms of a made-up trajectory}"""
    protocols = {
        stage["reward"]: next(iter(paper.protocols))
        for paper in PAPERS.values()
        for stage in paper.stages.values()
    }
    found = {}
    for reward, protocol in protocols.items():
        for answer, searches in product(("Norland", "Kaldor"), range(3)):
            row = example(PROTOCOLS[protocol], answer, searches)
            outside = {"step": 3, "reader_answer": "Norland", "embed": embed}
            terms = reward_terms(reward, row, outside)
            found[f"{reward} {answer} {searches}"] = terms
    return found


def losses() -> dict:
    """{algorithm, aggregation, KL: sums of what an update computes}"""
    torch.manual_seed(0)
    shape = (8, 9)
    mask = (torch.rand(shape) < 0.7).float()
    old, ref, values, new = -torch.rand(4, *shape, dtype=torch.float64)
    given = torch.tensor([0.0, 1, 0.5, 1, 2, 2, -1, 0], dtype=torch.float64)
    found = {}
    names = product(ALGORITHMS, ("sequence", "token", "question"), ("", "k1", "k2", "k3"))
    for algorithm, aggregation, kl in names:
        kls = {"kl_coef": 0.1, "kl_estimator": kl} if kl else {}
        s = Settings(algorithm=algorithm, loss_aggregation=aggregation, group_size=4, **kls)
        batch = Batch(torch.zeros(8, 10, dtype=torch.long), mask, old, given, 4)
        batch.questions, batch.overlong = torch.arange(8) // 4, torch.arange(8) == 6
        batch.ref_logprobs, batch.values = ref if kl else None, values
        batch.advantages = FORMULAS[algorithm].compute_advantages(batch, s)
        batch.token_weights = FORMULAS[algorithm].compute_token_weights(batch, s)
        logprobs = new.clone().requires_grad_()
        loss, _ = FORMULAS[algorithm].compute_loss(logprobs, batch, s)
        loss = (batch.token_weights * loss).sum()
        loss.backward()
        cells = torch.arange(72.0).view(shape).sin()  # a sum alone would not see an exchange
        tensors = [batch.advantages * mask, batch.token_weights, logprobs.grad]
        sums = [(x * cells).sum().item() for x in tensors]
        found[f"{algorithm} {aggregation} {kl}"] = [loss.item(), *sums]
    return found


def found_documents() -> dict:
    """{query: the first five documents and their scores}"""
    index = BM25(WORLD.documents, title_boost=4)
    questions = WORLD.questions("train", "two_hop")[:10]
    queries = [question.question for question in questions]
    return {
        query: [[document.id, score] for document, score in zip(documents, scores, strict=True)]
        for query, (documents, scores) in zip(queries, ranked(index, queries), strict=True)
    }


def ranked(index: BM25, queries: list[str]):
    for query in queries:
        scores = index.scores(query)
        best = sorted(range(len(scores)), key=lambda n: (-scores[n], n))[:5]
        yield [WORLD.documents[n] for n in best], [float(scores[n]) for n in best]


def scripted(policy, environment, rows) -> list[rollout.Turn]:
    """Plays the trajectory of `rewards.example` instead of sampling a turn: row b of a step has
    b % 3 searches, and every second answer is wrong.
    """
    turns = []
    protocol = environment.protocol
    for row in rows:
        index = environment.order.setdefault(id(row), len(environment.order))
        answer = row.question.answers[0] if index % 2 else "Norland"
        written = example(protocol, answer, index % 3).segments
        texts = [segment.text for segment in written if segment.writer == "model"]
        text = texts[len(row.searches)] if protocol.query_tags else texts[0]
        ids = rollout.encode(environment.tokenizer, text)
        ends = protocol.query_tags and text.rstrip().endswith(protocol.query_tags[1])
        turns.append(rollout.Turn(99, ids, [-1.0] * len(ids), "query" if ends else "eos"))
    return turns


STEP = """--steps 1 --group_size 3 --questions_per_step 2 --max_turn_tokens 120 --engine hf
    --lr 1e-3 --trajectories_per_update 0 --mix one_hop=1,two_hop=1 --max_context 256"""
SEARCHES = " --max_searches 2 --documents_per_search 1 --document_tokens 40"


def first_steps(folder: Path) -> dict:
    """{recipe, stage: metrics of a step of a random model on scripted trajectories}"""
    tokenizer = make_tokenizer(*PROTOCOLS.values())
    save_policy(Policy(make_model(len(tokenizer), seed=0)), tokenizer, folder / "model")
    found = {}
    with chat_server(lambda *_: "Norland") as reader:
        for recipe, paper in PAPERS.items():
            for stage in paper.stages:
                more = f"{STEP} --recipe {recipe} --stage {stage} --run_name {recipe}"
                more += f" --model {folder / 'model'} --output_dir {folder}"
                more += SEARCHES * (recipe != "arena")
                more += f" --reader {reader}" * (recipe == "r_search")
                more += " --task_mixing false" * (recipe in ("ur2", "ur2_choice"))
                more += " --reward ur2_weak" * (recipe == "ur2_choice")
                with (
                    patch.object(rollout, "sample_turns", scripted),
                    patch.object(rollout.Environment, "order", {}, create=True),
                ):
                    train.main(more.split())
                (metrics,) = rows_of(folder / recipe / f"stage{stage}")
                found[f"{recipe} {stage}"] = metrics
    return found


PARTS = {"recipes": recipes, "rewards": rewards, "losses": losses, "documents": found_documents}
PARTS["steps"] = first_steps


def equal(one, other) -> bool:
    """Whether two values are equal, numbers up to 1e-6."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return one == other


@pytest.mark.parametrize("part", PARTS)
def test_the_numbers_are_those_that_were_recorded(part, tmp_path):
    recorded = json.loads(RECORDED.read_text())[part]
    given = (tmp_path,) if part == "steps" else ()
    now = json.loads(json.dumps(PARTS[part](*given)))
    assert now.keys() == recorded.keys()
    assert not [name for name in now if not equal(now[name], recorded[name])]


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        now = {part: make(*[Path(folder)] * (part == "steps")) for part, make in PARTS.items()}
    RECORDED.write_text(json.dumps(now, indent=0, sort_keys=True) + "\n")
